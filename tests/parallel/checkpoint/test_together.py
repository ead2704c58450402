"""What one rank sees differently, or cannot do, beside a checkpoint: the ranks go on alike, or all raise."""

from __future__ import annotations

import dataclasses
import errno
import json
import logging
import os
import stat
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import pytest

from mpidist.checkpoint.checkpoint import Checkpoint
from mpidist.checkpoint.directory.lock import this_process
from mpidist.checkpoint.directory.state import STATE_FILE
from mpidist.checkpoint.file.saved import SavedArray
from mpidist.checkpoint.manager import CheckpointManager, latest_checkpoint
from mpidist.comm.group.communicator import Communicator
from mpidist.errors import CheckpointError, DamagedCheckpointError, MismatchError, is_shared
from mpidist.optimizers import Adam
from mpidist.options import VariableSynchronization
from mpidist.variables.making.creation import create_variable
from tests.helpers.strategies import make_arena

pytestmark = pytest.mark.mpi


@pytest.mark.mpi(min_size=2)
def test_directories_and_paths_must_be_the_same(communicator: Communicator, mpi_tmp_path: Path) -> None:
    checkpoint = Checkpoint(v=create_variable(make_arena(communicator), 1.0))
    own = mpi_tmp_path / f"of-{communicator.rank % 2}"
    manager = CheckpointManager(checkpoint, own, 1)
    for act in (manager.save, manager.restore_or_initialize):
        with pytest.raises(MismatchError, match=r"directory, name and number .*of-0.* on rank.*of-1.*Pass the same"):
            act()
    with pytest.raises(MismatchError, match=r"the path of a checkpoint must be the same .*of-0.* on rank.*of-1"):
        checkpoint.write(own / "c")
    with pytest.raises(MismatchError, match=r"the path of a checkpoint must be the same"):
        checkpoint.save(own / "c")
    with (
        CheckpointManager(checkpoint, mpi_tmp_path, 1) as same,
        pytest.raises(MismatchError, match="directory, name and number"),
    ):
        same.save(checkpoint_number=communicator.rank % 2)
    communicator.barrier()
    assert os.listdir(mpi_tmp_path) == []


@pytest.mark.parametrize("victim", ["first", "last"])
def test_an_odd_number_on_one_rank_is_an_error_of_all(
    communicator: Communicator, mpi_tmp_path: Path, victim: str
) -> None:
    rank = 0 if victim == "first" else communicator.size - 1
    checkpoint = Checkpoint(v=create_variable(make_arena(communicator), 1.0))
    number: Any = 2.5 if communicator.rank == rank else 3
    with (
        CheckpointManager(checkpoint, mpi_tmp_path, 1) as manager,
        pytest.raises(TypeError, match="`checkpoint_number` must be an integer"),
    ):
        manager.save(checkpoint_number=number)


