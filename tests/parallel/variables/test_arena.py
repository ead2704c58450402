"""The arena: one copy per node where memory can be shared, the same results where it cannot."""

from __future__ import annotations

import errno
import gc
import itertools
import logging
import os
import platform
import time
from pathlib import Path

import numpy as np
import pytest

import mpidist
from mpidist.comm.group.communicator import Communicator
from mpidist.comm.group.shared_file import DIRECTORY_VARIABLE
from mpidist.comm.memory.node_barrier import NodeBarrier
from mpidist.comm.memory.node_memory import NodeMemory
from mpidist.errors import UnavailableError
from mpidist.options import CommunicationOptions
from mpidist.variables.arena import Arena
from mpidist.variables.kinds.mirrored import MirroredVariable
from mpidist.variables.making.creation import create_variable
from mpidist.variables.memory import sharing
from mpidist.variables.step.plan import Plan
from tests.helpers.strategies import ArenaStrategy, make_arena
from tests.parallel.layouts import LAYOUTS, lay_out, make_strategy

pytestmark = pytest.mark.mpi


def make(arena: Arena, count: int, dtype: str = "float32") -> MirroredVariable:
    variable = create_variable(arena, np.ones(count, dtype))
    assert isinstance(variable, MirroredVariable)
    return variable


def refuse(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def train(strategy: ArenaStrategy) -> list[np.ndarray[tuple[int, ...], np.dtype[np.float32]]]:
    """Some steps with everything: many variables, dtypes, a subset of gradients, state."""
    rank, size = strategy.communicator.rank, strategy.num_replicas_in_sync
    with strategy.scope():
        variables = [
            mpidist.Variable(np.linspace(-1, 1, n, dtype=dtype).reshape(shape))
            for n, shape, dtype in [(6, (2, 3), "float32"), (1000, (1000,), "float64"), (0, (0,), "float32"),
                                    (1, (), "float64"), (4321, (4321,), "float32")]
        ]
        optimizer = mpidist.optimizers.Adam(0.1)
        optimizer.build(variables)
    for step in range(4):
        gradients = [
            None if step == 2 and i % 2 == 0 else np.cos(v.numpy() + rank + step).astype(v.dtype) / size
            for i, v in enumerate(variables)
        ]
        strategy.run(optimizer.apply_gradients, args=(list(zip(gradients, variables, strict=True)),))
    return [v.numpy() for v in variables]


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout != "private"])
def test_results_are_those_of_private_memory(communicator: Communicator, layout: str) -> None:
    results = train(make_strategy(communicator, layout))
    private = train(make_strategy(communicator, "private"))
    for mine, expected in zip(results, private, strict=True):
        tolerance = 1e-6 if mine.dtype == np.float32 else 1e-14
        np.testing.assert_allclose(mine, expected, rtol=10 * tolerance, atol=tolerance)
        for other in communicator.all_gather_object(mine):
            np.testing.assert_array_equal(other, mine)


@pytest.mark.parametrize("layout", ["node", "pairs", "first", "full"])
def test_the_barrier_of_shared_memory_keeps_everyone_until_the_last(communicator: Communicator, layout: str) -> None:
    arena = make_strategy(communicator, layout).arena
    node = arena.communicator.node
    if communicator.size > 1 and platform.machine() == "x86_64":
        assert isinstance(arena.barrier, NodeBarrier), "it takes less time than MPI's"
    counters = NodeMemory(arena.communicator, 8 * node.size).bytes.view(np.int64)
    for step in range(100):
        if step % 30 == node.rank:
            time.sleep(0.002)  # simulates work: each rank is the last one in turn
        counters[node.rank] += 1
        arena.barrier()
        assert (counters == counters[node.rank]).all()
        arena.barrier()


def test_nobody_waits_in_a_private_arena(communicator: Communicator) -> None:
    arena = make_strategy(communicator, "private").arena
    if communicator.rank == 0:
        arena.barrier()
    communicator.barrier()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("way", ["shared", "missing folder", "no room", "small"])
def test_fallbacks_are_agreed(
    communicator: Communicator, monkeypatch: pytest.MonkeyPatch, mpi_tmp_path: Path, way: str
) -> None:
    if way == "missing folder":
        monkeypatch.setattr(sharing, "directory", lambda: mpi_tmp_path / "missing")
    if way == "no room" and communicator.rank == 0:
        monkeypatch.setattr(os, "posix_fallocate", refuse)
    if way == "small" and communicator.rank == communicator.size - 1:
        status = os.statvfs("/")
        monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result((*status[:2], 1, *status[3:])))
    strategy = ArenaStrategy(communicator, shared=False if way == "shared" else None)
    assert not strategy.arena.shares_memory
    np.testing.assert_equal(train(strategy), train(make_strategy(communicator, "private")))


