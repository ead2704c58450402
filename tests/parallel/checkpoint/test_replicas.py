"""Variables of which every replica has a value of its own: all are saved, and dealt to any number of ranks."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt
import pytest

from mpidist.checkpoint.checkpoint import Checkpoint
from mpidist.checkpoint.file.layout import PAGE_BYTES, PIECE_BYTES
from mpidist.checkpoint.manager import CheckpointManager
from mpidist.comm.group.communicator import Communicator
from mpidist.comm.group.solo import SoloCommunicator
from mpidist.errors import CheckpointError, MismatchError
from mpidist.options import VariableAggregation, VariableSynchronization
from mpidist.variables.arena import Arena
from mpidist.variables.kinds.sync_on_read import SyncOnReadVariable
from mpidist.variables.making.creation import create_variable
from mpidist.variables.variable import BaseVariable
from tests.helpers.strategies import make_arena
from tests.parallel.layouts import make_strategy

pytestmark = pytest.mark.mpi

# A scalar, less than a page, pages that end within components, one page, more than a piece, and nothing.
SHAPES: list[tuple[int, ...]] = [
    (), (3,), (5, 100), (PAGE_BYTES // 8,), (PAGE_BYTES // 8 + 1,), (2, PIECE_BYTES // 8 + 77), (0, 4),
]


def per_replica(arena: Arena, shape: tuple[int, ...] = (), dtype: str = "f8") -> SyncOnReadVariable:
    variable = create_variable(
        arena, np.zeros(shape, dtype), synchronization=VariableSynchronization.ON_READ,
        aggregation=VariableAggregation.NONE,
    )
    assert isinstance(variable, SyncOnReadVariable)
    return variable


def content(replica: int, number: int, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """What replica `replica` has in variable `number`."""
    size = int(np.prod(shape))
    return (np.arange(size, dtype="f8") + 1000.0 * replica + 0.5 * number).reshape(shape)


def make(arena: Arena, *, filled: bool) -> list[SyncOnReadVariable]:
    variables = [per_replica(arena, shape) for shape in SHAPES]
    for number, variable in enumerate(variables):
        if filled:
            variable.accumulate(content(arena.communicator.rank, number, variable.shape))
    return variables


def require(variables: list[SyncOnReadVariable], replica: int) -> None:
    for number, variable in enumerate(variables):
        assert np.array_equal(variable.component, content(replica, number, variable.shape)), variable.shape


def test_each_replica_gets_its_own_component_back(communicator: Communicator, mpi_tmp_path: Path) -> None:
    arena, size = make_arena(communicator), communicator.size
    saved, fresh = make(arena, filled=True), make(arena, filled=False)
    path = Checkpoint(v=saved).save(mpi_tmp_path / "c")
    Checkpoint(v=fresh).restore(path).assert_consumed()
    require(fresh, communicator.rank)
    with h5py.File(path) as file:
        for number, shape in enumerate(SHAPES):
            everyone = np.stack([content(rank, number, shape) for rank in range(size)])
            assert file[f"v/{number}"].shape == (size, *shape)
            assert np.array_equal(file[f"v/{number}"][()], everyone)


@pytest.mark.parametrize("layout", ["private", "pairs", "each"])
def test_over_nodes_and_from_run(communicator: Communicator, mpi_tmp_path: Path, layout: str) -> None:
    strategy = make_strategy(communicator, layout)
    with strategy.scope():
        v = per_replica(strategy.arena, (7, 300))
    strategy.run(lambda: v.assign(np.full((7, 300), communicator.rank + 1.0)))
    path = Checkpoint(v=v).write(mpi_tmp_path / "c")
    strategy.run(lambda: v.assign(np.zeros((7, 300))))
    Checkpoint(v=v).read(path).assert_consumed()
    assert (v.component == communicator.rank + 1.0).all()


def test_saved_by_n_restored_by_m(
    communicator: Communicator, mpi_tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = communicator.size
    for savers in range(1, world + 1):
        group = communicator.split(int(communicator.rank >= savers))
        if communicator.rank < savers:
            Checkpoint(v=make(make_arena(group), filled=True)).write(mpi_tmp_path / f"by-{savers}")
    communicator.barrier()
    for savers in range(1, world + 1):
        for readers in range(1, world + 1):
            group = communicator.split(int(communicator.rank >= readers))
            fresh = make(make_arena(group), filled=False)
            caplog.clear()
            with caplog.at_level(logging.WARNING, "mpidist"):
                Checkpoint(v=fresh).read(mpi_tmp_path / f"by-{savers}").assert_consumed()
            require(fresh, group.rank % savers)
            warnings = [record.getMessage() for record in caplog.records]
            if group.rank == 0 and group.size != savers:
                assert len(warnings) == 1
                assert f"{savers} replicas saved a component each, {group.size} restore" in warnings[0]
            else:
                assert warnings == []


def test_the_manager_keeps_components(communicator: Communicator, mpi_tmp_path: Path) -> None:
    arena = make_arena(communicator)
    v, w = per_replica(arena, dtype="u4"), create_variable(arena, np.arange(2000.0))
    with CheckpointManager(Checkpoint(v=v, w=w), mpi_tmp_path, 1) as manager:
        for _ in range(2):
            v.accumulate(np.uint32(communicator.rank + 1))
            manager.save()
        v.clear()
        w.assign(np.zeros(2000))
        assert manager.restore_or_initialize() == str(mpi_tmp_path / "ckpt-2.h5")
    assert v.component == 2 * (communicator.rank + 1)
    assert np.array_equal(w.numpy(), np.arange(2000.0))


def test_another_kind_is_an_error_of_all(communicator: Communicator, mpi_tmp_path: Path) -> None:
    arena, n = make_arena(communicator), communicator.size
    summed: dict[str, Any] = {
        "synchronization": VariableSynchronization.ON_READ, "aggregation": VariableAggregation.SUM,
    }
    one = create_variable(arena, np.ones((n, 3)))
    path = Checkpoint(m=SimpleNamespace(v=one)).write(mpi_tmp_path / "one")
    mine = per_replica(arena, (3,))
    with pytest.raises(CheckpointError, match=rf"'m/v' has a component of shape \(3,\).* shape \({n}, 3\) was saved"):
        Checkpoint(m=SimpleNamespace(v=mine)).read(path)
    path = Checkpoint(m=SimpleNamespace(v=mine)).write(mpi_tmp_path / "each")
    for options in ({}, summed):
        for shape in ((3,), (n, 3)):
            other = create_variable(arena, np.ones(shape), **options)
            before = other.numpy()
            with pytest.raises(CheckpointError, match=rf"'m/v' has one value of .* were saved, of shape \({n}, 3\)"):
                Checkpoint(m=SimpleNamespace(v=other)).read(path)
            assert np.array_equal(other.numpy(), before)
    with pytest.raises(CheckpointError, match=rf"'m/v' has a component of shape \(4,\).*\({n}, 3\) was saved"):
        Checkpoint(m=SimpleNamespace(v=per_replica(arena, (4,)))).read(path)
    with pytest.raises(CheckpointError, match="dtype float32, but float64"):
        Checkpoint(m=SimpleNamespace(v=per_replica(arena, (3,), "f4"))).read(path)


@pytest.mark.parametrize("replica", ["first", "last"])
def test_a_damaged_component_is_an_error_of_all(communicator: Communicator, mpi_tmp_path: Path, replica: str) -> None:
    arena, number = make_arena(communicator), 0 if replica == "first" else communicator.size - 1
    v = per_replica(arena, (PIECE_BYTES // 8 + 100,))
    path = Path(Checkpoint(v=v).write(mpi_tmp_path / "c"))
    communicator.barrier()
    if communicator.rank == 0:
        with h5py.File(path) as file:
            offset = file["v"].id.get_offset()
        with open(path, "r+b") as raw:
            raw.seek(offset + number * v.size * 8 + PIECE_BYTES + 5)
            raw.write(b"\x40")
    communicator.barrier()
    v.accumulate(np.ones(v.shape))
    start = number * v.size * 8 + PIECE_BYTES
    with pytest.raises(CheckpointError, match=rf"damaged: bytes \[{start}, {start + 800}\) of 'v'"):
        Checkpoint(v=v).read(path)
    assert (v.component == 1).all()


def test_a_plain_one_beside_distributed_ones_is_saved_once(communicator: Communicator, mpi_tmp_path: Path) -> None:
    alone, v = per_replica(make_arena(SoloCommunicator()), (2,)), create_variable(make_arena(communicator), 1.0)
    alone.accumulate(np.array([3.0, 4.0]))
    path = Checkpoint(alone=alone, v=v).write(mpi_tmp_path / "c")
    with h5py.File(path) as file:
        assert file["alone"][()].tolist() == [[3.0, 4.0]]
    alone.clear()
    Checkpoint(alone=alone, v=v).read(path).assert_consumed()
    assert alone.component.tolist() == [3.0, 4.0]
    if communicator.size > 1:
        alone.accumulate(np.full(2, float(communicator.rank)))
        with pytest.raises(MismatchError, match="'alone'"):
            Checkpoint(alone=alone, v=v).write(mpi_tmp_path / "d")
        communicator.barrier()
        assert os.listdir(mpi_tmp_path) == ["c.h5"]


def test_an_object_with_state_may_have_some(communicator: Communicator, mpi_tmp_path: Path) -> None:
    class Generator:
        """Its state is a variable that differs by replica."""

        def __init__(self, arena: Arena) -> None:
            self.seed = per_replica(arena, (2,), "u8")

        def state(self) -> dict[str, BaseVariable]:
            return {"seed": self.seed}

        def load_state(self, saved: Any) -> None:
            self.seed.load(saved["seed"].read_for(self.seed))

    arena = make_arena(communicator)
    generator, fresh = Generator(arena), Generator(arena)
    generator.seed.accumulate(np.array([communicator.rank, 2**63], "u8"))
    Checkpoint(g=fresh).read(Checkpoint(g=generator).write(mpi_tmp_path / "c")).assert_consumed()
    assert fresh.seed.component.tolist() == [communicator.rank, 2**63]
