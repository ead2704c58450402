"""Saving and restoring over ranks: any number saves, any number restores, and a failure is one of all."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from mpidist.checkpoint.checkpoint import Checkpoint
from mpidist.checkpoint.directory.lock import this_process
from mpidist.checkpoint.file.layout import PIECE_BYTES
from mpidist.checkpoint.manager import CheckpointManager, latest_checkpoint
from mpidist.comm.group.communicator import Communicator
from mpidist.comm.group.solo import SoloCommunicator
from mpidist.errors import CheckpointError, MismatchError, is_shared
from mpidist.options import VariableAggregation, VariableSynchronization
from mpidist.testing import fake_nodes
from mpidist.variables.arena import Arena
from mpidist.variables.making.creation import create_variable
from mpidist.variables.variable import BaseVariable
from tests.helpers.launching import NoLauncherError, find_mpirun, launch_environment, mpirun_command
from tests.helpers.strategies import make_arena

ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.mpi

LARGE = 5 * PIECE_BYTES // 4 + 3


class Model:
    """A large array that many ranks write, small ones, empty ones, and one of each synchronization."""

    def __init__(self, arena: Arena, factor: float) -> None:
        def make(value: Any, **options: Any) -> BaseVariable:
            return create_variable(arena, np.asarray(value), **options)

        on_read: dict[str, Any] = {
            "synchronization": VariableSynchronization.ON_READ, "aggregation": VariableAggregation.SUM,
        }
        self.large = make(np.arange(LARGE, dtype="f4") * np.float32(factor))
        self.layers = [make(np.full((n + 1, 300), factor + n, "f8")) for n in range(6)]
        self.scalar = make(np.float32(factor))
        self.empty = make(np.zeros((0, 4)))
        self.flags = make(np.array([factor > 0, False, True]))
        self.count = make(np.int64(0), **on_read)
        self.count.assign(int(7 * factor))
        self.epoch = 0


def require_equal(model: Model, other: Model) -> None:
    for name in ("large", "scalar", "empty", "flags", "count"):
        assert np.array_equal(getattr(model, name).numpy(), getattr(other, name).numpy()), name
    for layer, expected in zip(model.layers, other.layers, strict=True):
        assert np.array_equal(layer.numpy(), expected.numpy())


def test_round_trip(communicator: Communicator, mpi_tmp_path: Path) -> None:
    arena = make_arena(communicator)
    model, fresh = Model(arena, 2.0), Model(arena, 0.0)
    path = Checkpoint(model=model).save(mpi_tmp_path / "ckpt")
    assert path == str(mpi_tmp_path / "ckpt-1.h5")
    Checkpoint(model=fresh).restore(path).assert_consumed()
    require_equal(fresh, model)
    with h5py.File(path) as file:
        assert np.array_equal(file["model/large"][:], np.arange(LARGE, dtype="f4") * 2)
        assert file["model/layers/3"].shape == (4, 300)
        assert file["model/count"][()] == 14
    communicator.barrier()
    assert sorted(os.listdir(mpi_tmp_path)) == ["checkpoint", "ckpt-1.h5"]
    assert latest_checkpoint(mpi_tmp_path) == path


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("node_size", [1, 2])
def test_round_trip_over_nodes(communicator: Communicator, mpi_tmp_path: Path, node_size: int) -> None:
    arena = make_arena(fake_nodes(communicator, node_size))
    model, fresh = Model(arena, 3.0), Model(arena, 0.0)
    Checkpoint(model=fresh).read(Checkpoint(model=model).write(mpi_tmp_path / "c")).assert_consumed()
    require_equal(fresh, model)


def test_saved_on_some_ranks_restores_on_others(communicator: Communicator, mpi_tmp_path: Path) -> None:
    world, everyone = communicator.size, make_arena(communicator)
    for savers in range(1, world + 1):
        group = communicator.split(int(communicator.rank >= savers))
        if communicator.rank < savers:
            Checkpoint(model=Model(make_arena(group), float(savers))).write(mpi_tmp_path / f"by-{savers}")
        communicator.barrier()
    for savers in range(1, world + 1):
        path = mpi_tmp_path / f"by-{savers}"
        fresh = Model(everyone, 0.0)
        Checkpoint(model=fresh).read(path).assert_consumed()
        require_equal(fresh, Model(everyone, float(savers)))
        for readers in range(1, world):
            arena = make_arena(communicator.split(int(communicator.rank >= readers)))
            fresh = Model(arena, 0.0)
            Checkpoint(model=fresh).read(path).assert_consumed()
            require_equal(fresh, Model(arena, float(savers)))


def test_the_same_bytes_whatever_the_number_of_ranks(communicator: Communicator, mpi_tmp_path: Path) -> None:
    Checkpoint(model=Model(make_arena(communicator), 2.0)).write(mpi_tmp_path / "all")
    group = communicator.split(int(communicator.rank > 0))
    if communicator.rank == 0:
        Checkpoint(model=Model(make_arena(group), 2.0)).write(mpi_tmp_path / "one")
        assert (mpi_tmp_path / "all.h5").read_bytes() == (mpi_tmp_path / "one.h5").read_bytes()


def test_manager_keeps_the_last_and_restores_it(communicator: Communicator, mpi_tmp_path: Path) -> None:
    arena = make_arena(communicator)
    model = Model(arena, 1.0)
    with CheckpointManager(Checkpoint(model=model), mpi_tmp_path, 2, step_counter=model.scalar) as manager:
        assert manager.restore_or_initialize() is None
        for step in range(1, 5):
            model.scalar.assign(step)
            assert manager.save() == str(mpi_tmp_path / f"ckpt-{step}.h5")
        assert [os.path.basename(path) for path in manager.checkpoints] == ["ckpt-3.h5", "ckpt-4.h5"]
    communicator.barrier()
    assert sorted(os.listdir(mpi_tmp_path)) == ["checkpoint", "ckpt-3.h5", "ckpt-4.h5"]
    fresh = Model(arena, 0.0)
    again = CheckpointManager(Checkpoint(model=fresh), mpi_tmp_path, 2)
    assert again.restore_or_initialize() == str(mpi_tmp_path / "ckpt-4.h5")
    assert fresh.scalar.numpy() == 4
    assert again.checkpoint.save_counter == 4
    again.save()
    again.close()


def test_a_plain_variable_may_stand_beside_distributed_ones(communicator: Communicator, mpi_tmp_path: Path) -> None:
    model = Model(make_arena(communicator), 2.0)
    step = create_variable(make_arena(SoloCommunicator()), 5)
    path = Checkpoint(model=model, step=step).save(mpi_tmp_path / "c")
    step.assign(0)
    Checkpoint(model=model, step=step).restore(path).assert_consumed()
    assert step.numpy() == 5


@pytest.mark.mpi(min_size=2)
def test_what_differs_between_ranks_is_an_error_of_all(communicator: Communicator, mpi_tmp_path: Path) -> None:
    shared = create_variable(make_arena(communicator), 1.0)
    step = create_variable(make_arena(SoloCommunicator()), communicator.rank)
    with pytest.raises(MismatchError, match=r"'step' of shape \(\) .* on rank 0; .* on rank 1"):
        Checkpoint(v=shared, step=step).save(mpi_tmp_path / "c")
    extra = {"more": step} if communicator.rank == 1 else {}
    with pytest.raises(MismatchError, match="on rank 1"):
        Checkpoint(v=shared, **extra).save(mpi_tmp_path / "c")
    communicator.barrier()
    assert os.listdir(mpi_tmp_path) == []


@pytest.mark.mpi(min_size=2)
def test_another_variable_at_the_same_path_is_an_error(communicator: Communicator, mpi_tmp_path: Path) -> None:
    """Each rank of a node writes and reads a part: the file, or the variables, would be of two pieces."""
    arena = make_arena(communicator)
    a, b = create_variable(arena, np.zeros(1000)), create_variable(arena, np.ones(1000))
    odd = communicator.rank == communicator.size - 1
    with pytest.raises(MismatchError, match=r"'v' of .*variable number 1 on .*'v' of .*variable number 2 on "):
        Checkpoint(v=b if odd else a).save(mpi_tmp_path / "c")
    path = Checkpoint(v=a).save(mpi_tmp_path / "c")
    with pytest.raises(MismatchError, match=r"v, variable number 1 on .*v, variable number 2 on "):
        Checkpoint(v=b if odd else a).restore(path)
    np.testing.assert_array_equal(b.numpy(), 1)


@pytest.mark.mpi(min_size=2)
def test_a_variable_that_one_rank_lacks_is_an_error_at_restore(communicator: Communicator, mpi_tmp_path: Path) -> None:
    arena = make_arena(communicator)
    a, b = create_variable(arena, 1.0), create_variable(arena, 2.0)
    path = Checkpoint(a=a, b=b).write(mpi_tmp_path / "c")
    a.assign(0.0)
    extra = {"b": b} if communicator.rank else {}
    with pytest.raises(MismatchError, match="on rank 0"):
        Checkpoint(a=a, **extra).read(path)
    assert a.numpy() == 0.0


@pytest.mark.mpi(min_size=2)
def test_variables_of_several_strategies_are_an_error(communicator: Communicator, mpi_tmp_path: Path) -> None:
    other = communicator.split(0)
    objects = {"a": create_variable(make_arena(communicator), 1.0), "b": create_variable(make_arena(other), 1.0)}
    with pytest.raises(ValueError, match=r"'a' over .* and 'b' over .* one checkpoint per strategy"):
        Checkpoint(**objects).save(mpi_tmp_path / "c")


@pytest.mark.mpi(min_size=2)
def test_ranks_of_their_own_leave_writing_to_rank_0(communicator: Communicator, mpi_tmp_path: Path) -> None:
    v = create_variable(make_arena(SoloCommunicator()), float(communicator.rank))
    with CheckpointManager(Checkpoint(v=v), mpi_tmp_path, 1) as manager:
        for step in (1, 2):
            assert manager.save() == str(mpi_tmp_path / f"ckpt-{step}.h5")
    communicator.barrier()
    assert sorted(os.listdir(mpi_tmp_path)) == ["checkpoint", "ckpt-2.h5"]
    Checkpoint(v=v).restore(latest_checkpoint(mpi_tmp_path)).assert_consumed()
    assert v.numpy() == 0.0


@pytest.mark.parametrize("call", ["posix_fallocate", "open", "pwrite", "fsync", "replace"])
@pytest.mark.parametrize("victim", ["first", "last"])
def test_a_failure_of_one_rank_is_one_of_all_and_loses_nothing(
    communicator: Communicator, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, victim: str
) -> None:
    rank = 0 if victim == "first" else communicator.size - 1
    if rank and call in ("posix_fallocate", "replace"):
        pytest.skip("only rank 0 does this")
    arena = make_arena(communicator)
    model = Model(arena, 1.0)
    manager = CheckpointManager(Checkpoint(model=model), mpi_tmp_path, 1)
    manager.save()
    communicator.barrier()
    before = {name: (mpi_tmp_path / name).read_bytes() for name in os.listdir(mpi_tmp_path)}
    communicator.barrier()
    original = getattr(os, call)

    def fail(*arguments: Any, **options: Any) -> Any:
        if call == "open" and "ckpt-2" not in str(arguments[0]):
            return original(*arguments, **options)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    model.scalar.assign(9.0)
    with monkeypatch.context() as patch:
        if communicator.rank == rank:
            patch.setattr(os, call, fail)
        with pytest.raises(OSError, match="No space left") as caught:
            manager.save()
    assert caught.value.errno == errno.ENOSPC
    assert communicator.size == 1 or is_shared(caught.value)
    communicator.barrier()
    assert {name: (mpi_tmp_path / name).read_bytes() for name in os.listdir(mpi_tmp_path)} == before
    fresh = Model(arena, 0.0)
    Checkpoint(model=fresh).restore(latest_checkpoint(mpi_tmp_path)).assert_consumed()
    require_equal(fresh, Model(arena, 1.0))
    assert manager.save() == str(mpi_tmp_path / "ckpt-2.h5")
    manager.close()


def test_a_directory_that_cannot_be_made_is_an_error_of_all(communicator: Communicator, mpi_tmp_path: Path) -> None:
    if communicator.rank == 0:
        (mpi_tmp_path / "file").write_text("")
    communicator.barrier()
    v = create_variable(make_arena(communicator), 1.0)
    with pytest.raises(OSError, match=r"creating checkpoint|Not a directory"):
        Checkpoint(v=v).save(mpi_tmp_path / "file" / "sub" / "c")
    with pytest.raises(OSError, match=r"preparing directory|Not a directory"):
        CheckpointManager(Checkpoint(v=v), mpi_tmp_path / "file" / "sub", 1).save()


@pytest.mark.parametrize("damage", ["missing", "truncated", "garbage", "bit", "shape"])
def test_what_cannot_be_restored_is_an_error_of_all(
    communicator: Communicator, mpi_tmp_path: Path, damage: str
) -> None:
    arena = make_arena(communicator)
    path = Path(Checkpoint(model=Model(arena, 1.0)).write(mpi_tmp_path / "c"))
    communicator.barrier()
    fresh = Model(arena, 0.0)
    if damage == "shape":
        fresh.layers[1] = create_variable(arena, np.zeros((5, 300)))
    elif communicator.rank == 0:
        break_file(path, damage)
    communicator.barrier()
    expected, text = {
        "missing": (FileNotFoundError, "the directory has no checkpoint"),
        "truncated": (CheckpointError, "truncated, damaged or no HDF5 file"),
        "garbage": (CheckpointError, "truncated, damaged or no HDF5 file"),
        "bit": (CheckpointError, r"bytes \[4194304, \d+\) of 'model/large'"),
        "shape": (CheckpointError, r"'model/layers/1' has shape \(5, 300\), but \(2, 300\) was saved"),
    }[damage]
    with pytest.raises(expected, match=text):
        Checkpoint(model=fresh).read(path)
    assert not fresh.large.numpy().any()
    assert fresh.scalar.numpy() == 0.0


def break_file(path: Path, damage: str) -> None:
    with h5py.File(path) as file:
        at = file["model/large"].id.get_offset() + 4 * PIECE_BYTES + 1
    content = bytearray(path.read_bytes())
    if damage == "missing":
        path.unlink()
        return
    if damage == "truncated":
        del content[len(content) // 2 :]
    elif damage == "garbage":
        content[:1000] = os.urandom(1000)
    else:
        content[at] ^= 4
    path.write_bytes(content)


def test_an_optimizer_is_restored_before_its_first_step(communicator: Communicator, mpi_tmp_path: Path) -> None:
    class Momentum:
        """The smallest object with state that is built late."""

        def __init__(self) -> None:
            self.slot: BaseVariable | None = None
            self.steps = 0
            self.pending: Any = None

        def build(self, arena: Arena) -> None:
            self.slot = create_variable(arena, np.zeros(1000))
            if self.pending is not None:
                self.slot.load(self.pending.read)

        def state(self) -> Any:
            return {"steps": self.steps, "slots": [] if self.slot is None else [self.slot]}

        def load_state(self, saved: Any) -> None:
            self.steps = int(saved["steps"])
            self.pending = saved["slots"]["0"]

    arena = make_arena(communicator)
    optimizer, fresh = Momentum(), Momentum()
    optimizer.build(arena)
    optimizer.steps = 12
    if optimizer.slot is not None:
        optimizer.slot.assign(np.arange(1000.0))
    path = Checkpoint(optimizer=optimizer).write(mpi_tmp_path / "c")
    # Without a variable yet, nothing says over which ranks the program runs: each reads for itself.
    Checkpoint(optimizer=fresh).read(path).assert_consumed()
    communicator.barrier()
    if communicator.rank == 0:
        os.unlink(path)
    communicator.barrier()
    fresh.build(arena)
    assert fresh.steps == 12
    assert fresh.slot is not None
    assert np.array_equal(fresh.slot.numpy(), np.arange(1000.0))


def test_an_object_with_state_may_tell_its_ranks(communicator: Communicator, mpi_tmp_path: Path) -> None:
    class Position:
        """It spans ranks and has no variable, as a distributed iterator."""

        def __init__(self, group: Any, value: int) -> None:
            self.group = group
            self.value = value

        def state(self) -> dict[str, int]:
            return {"value": self.value}

        def load_state(self, saved: Any) -> None:
            self.value = int(saved["value"])

    position = Position(communicator, 5)
    checkpoint = Checkpoint(p=position)
    assert checkpoint.find_objects().group().size == communicator.size
    path = checkpoint.save(mpi_tmp_path / "c")
    position.value = 0
    Checkpoint(p=position).restore(path).assert_consumed()
    assert position.value == 5
    position.value = communicator.rank
    if communicator.size > 1:
        with pytest.raises(MismatchError, match="'p/value' of shape"):
            checkpoint.save(mpi_tmp_path / "c")
    assert Checkpoint(p=Position("a name", 1)).find_objects().group().size == 1


def test_a_busy_directory_is_an_error_of_all(communicator: Communicator, mpi_tmp_path: Path) -> None:
    if communicator.rank == 0:
        # Process 1 lives on every host, and is not this one.
        start = int(Path("/proc/1/stat").read_text().rpartition(")")[2].split()[19])
        first = dataclasses.replace(this_process(), process=1, started=start)
        (mpi_tmp_path / "checkpoint.lock").write_text(json.dumps(dataclasses.asdict(first)))
    communicator.barrier()
    manager = CheckpointManager(Checkpoint(v=create_variable(make_arena(communicator), 1.0)), mpi_tmp_path, 1)
    with pytest.raises(CheckpointError, match="another job saves"):
        manager.save()
    manager.close()
    communicator.barrier()
    assert os.listdir(mpi_tmp_path) == ["checkpoint.lock"]


KILLED = """
import os, signal, sys
import numpy as np
from mpidist.checkpoint import transfer
from mpidist.checkpoint.checkpoint import Checkpoint
from mpidist.checkpoint.manager import CheckpointManager
from mpidist.comm.group.opening import open_communicator
from mpidist.variables.making.creation import create_variable
from tests.helpers.strategies import make_arena

