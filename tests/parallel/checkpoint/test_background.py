"""Saves in the background on several ranks: the same file as in the foreground, and the errors of one rank on all."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpidist.checkpoint import transfer
from mpidist.checkpoint.background import copying, marks, save, together
from mpidist.checkpoint.checkpoint import Checkpoint
from mpidist.checkpoint.manager import CheckpointManager, latest_checkpoint
from mpidist.comm.group.communicator import Communicator
from mpidist.errors import is_shared
from mpidist.variables.making.creation import create_variable
from tests.helpers.strategies import ArenaStrategy, make_arena

pytestmark = pytest.mark.mpi


def mixture(communicator: Communicator) -> dict[str, Any]:
    """Of all kinds: small and large, a component for each rank, what is summed for the save, and the bits of others."""
    arena = make_arena(communicator)
    numbers = np.random.default_rng(0)
    separate: dict[str, Any] = {"synchronization": "ON_READ", "aggregation": "NONE"}
    summed: dict[str, Any] = {"synchronization": "ON_READ", "aggregation": "SUM"}
    objects: dict[str, Any] = {
        "large": create_variable(arena, numbers.normal(size=700_001)),
        "small": create_variable(arena, np.arange(5, dtype=np.int16)),
        "flags": create_variable(arena, np.array([True, False])),
        "empty": create_variable(arena, np.zeros((0, 3))),
    }
    for size in (3, 1000, 1024, 1300, 300_000):
        objects[f"apart_{size}"] = create_variable(arena, np.zeros(size, np.float32), **separate)
        # A variable begins with the first rank's values.
        objects[f"apart_{size}"].accumulate(np.arange(size, dtype=np.float32) + 1000 * (1 + communicator.rank))
        objects[f"sum_{size}"] = create_variable(arena, np.full(size, 2.0), **summed)
    return objects


def test_the_file_is_that_of_the_foreground_whatever_comes_after(
    communicator: Communicator, mpi_tmp_path: Path
) -> None:
    objects = mixture(communicator)
    checkpoint = Checkpoint(**objects)
    path = Path(checkpoint.write(mpi_tmp_path / "front", metadata={"n": 1}))
    behind = Path(checkpoint.write(mpi_tmp_path / "behind", metadata={"n": 1}, background=True))
    for value in objects.values():
        if value.dtype != np.bool_:
            value.assign(np.full(value.shape, 7, value.dtype))
    checkpoint.sync()
    assert path.read_bytes() == behind.read_bytes()
    checkpoint.read(behind).assert_consumed()
    assert objects["small"].numpy().tolist() == list(range(5))
    communicator.barrier()
    assert sorted(os.listdir(mpi_tmp_path)) == ["behind.h5", "front.h5"]


@pytest.mark.parametrize("what", ["share", "mark", "name"])
@pytest.mark.parametrize("victim", ["first", "last"])
def test_an_error_of_one_rank_is_raised_on_all_by_the_next_call(
    communicator: Communicator, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: str, what: str
) -> None:
    v = create_variable(make_arena(communicator), np.full(900_000, 1.0))
    manager = CheckpointManager(Checkpoint(v=v), mpi_tmp_path / "run", 1, background=True, skip_while_saving=True)
    good = manager.save()
    manager.sync()
    bad = 0 if victim == "first" or what == "name" else communicator.size - 1
    if communicator.rank == bad:
        def fail(*_: Any) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        if what == "share":
            monkeypatch.setattr(copying, "write_pieces", fail)
        elif what == "mark" and bad:
            monkeypatch.setattr(save, "leave_mark", fail)
        else:
            monkeypatch.setattr(save, "publish", fail)
    assert manager.save(), "the error came before the next call"
    v.assign(np.full(900_000, 2.0))

    def save_until_one_is_not_left_out() -> None:
        # No rank waits without end for one that has failed.
        while manager.save() is None:
            pass

    with pytest.raises(OSError, match="No space left") as caught:
        save_until_one_is_not_left_out()
    assert is_shared(caught.value) or communicator.size == 1
    assert caught.value.errno == errno.ENOSPC
    monkeypatch.undo()
    assert manager.checkpoint.save_counter == 1
    assert manager.checkpoints == [good]
    assert manager.save() == str(mpi_tmp_path / "run" / "ckpt-2.h5")
    manager.close()
    communicator.barrier()
    assert sorted(os.listdir(mpi_tmp_path / "run")) == ["checkpoint", "ckpt-2.h5"]


@pytest.mark.mpi(min_size=2)
def test_a_rank_that_cannot_even_leave_a_mark_keeps_no_other_checkpoint_waiting(
    communicator: Communicator, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk of a rank is full. The first rank waits for its mark before it works on the same directory."""
    arena = make_arena(communicator)
    objects = {name: Checkpoint(v=create_variable(arena, np.full(900_000, 1.0))) for name in ("full", "other")}
    managers = {name: CheckpointManager(one, mpi_tmp_path, 2) for name, one in objects.items()}
    if communicator.rank == communicator.size - 1:
        def fail(*_: Any) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(copying, "write_pieces", fail)
        monkeypatch.setattr(marks, "write_at", fail)
    managers["full"].save(background=True)
    path = managers["other"].save()
    with pytest.raises(OSError, match="No space left"):
        managers["full"].sync()
    for manager in managers.values():
        manager.close()
    communicator.barrier()
    assert sorted(os.listdir(mpi_tmp_path)) == ["checkpoint", os.path.basename(str(path))]