@pytest.mark.mpi(min_size=2)
def test_memory_that_fills_up_makes_later_variables_private(
    communicator: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy = ArenaStrategy(communicator)
    arena = strategy.arena
    assert arena.shares_memory
    before = make(arena, 10)
    if communicator.rank == 0:
        monkeypatch.setattr(os, "posix_fallocate", refuse)
    # More than the first slab has left.
    after = make(arena, 1 << 20)
    monkeypatch.undo()
    assert [before.address.slab.is_shared, after.address.slab.is_shared] == [True, False]
    with strategy.scope():
        optimizer = mpidist.optimizers.SGD(1.0)
        optimizer.build([before, after])
    ones = [(np.ones(v.shape, v.dtype), v) for v in (before, after)]
    strategy.run(optimizer.apply_gradients, args=(ones,))
    for variable in (before, after):
        assert set(np.unique(variable.numpy())) == {np.float32(1 - communicator.size)}
        variable.assign(np.full(variable.shape, 7.0, "float32"))
        assert variable.value()[-1] == 7


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("way", ["missing folder", "no room"])
def test_memory_that_must_be_shared_is_an_error_on_all(
    communicator: Communicator, monkeypatch: pytest.MonkeyPatch, mpi_tmp_path: Path, way: str
) -> None:
    if way == "missing folder":
        monkeypatch.setenv(DIRECTORY_VARIABLE, str(mpi_tmp_path / "missing"))
    elif communicator.rank == communicator.node.size - 1 or communicator.rank == 0:
        monkeypatch.setattr(os, "posix_fallocate", refuse)
    text = "MPIDIST_SHARED_MEMORY must name .* got .*missing" if way == "missing folder" else "reserving"
    with pytest.raises(OSError, match=text) as caught:
        ArenaStrategy(communicator, shared=True)
    assert caught.value.errno == (errno.ENOENT if way == "missing folder" else errno.ENOSPC)
    assert len(set(communicator.all_gather_object(str(caught.value)))) == 1


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("place", ["missing", "/dev/null", "/proc"])
@pytest.mark.parametrize("shared", [None, False])
def test_a_directory_that_is_named_and_cannot_be_used_is_an_error(
    communicator: Communicator, monkeypatch: pytest.MonkeyPatch, mpi_tmp_path: Path, place: str, shared: bool | None
) -> None:
    folder = str(mpi_tmp_path / place)
    last = communicator.rank == communicator.size - 1
    monkeypatch.setenv(DIRECTORY_VARIABLE, folder if last else "/dev/shm")
    text = f"failed on rank {communicator.size - 1}.*must name a directory in memory .*, got {folder}: .*leave the var"
    with pytest.raises(OSError, match=text) as caught:
        ArenaStrategy(communicator, shared=shared)
    assert len(set(communicator.all_gather_object(str(caught.value)))) == 1


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("place", ["small", "missing"])
def test_memory_that_is_too_small_is_one_warning(
    communicator: Communicator, monkeypatch: pytest.MonkeyPatch, mpi_tmp_path: Path, caplog: pytest.LogCaptureFixture,
    place: str,
) -> None:
    """It is on another host than the first rank's."""
    last = communicator.rank == communicator.size - 1
    if place == "small" and last:
        status = os.statvfs("/")
        size = (64 << 20) // status.f_frsize
        monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result((*status[:2], size, *status[3:])))
    if place == "missing" and last:
        monkeypatch.setattr(sharing, "directory", lambda: mpi_tmp_path / "missing")
    sharing._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert not ArenaStrategy(communicator).arena.shares_memory
            ArenaStrategy(communicator, shared=False)
    warnings = [record.getMessage() for record in caplog.records if "private to each rank" in record.getMessage()]
    assert len(warnings) == (communicator.rank == 0)
    missing = f"{mpi_tmp_path / 'missing'} cannot be used: No"
    reason = "/dev/shm has 64 MB, and is used only from 256 MB on" if place == "small" else missing
    for text in warnings:
        assert f"on host {communicator.processes[-1].host} {reason}" in text
        assert "--shm-size" in text
        assert "MPIDIST_SHARED_MEMORY" in text


def test_addresses_are_aligned_and_never_move(communicator: Communicator) -> None:
    arena = make_strategy(communicator, "node").arena
    variables = [make(arena, n, d) for n in (1, 3, 17, 100_000) for d in ("float32", "float64", "int8", "complex128")]
    addresses = [v.value().ctypes.data for v in variables]
    assert [address % 64 for address in addresses] == [0] * len(addresses)
    keep = [make(arena, 300_000) for _ in range(5)]
    variables[0].assign([5.0])
    assert [v.value().ctypes.data for v in variables] == addresses
    ends = sorted((v.value().ctypes.data, v.value().nbytes) for v in [*variables, *keep])
    assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(ends)), "no two overlap"


@pytest.mark.mpi(min_size=2)
def test_the_node_has_one_copy(communicator: Communicator) -> None:
    variable = make(make_strategy(communicator, "node").arena, 4)
    communicator.barrier()
    if communicator.rank == 0:
        variable.address.writable[0] = 42
    communicator.barrier()
    assert variable.value()[0] == 42