communicator = open_communicator()
v = create_variable(make_arena(communicator), np.full(1_000_000, 1.0))
manager = CheckpointManager(Checkpoint(v=v), sys.argv[1], 1)
manager.restore_or_initialize()
if manager.latest_checkpoint is not None:
    Checkpoint(v=v).restore(manager.latest_checkpoint).assert_consumed()
    manager.save()
    sys.stdout.write(f"read {v[0]} {v[-1]}\\n")
    raise SystemExit
manager.save()
v.assign(np.full(1_000_000, 2.0))
write_at, calls = transfer.write_at, []
def kill(*arguments):
    calls.append(arguments)
    if communicator.rank == int(sys.argv[2]) and len(calls) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    write_at(*arguments)
transfer.write_at = kill
manager.save(background=sys.argv[3] == "background")
manager.sync()
"""


@pytest.mark.timeout_seconds(120)
@pytest.mark.parametrize(("victim", "how"), [
    (0, "foreground"), (2, "foreground"), pytest.param(0, "background", marks=pytest.mark.long), (2, "background"),
])
def test_a_killed_rank_leaves_the_previous_checkpoint(
    communicator: Communicator, tmp_path: Path, victim: int, how: str
) -> None:
    if communicator.size > 1:
        pytest.skip("starts ranks of its own")
    try:
        program = [sys.executable, "-c", KILLED, str(tmp_path / "c"), str(victim), how]
        command = [*mpirun_command(3, find_mpirun()), *program]
    except NoLauncherError as error:
        pytest.skip(str(error))
    environment = {**launch_environment(), "PYTHONPATH": str(ROOT)}
    first, second = (
        subprocess.run(command, env=environment, capture_output=True, text=True, timeout=50, check=False)
        for _ in range(2)
    )
    assert first.returncode != 0, first.stderr
    assert second.stdout.count("read 1.0 1.0") == 3, second.stderr
    assert sorted(os.listdir(tmp_path / "c")) == ["checkpoint", "ckpt-2.h5"]