@pytest.mark.mpi(min_size=2)
def test_a_wait_that_another_thread_is_refused_changes_nothing(communicator: Communicator, mpi_tmp_path: Path) -> None:
    manager = CheckpointManager(
        Checkpoint(v=create_variable(make_arena(communicator), np.full(900_000, 1.0))), mpi_tmp_path, 2, background=True
    )
    path = manager.save()
    refusals: list[BaseException] = []

    def wait() -> None:
        for act in (manager.sync, manager.close):
            with pytest.raises(RuntimeError, match="another thread of this program is in a call") as caught:
                act()
            refusals.append(caught.value)

    thread = threading.Thread(target=wait)
    with communicator.calls.during("barrier"):
        thread.start()
        thread.join()
    assert len(refusals) == 2
    assert manager.checkpoint.save_counter == 1
    second = manager.save()
    manager.close()
    assert manager.checkpoints == [path, second]


def test_a_directory_that_is_lost_meanwhile_is_an_error_on_all(
    communicator: Communicator, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_gone, real = threading.Event(), transfer.write_pieces

    def write(*arguments: Any) -> None:
        assert is_gone.wait(60)
        real(*arguments)

    monkeypatch.setattr(copying, "write_pieces", write)
    v = create_variable(make_arena(communicator), np.full(900_000, 1.0))
    manager = CheckpointManager(Checkpoint(v=v), mpi_tmp_path / "run", 1, background=True)
    manager.save()
    if communicator.rank == 0:
        # At once: other ranks may make files in it.
        os.rename(mpi_tmp_path / "run", mpi_tmp_path / "gone")
    communicator.barrier()
    is_gone.set()
    with pytest.raises(FileNotFoundError) as caught:
        manager.sync()
    assert is_shared(caught.value) or communicator.size == 1
    assert manager.save() == str(mpi_tmp_path / "run" / "ckpt-1.h5")
    manager.close()


def test_the_first_rank_decides_what_is_left_out(
    communicator: Communicator, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write = threading.Event()
    if communicator.rank == communicator.size - 1:
        real = transfer.write_pieces

        def write(*arguments: Any) -> None:
            assert may_write.wait(60)
            real(*arguments)

        monkeypatch.setattr(copying, "write_pieces", write)
    v = create_variable(make_arena(communicator), np.full(900_000, 1.0))
    manager = CheckpointManager(Checkpoint(v=v), mpi_tmp_path, 2, background=True, skip_while_saving=True)
    first = manager.save()
    assert manager.save() is None
    may_write.set()
    manager.sync()
    assert manager.latest_checkpoint == first
    second = manager.save()
    assert second == str(mpi_tmp_path / "ckpt-2.h5")
    manager.close()
    assert manager.checkpoints == [first, second]


def test_a_strategy_that_is_closed_meanwhile(communicator: Communicator, mpi_tmp_path: Path) -> None:
    strategy = ArenaStrategy(communicator)
    checkpoint = Checkpoint(v=create_variable(strategy.arena, np.full(900_000, 3.0)))
    path = checkpoint.save(mpi_tmp_path / "c", background=True)
    strategy.close()
    checkpoint.sync()
    communicator.barrier()
    again = create_variable(make_arena(communicator), np.zeros(900_000))
    Checkpoint(v=again).restore(path).assert_consumed()
    assert float(again.numpy().sum()) == 2_700_000.0
    assert latest_checkpoint(mpi_tmp_path) == path


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("who", ["last", "all"])
def test_memory_that_one_host_lacks_is_lacked_by_all(
    communicator: Communicator, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    who: str,
) -> None:
    if who == "all":
        # Enough for the copy of each rank, and not for those of all.
        monkeypatch.setattr(together, "free_bytes", lambda: 1.5 * 8 * 900_000 / communicator.size)
    elif communicator.rank == communicator.size - 1:
        monkeypatch.setattr(together, "free_bytes", lambda: 0)
    checkpoint = Checkpoint(v=create_variable(make_arena(communicator), np.full(900_000, 3.0)))
    path = checkpoint.save(mpi_tmp_path / "c", background=True)
    assert checkpoint.saving is None
    assert os.path.exists(path)
    assert caplog.text.count("saved in the foreground") == (communicator.rank == 0)