def test_memory_of_deleted_variables_is_used_again(communicator: Communicator) -> None:
    arena = make_strategy(communicator, "node").arena
    first, keep = make(arena, 1000), make(arena, 1000)
    where = first.address.start
    # Ranks collect garbage at different times: the last rank still holds its variable.
    held = [first] if communicator.rank == communicator.size - 1 else []
    del first
    gc.collect()
    second = make(arena, 1000)
    assert second.address.start not in (where, keep.address.start)
    held.clear()
    gc.collect()
    third = make(arena, 1000)
    assert third.address.start == where
    starts = communicator.all_gather_object((second.address.start, third.address.start))
    assert len(set(starts)) == 1
    np.testing.assert_array_equal(third.value(), np.ones(1000))


@pytest.mark.mpi(min_size=2)
def test_memory_is_used_again_after_a_creation_has_failed(communicator: Communicator) -> None:
    arena = make_strategy(communicator, "node").arena
    first = make(arena, 1000)
    where = first.address.start
    del first
    gc.collect()
    # The ranks exchange errors here, and not what they have released.
    with pytest.raises(ZeroDivisionError):
        create_variable(arena, lambda: np.ones(1000) if communicator.rank else 1 // 0)
    assert make(arena, 1000).address.start == where


def test_many_generations_take_no_more_memory(communicator: Communicator) -> None:
    arena = make_strategy(communicator, "node").arena
    text = ""
    for generation in range(30):
        variables = [make(arena, 40_000 + 16 * (generation % 3)) for _ in range(4)]
        del variables
        gc.collect()
        if generation == 3:
            text = repr(arena)
    assert repr(arena) == text


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_another_shape_or_dtype_is_a_mismatch_on_all(communicator: Communicator, layout: str) -> None:
    strategy = make_strategy(communicator, layout)
    last = communicator.rank == communicator.size - 1
    for odd in (np.zeros(4, "float32"), np.zeros(3, "float64"), np.zeros((3, 1), "float32")):
        with pytest.raises(mpidist.errors.MismatchError, match="shape and dtype of variable 'w'") as caught:
            create_variable(strategy.arena, odd if last else np.zeros(3, "float32"), name="w")
        assert len(set(communicator.all_gather_object(str(caught.value)))) == 1
    assert make(strategy.arena, 3).numpy().tolist() == [1, 1, 1]


@pytest.mark.parametrize("way", ["options", "environment"])
def test_an_explicit_collective_reduces_instead_of_the_arena(
    communicator: Communicator, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    options = CommunicationOptions(implementation="MPI" if way == "options" else "AUTO")
    assert make_arena(communicator).shares_memory == (communicator.size > 1)
    if way == "environment":
        monkeypatch.setenv("MPIDIST_COLLECTIVE", "mpi")
    arena = make_arena(communicator, options)
    assert not arena.shares_memory
    variable = make(arena, 100)
    plan = Plan([variable], {})
    plan.gradients[0][...] = 1
    with communicator.order.during("apply_gradients"):
        plan.step((0,)).apply(lambda parameter, gradient, *_: np.subtract(parameter, gradient, out=parameter))
    np.testing.assert_array_equal(variable.value(), 1 - communicator.size)
    with pytest.raises(ValueError, match="choose one of them"):
        make_arena(communicator, options, shared=True)


def test_a_collective_that_cannot_be_had(communicator: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    if communicator.size > 1:
        with pytest.raises(UnavailableError, match=r"NODE, asked for by `implementation`, .*Choose one of: AUTO, MPI"):
            make_arena(lay_out(communicator, "each"), CommunicationOptions(implementation="NODE"))
    monkeypatch.setenv("MPIDIST_COLLECTIVE", "BOGUS")
    with pytest.raises(ValueError, match=r"MPIDIST_COLLECTIVE.*'BOGUS' is not a valid"):
        make_arena(communicator)


def place(variable: object) -> int:
    assert isinstance(variable, MirroredVariable)
    return variable.address.start


@pytest.mark.parametrize("layout", ["node", "private", "pairs"])
@pytest.mark.parametrize("holder", ["all", "first", "last"])
@pytest.mark.parametrize("kind", ["value", "slice", "tensor", "buffer"])
def test_memory_under_a_live_view_is_not_used_again(
    communicator: Communicator, layout: str, holder: str, kind: str
) -> None:
    strategy = make_strategy(communicator, layout)
    holds = {"all": True, "first": communicator.rank == 0, "last": communicator.rank == communicator.size - 1}[holder]
    torch = pytest.importorskip("torch", reason="PyTorch is not installed") if kind == "tensor" else None
    with strategy.scope():
        first = mpidist.Variable(np.full(100, 1.0))
        start = place(first)
        view: object = None
        if holds and torch is not None:
            view = torch.from_dlpack(first.value())
        elif holds:
            value = first.value()
            view = {"value": value, "slice": value[10:][::2].reshape(5, 9), "buffer": value.data}[kind]
            del value
        del first
        gc.collect()
        second = mpidist.Variable(np.full(100, 2.0))
        assert place(second) != start, "a view of the first is alive on some rank"
        if holds:
            np.testing.assert_array_equal(view, 1)
        del view
        gc.collect()
        assert place(mpidist.Variable(np.full(100, 3.0))) == start, "now nobody holds it"
        assert (second.numpy() == 2).all()