def test_clocks_may_differ(communicator: Communicator, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0's clock and its view of the directory count; other ranks' lists of checkpoints are the same."""
    clock = [1e9 + 7200.0 * communicator.rank]
    monkeypatch.setattr(time, "time", lambda: clock[0])
    checkpoint = Checkpoint(v=create_variable(make_arena(communicator), 1.0))
    with CheckpointManager(checkpoint, mpi_tmp_path, 1, keep_checkpoint_every_n_hours=1) as manager:
        for _ in range(4):
            clock[0] += 1800 * (1 + communicator.rank)
            manager.save()
            everyone = communicator.all_gather_object(manager._files.state)
            assert everyone.count(everyone[0]) == communicator.size
    assert sorted(name for name in os.listdir(mpi_tmp_path) if name.endswith(".h5")) == ["ckpt-2.h5", "ckpt-4.h5"]


@pytest.mark.mpi(min_size=2)
def test_a_rank_that_reads_an_old_state_file_goes_on_with_the_others(
    communicator: Communicator, mpi_tmp_path: Path
) -> None:
    checkpoint = Checkpoint(v=create_variable(make_arena(communicator), 1.0))
    # The last rank looks into the directory before anything is there.
    late = CheckpointManager(checkpoint, mpi_tmp_path, 2) if communicator.rank == communicator.size - 1 else None
    with CheckpointManager(checkpoint, mpi_tmp_path, 2) as manager:
        for _ in range(2):
            manager.save()
    with late or CheckpointManager(checkpoint, mpi_tmp_path, 2) as manager:
        manager.save()
        assert [os.path.basename(path) for path in manager.checkpoints] == ["ckpt-2.h5", "ckpt-3.h5"]
        assert manager.restore_or_initialize() == str(mpi_tmp_path / "ckpt-3.h5")


def test_a_manager_does_not_follow_the_program_to_another_directory(
    communicator: Communicator, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = Checkpoint(v=create_variable(make_arena(communicator), 1.0))
    here, there = mpi_tmp_path / "here", mpi_tmp_path / "there"
    for place in (here, there):
        place.mkdir(exist_ok=True)
        monkeypatch.chdir(place)
        with CheckpointManager(checkpoint, "run", None if place == there else 1) as manager:
            manager.save(1)
            manager.save(2)
    monkeypatch.chdir(here)
    with CheckpointManager(checkpoint, "run", 1) as manager:
        # One rank is enough.
        monkeypatch.chdir(there if communicator.rank == communicator.size - 1 else here)
        for act in (manager.save, manager.restore_or_initialize):
            with pytest.raises(CheckpointError, match=r"was expected to be '.*here/run' .*, got '.*there/run'"):
                act()
        communicator.barrier()
        assert sorted(os.listdir(there / "run")) == ["checkpoint", "ckpt-1.h5", "ckpt-2.h5"]
        monkeypatch.chdir(here)
        assert manager.save(3) == "run/ckpt-3.h5"


@pytest.mark.mpi(min_size=2)
def test_ranks_in_different_directories_get_an_error_that_says_so(
    communicator: Communicator, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = mpi_tmp_path / str(communicator.rank)
    place.mkdir()
    monkeypatch.chdir(place)
    checkpoint = Checkpoint(v=create_variable(make_arena(communicator), 1.0))
    with pytest.raises(FileNotFoundError, match=r"rank 0 has made 'run/.*tmp', and this rank .*/1'"):
        checkpoint.save("run/c")
    communicator.barrier()
    assert not list(mpi_tmp_path.glob("*/run/*"))


@pytest.mark.parametrize("victim", ["first", "last"])
def test_a_rank_that_cannot_open_the_file_makes_all_raise(
    communicator: Communicator, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: str
) -> None:
    v = create_variable(make_arena(communicator), 1.0)
    path = Checkpoint(v=v).write(mpi_tmp_path / "c")
    v.assign(5.0)
    original, rank = os.open, 0 if victim == "first" else communicator.size - 1

    def fail(name: Any, *arguments: Any, **options: Any) -> int:
        if communicator.rank == rank and str(name) == path:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return original(name, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", fail)
        with pytest.raises(PermissionError, match="Permission denied") as caught:
            Checkpoint(v=v).read(path)
    assert communicator.size == 1 or is_shared(caught.value)
    assert v.numpy() == 5.0
    Checkpoint(v=v).read(path).assert_consumed()


def test_a_file_that_is_replaced_while_the_ranks_open_it_is_an_error_of_all(
    communicator: Communicator, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    v, w = create_variable(make_arena(communicator), 1.0), create_variable(make_arena(communicator), np.ones(5000))
    checkpoint = Checkpoint(v=v, w=w)
    path = checkpoint.write(mpi_tmp_path / "best")
    v.assign(2.0)
    newer = checkpoint.write(mpi_tmp_path / "newer")
    v.assign(5.0)
    original = os.open

    def open_later(name: Any, *arguments: Any, **options: Any) -> int:
        if communicator.rank == communicator.size - 1 and str(name) == path:
            os.replace(newer, path)
        return original(name, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", open_later)
        with pytest.raises(CheckpointError, match=r"got another one, .* restore it again"):
            checkpoint.read(path)
    assert v.numpy() == 5.0
    checkpoint.read(path).assert_consumed()
    assert v.numpy() == 2.0


class Choosy:
    """An object with state that takes none on one rank."""

    def __init__(self, error: tuple[Any, ...] | None) -> None:
        self.error = error
        self.taken = 0

    def state(self) -> dict[str, int]:
        return {"number": 7}

    def load_state(self, saved: Any) -> None:
        if self.error:
            kind, *arguments = self.error
            raise kind(*arguments)
        self.taken = int(saved["number"].numpy())


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        ((ValueError, "no"), CheckpointError, r"restoring 'b' failed on rank 1 .*cannot load: ValueError: no"),
        ((OSError, errno.EIO, "no disk"), OSError, r"restoring 'b' failed on rank 1 .*no disk"),
    ],
)
def test_an_object_that_takes_no_state_on_one_rank_makes_all_raise(
    communicator: Communicator, mpi_tmp_path: Path, error: Any, kind: type[Exception], text: str
) -> None:
    variable, after = create_variable(make_arena(communicator), 1.0), Choosy(None)
    checkpoint = Checkpoint(b=Choosy(error if communicator.rank == 1 else None), c=after, v=variable)
    path = checkpoint.write(mpi_tmp_path / "c")
    variable.assign(2.0)
    with pytest.raises(kind, match=text) as raised:
        checkpoint.restore(path)
    assert is_shared(raised.value)
    # The ranks are at one place, and go on together.
    assert communicator.all_gather_object((float(variable.numpy()), after.taken)) == [(2.0, 0)] * communicator.size


class Loading:
    """Its variable is loaded by its own hands; on one rank it fails before that."""

    def __init__(self, communicator: Communicator, *, fails: bool) -> None:
        self.variable = create_variable(make_arena(communicator), np.ones(3))
        self.fails = fails

    def state(self) -> dict[str, Any]:
        return {"content": self.variable}

    def load_state(self, saved: Any) -> None:
        if self.fails:
            raise OSError(errno.EIO, "no disk")
        self.variable.load(saved["content"].read)


@pytest.mark.mpi(min_size=2)
def test_an_object_that_fails_before_ranks_load_makes_all_raise(
    communicator: Communicator, mpi_tmp_path: Path
) -> None:
    """The others meet it where they read, and the ranks are at one place afterwards."""
    loading = Loading(communicator, fails=communicator.rank == 1)
    checkpoint = Checkpoint(loading=loading)
    path = checkpoint.write(mpi_tmp_path / "c")
    for _ in range(2):
        with pytest.raises(OSError, match=r"failed on rank 1 .*no disk") as raised:
            checkpoint.restore(path)
        assert is_shared(raised.value)
    assert communicator.all_gather_object(communicator.rank) == list(range(communicator.size))
    loading.fails = False
    checkpoint.restore(path)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("how", ["error", "short"])
def test_a_read_that_fails_on_one_rank_is_an_error_of_all(
    communicator: Communicator, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Whichever it is: some lie between calls of the ranks, in an optimizer for instance."""
    arena = make_arena(communicator)
    variable = create_variable(arena, np.ones(5), name="v")
    optimizer = Adam(0.5, use_ema=True, gradient_accumulation_steps=2)
    optimizer.apply_gradients([(np.ones(5), variable)])
    component = create_variable(arena, np.ones(3), synchronization=VariableSynchronization.ON_READ)
    checkpoint = Checkpoint(v=variable, optimizer=optimizer, component=component, random=np.random.default_rng(5))
    path = checkpoint.save(mpi_tmp_path / "c")
    read, counts = SavedArray.read, [0, 0]

    def fail_once(self: SavedArray, start: int, stop: int) -> Any:
        counts[0] += 1
        if counts[0] != counts[1] or communicator.rank != communicator.size - 1:
            return read(self, start, stop)
        if how == "error":
            raise OSError(errno.EIO, "no disk")
        return read(self, start, stop)[:-1]

    monkeypatch.setattr(SavedArray, "read", fail_once)
    checkpoint.restore(path)
    # Slices may be empty, and ranks read as many.
    assert len(set(communicator.all_gather_object(counts[0]))) == 1
    for failing in range(1, counts[0] + 1):
        counts[:] = 0, failing
        with pytest.raises((OSError, CheckpointError, ValueError)) as raised:
            checkpoint.restore(path)
        assert len(set(communicator.all_gather_object(str(raised.value)))) == 1
    counts[:] = 0, 0
    checkpoint.restore(path)
    np.testing.assert_array_equal(variable.numpy(), np.ones(5))


@pytest.mark.parametrize("way_out", ["restore", "restore_new", "end_waiting"])
def test_what_was_restored_half_way_is_not_saved(
    communicator: Communicator, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way_out: str
) -> None:
    arena = make_arena(communicator)
    a, b = create_variable(arena, np.ones(9)), create_variable(arena, np.ones(9))
    checkpoint = Checkpoint(a=a, b=b)
    with CheckpointManager(checkpoint, mpi_tmp_path, 1) as manager:
        path = manager.save()
        a.assign(np.full(9, 2.0))
        b.assign(np.full(9, 2.0))
        read = SavedArray.read

        def fail(self: SavedArray, start: int, stop: int) -> Any:
            if self.name == "b" and communicator.rank == communicator.size - 1:
                raise OSError(errno.EIO, "no disk")
            return read(self, start, stop)

        with monkeypatch.context() as patch:
            patch.setattr(SavedArray, "read", fail)
            with pytest.raises(OSError, match="no disk"):
                checkpoint.restore(path)
        assert (a[0], b[0]) == (1.0, 2.0)
        for act in (manager.save, lambda: checkpoint.save(mpi_tmp_path / "other")):
            with pytest.raises(CheckpointError, match=r"ckpt-1\.h5' has failed half-way: .*Restore it again"):
                act()
        communicator.barrier()
        assert sorted(os.listdir(mpi_tmp_path)) == ["checkpoint", "checkpoint.lock", "ckpt-1.h5"]
        communicator.barrier()
        pending = checkpoint.pending
        assert pending is not None
        if way_out == "restore":
            manager.restore_or_initialize()
        elif way_out == "restore_new":
            pending.restore_new().assert_consumed()
        else:
            pending.end_waiting()
        assert checkpoint.pending is None
        assert (a[0], b[0]) == (1.0, 2.0 if way_out == "end_waiting" else 1.0)
        assert manager.save() == str(mpi_tmp_path / "ckpt-2.h5")


@pytest.mark.mpi(min_size=2)
def test_paths_to_restore_must_be_the_same(communicator: Communicator, mpi_tmp_path: Path) -> None:
    variable = create_variable(make_arena(communicator), 1.0)
    checkpoint = Checkpoint(v=variable)
    first = checkpoint.save(mpi_tmp_path / "c")
    variable.assign(2.0)
    second = checkpoint.save(mpi_tmp_path / "c")
    with pytest.raises(MismatchError, match=r"the path of a checkpoint must be the same .*c-1.h5' on rank 0 and .*c-2"):
        checkpoint.restore(second if communicator.rank == 1 else first)
    assert variable.numpy() == 2


@pytest.mark.parametrize("how", ["save", "manager"])
def test_without_a_state_file_the_new_checkpoint_goes_too(
    communicator: Communicator, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    checkpoint = Checkpoint(v=create_variable(make_arena(communicator), 1.0))
    with CheckpointManager(checkpoint, mpi_tmp_path, 2) as manager:
        manager.save()

        def act(number: int | None = None) -> Any:
            return checkpoint.save(mpi_tmp_path / "ckpt") if how == "save" else manager.save(number)

        communicator.barrier()
        before = {name: (mpi_tmp_path / name).read_bytes() for name in os.listdir(mpi_tmp_path)}
        original = os.replace

        def fail(source: Any, target: Any) -> None:
            if os.path.basename(target) == STATE_FILE:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            original(source, target)

        communicator.barrier()
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", fail)
            with pytest.raises(OSError, match="No space left"):
                act()
            communicator.barrier()
            assert {name: (mpi_tmp_path / name).read_bytes() for name in os.listdir(mpi_tmp_path)} == before
            if how == "manager":
                # One that takes the place of a checkpoint which the state file names must stay.
                with pytest.raises(OSError, match="No space left"):
                    act(1)
        assert latest_checkpoint(mpi_tmp_path) == str(mpi_tmp_path / "ckpt-1.h5")
        assert act() == str(mpi_tmp_path / "ckpt-2.h5")


@pytest.mark.parametrize("how", ["save", "manager"])
def test_names_are_on_the_disk_before_others_name_them(
    communicator: Communicator, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """The file, its name, the state file and its name are synced in this order, each after it is written."""
    log: list[str] = []
    fsync, replace, pwrite = os.fsync, os.replace, os.pwrite

    def note_sync(descriptor: int) -> None:
        is_directory = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        log.append("sync directory" if is_directory else "sync file")
        fsync(descriptor)

    def note_replace(source: Any, target: Any) -> None:
        log.append(f"rename {os.path.basename(target)}")
        replace(source, target)

    def note_write(descriptor: int, data: Any, offset: int) -> int:
        log.append("write")
        return pwrite(descriptor, data, offset)

    # So large that each of four ranks has a piece of it to write.
    checkpoint = Checkpoint(v=create_variable(make_arena(communicator), np.ones(1 << 19)))
    with CheckpointManager(checkpoint, mpi_tmp_path, 2) as manager, monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", note_write)
        patch.setattr(os, "fsync", note_sync)
        patch.setattr(os, "replace", note_replace)
        if how == "manager":
            manager.save()
        else:
            checkpoint.save(mpi_tmp_path / "ckpt")
    if communicator.rank == 0:
        renamed = log.index("rename ckpt-1.h5")
        assert log[renamed - 2 : renamed] == ["write", "sync file"]
        assert log[renamed + 1 :] == ["sync directory", "write", "sync file", "rename checkpoint", "sync directory"]
    else:
        assert log[-1] == "sync file"
        assert {*log} <= {"write", "sync file"}


@pytest.mark.parametrize("length", [1, 85, 86, 171, 187, 255, 256, 257, 341, 512, 513, 700])
def test_components_of_any_size_are_written(communicator: Communicator, mpi_tmp_path: Path, length: int) -> None:
    """Also one that lies in the middle of a page, or over the edge of one, between those of other ranks."""
    arena = make_arena(communicator)
    options: dict[str, Any] = {"synchronization": VariableSynchronization.ON_READ}
    saved = create_variable(arena, np.zeros(length), **options)
    mine = np.arange(length) + 1000.0 * (1 + communicator.rank)
    saved.load(lambda start, stop: mine[start:stop])
    path = Checkpoint(v=saved).write(mpi_tmp_path / "c")
    with h5py.File(path) as file:
        expected = [np.arange(length) + 1000.0 * (1 + rank) for rank in range(communicator.size)]
        np.testing.assert_array_equal(file["v"][:], expected)
    fresh = create_variable(arena, np.zeros(length), **options)
    Checkpoint(v=fresh).read(path).assert_consumed()
    np.testing.assert_array_equal(fresh.reader()(0, length), mine)


def test_all_go_on_with_the_checkpoint_before_a_damaged_one(communicator: Communicator, mpi_tmp_path: Path) -> None:
    v = create_variable(make_arena(communicator), np.zeros(3000))
    with CheckpointManager(Checkpoint(v=v), mpi_tmp_path, None) as manager:
        for value in (1.0, 2.0, 3.0):
            v.assign(np.full(3000, value))
            manager.save()
        communicator.barrier()
        if communicator.rank == 0:
            path = mpi_tmp_path / "ckpt-3.h5"
            with h5py.File(path) as file:
                at = file["v"].id.get_offset() + 20_000
            content = bytearray(path.read_bytes())
            content[at] ^= 1
            path.write_bytes(content)
        communicator.barrier()
        with pytest.raises(DamagedCheckpointError, match=r"ckpt-3\.h5' is damaged: .*fallback=True") as caught:
            manager.restore_or_initialize()
        assert communicator.size == 1 or is_shared(caught.value)
        assert manager.restore_or_initialize(fallback=True) == str(mpi_tmp_path / "ckpt-2.h5")
    assert (v.numpy() == 2.0).all()


def test_a_plain_array_is_an_error_of_all(communicator: Communicator, mpi_tmp_path: Path) -> None:
    class Model:
        def __init__(self) -> None:
            self.v = create_variable(make_arena(communicator), 1.0)
            self.mean = np.zeros(3) if communicator.rank == communicator.size - 1 else None

    with pytest.raises(ValueError, match=r"'m/mean': .* got an array of shape \(3,\)") as caught:
        Checkpoint(m=Model()).save(mpi_tmp_path / "c")
    assert communicator.size == 1 or is_shared(caught.value)


@pytest.mark.mpi(min_size=2)
def test_random_generators_that_differ_are_an_error(communicator: Communicator, mpi_tmp_path: Path) -> None:
    v = create_variable(make_arena(communicator), 1.0)
    Checkpoint(v=v, rng=np.random.default_rng(1)).write(mpi_tmp_path / "c")
    with pytest.raises(MismatchError, match=r"'rng/content'.* on rank 0.*a row for each rank"):
        Checkpoint(v=v, rng=np.random.default_rng(communicator.rank)).write(mpi_tmp_path / "c")


def test_save_needs_the_directorys_lock(communicator: Communicator, mpi_tmp_path: Path) -> None:
    if communicator.rank == 0:
        start = int(Path("/proc/1/stat").read_text().rpartition(")")[2].split()[19])
        first = dataclasses.replace(this_process(), process=1, started=start)
        (mpi_tmp_path / "checkpoint.lock").write_text(json.dumps(dataclasses.asdict(first)))
    communicator.barrier()
    with pytest.raises(CheckpointError, match="another job saves"):
        Checkpoint(v=create_variable(make_arena(communicator), 1.0)).save(mpi_tmp_path / "c")
    communicator.barrier()
    assert os.listdir(mpi_tmp_path) == ["checkpoint.lock"]


def test_the_first_rank_warns_of_numbers_that_have_changed(
    communicator: Communicator, mpi_tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = SimpleNamespace(v=create_variable(make_arena(communicator), 1.0), epoch=0, seconds=0.0)
    checkpoint = Checkpoint(trainer=trainer)
    # Numbers may differ between the ranks: they are no part of what is saved.
    trainer.epoch, trainer.seconds = 1, 0.5 * communicator.rank
    with caplog.at_level(logging.WARNING, "mpidist"):
        checkpoint.save(mpi_tmp_path / "c")
        checkpoint.save(mpi_tmp_path / "c")
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == (communicator.rank == 0)
    assert all("does not hold 'trainer/epoch': plain numbers" in text for text in texts)
