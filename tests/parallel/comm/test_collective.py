"""The contract of a collective, over every backend, over user-made ones, and over several nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from mpidist import arrays
from mpidist.arrays import AnyArray
from mpidist.comm.choice import selection
from mpidist.comm.choice.table import BACKENDS, why_not
from mpidist.comm.collective import (
    Collective,
    check_axis,
    check_gatherable,
    check_in_place,
    check_parts,
    check_reducible,
    check_root,
)
from mpidist.comm.cross_device.chosen_collective import take_collective
from mpidist.comm.cross_device.cross_device_ops import CrossDeviceOps
from mpidist.comm.cross_device.reductions import HierarchicalCopyAllReduce, NcclAllReduce, ReductionToOneDevice
from mpidist.comm.group.agreement import require_same, same_on_all
from mpidist.comm.group.communicator import Communicator
from mpidist.errors import MismatchError, UnavailableError
from mpidist.options import CommunicationImplementation, CommunicationOptions, ReduceOp
from mpidist.testing.contract import CollectiveContract
from tests.parallel.layouts import lay_out

pytestmark = pytest.mark.mpi

# Small enough that the arrays of the contract go in several pieces.
SMALL_PIECES = CommunicationOptions(bytes_per_pack=256)
FUNCTIONS: dict[ReduceOp, Any] = {
    ReduceOp.SUM: np.add, ReduceOp.MEAN: np.add, ReduceOp.MIN: np.minimum, ReduceOp.MAX: np.maximum,
    ReduceOp.PROD: np.multiply,
}


def choose(communicator: Communicator, name: str, options: CommunicationOptions | None = None) -> Collective:
    """The backend, or a skip with the reason why there is none; one rank has the solo collective for all."""
    kind = CommunicationImplementation[name]
    reason = None if communicator.size == 1 else why_not(kind, communicator)
    if reason is not None:
        pytest.skip(f"{name}: {reason}")
    return selection.choose(communicator, (options or CommunicationOptions()).merge(
        CommunicationOptions(implementation=kind)
    ))


class TestAuto(CollectiveContract):
    @pytest.fixture(params=["node", "pairs"])
    def collective(self, request: pytest.FixtureRequest, communicator: Communicator) -> Collective:
        return choose(lay_out(communicator, request.param), "AUTO")


class TestBackends(CollectiveContract):
    large = 3001

    @pytest.fixture(params=[kind.name for kind in BACKENDS if kind.name not in ("NCCL", "STAGED")])
    def collective(self, request: pytest.FixtureRequest, communicator: Communicator) -> Collective:
        return choose(communicator, request.param, SMALL_PIECES)


class TestStaged(CollectiveContract):
    """Of host memory; the other has tests of its own."""

    large = 3001
    dtypes = ("bool", "int8", "int64", "float16", "float64")
    takes_other_libraries = False

    @pytest.fixture
    def collective(self, communicator: Communicator) -> Collective:
        return choose(communicator, "STAGED", SMALL_PIECES)


class TestNodesOfSeveralRanks(CollectiveContract):
    """What crosses nodes goes another way; dtypes, which do not, are few."""

    large = 3001
    dtypes = ("bool", "int8", "int64", "float16", "float64")
    takes_other_libraries = False

    @pytest.fixture(params=["pairs", "first"])
    def collective(self, request: pytest.FixtureRequest, communicator: Communicator) -> Collective:
        return choose(lay_out(communicator, request.param), "NODE", SMALL_PIECES)


class TestCrossDeviceOps(CollectiveContract):
    large = 3001
    dtypes = ("bool", "int8", "int64", "float16", "float64", "complex64")

    @pytest.fixture(params=[
        (ReductionToOneDevice, "node"), (HierarchicalCopyAllReduce, "pairs"), (HierarchicalCopyAllReduce, "first"),
        (NcclAllReduce, "node"),
    ], ids=lambda param: f"{param[0].__name__}-{param[1]}")
    def collective(self, request: pytest.FixtureRequest, communicator: Communicator) -> Collective:
        ops: CrossDeviceOps = request.param[0]()
        return ops.bind(lay_out(communicator, request.param[1]), SMALL_PIECES)


class StackedOps(CrossDeviceOps):
    """As a user writes one: a single hook."""

    def reduce_implementation(
        self, reduce_op: ReduceOp, per_replica_value: AnyArray, destinations: Any, options: CommunicationOptions
    ) -> AnyArray:
        rows = self.collective.all_gather(per_replica_value[np.newaxis])
        result: AnyArray = FUNCTIONS[reduce_op].reduce(rows, axis=0, dtype=rows.dtype)
        return result / rows.dtype.type(len(rows)) if reduce_op is ReduceOp.MEAN else result


class TestOpsOfAUser(CollectiveContract):
    dtypes = ("bool", "int8", "bfloat16", "float64")
    wraps_integers = True

    @pytest.fixture
    def collective(self, communicator: Communicator) -> Collective:
        return StackedOps().bind(communicator)


class PickledCollective:
    """As a user writes one without any class of the library's: everything is sent as an object."""

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator

    def all_reduce(self, array: AnyArray, op: ReduceOp = ReduceOp.SUM, *, in_place: bool = False) -> AnyArray:
        mine = arrays.lend(array)
        self._agree(f"all_reduce {op.name}", mine)
        check_reducible(mine, op)
        if in_place:
            check_in_place(mine, op)
        total = self._combined(mine, op)
        if not in_place:
            return self._like(total, array)
        mine[...] = total
        return array

    def reduce(self, array: AnyArray, op: ReduceOp = ReduceOp.SUM, root: int = 0) -> AnyArray | None:
        mine = arrays.lend(array)
        self._agree(f"reduce {op.name} {root}", mine)
        check_root(root, self.communicator.size)
        check_reducible(mine, op)
        total = self._combined(mine, op)
        return self._like(total, array) if self.communicator.rank == root else None

    def broadcast(self, array: AnyArray, root: int = 0) -> AnyArray:
        mine = arrays.lend(array)
        self._agree(f"broadcast {root}", mine)
        check_root(root, self.communicator.size)
        result = self.communicator.broadcast_object(mine, root)
        return array if self.communicator.rank == root else self._like(result, array)

    def all_gather(self, array: AnyArray, axis: int = 0) -> AnyArray:
        mine = arrays.lend(array)
        calls = self.communicator.all_gather_object(("all_gather", mine.shape, mine.dtype.name, axis))
        require_same([call[0] for call in calls], "the call", "")
        axis = check_gatherable([call[1:] for call in calls])
        return self._like(np.concatenate(self.communicator.all_gather_object(mine), axis), array)

    def reduce_scatter(self, array: AnyArray, op: ReduceOp = ReduceOp.SUM) -> AnyArray:
        mine = arrays.lend(array)
        self._agree(f"reduce_scatter {op.name}", mine)
        check_axis(mine.shape, 0)
        check_reducible(mine, op)
        parts = np.array_split(self._combined(mine, op), self.communicator.size)
        return self._like(parts[self.communicator.rank], array)

    def all_to_all(self, parts: Sequence[AnyArray]) -> list[AnyArray]:
        mine = [arrays.lend(part) for part in parts]
        same_on_all(
            self.communicator, "all_to_all", (len(mine), [(part.dtype.name, part.shape[1:]) for part in mine]), ""
        )
        check_parts(mine, self.communicator.size)
        everyone = self.communicator.all_gather_object(mine)
        return [self._like(sent[self.communicator.rank], parts[0]) for sent in everyone]

    def barrier(self) -> None:
        self.communicator.barrier()

    def _agree(self, call: str, array: AnyArray) -> None:
        same_on_all(self.communicator, "the call", (call, array.shape, array.dtype.name), "")

    def _combined(self, mine: AnyArray, op: ReduceOp) -> AnyArray:
        rows = np.stack(self.communicator.all_gather_object(mine))
        if op is ReduceOp.MEAN:
            kept = np.dtype(np.float64) if mine.dtype.kind in "iu" else mine.dtype
            return np.asarray(rows.astype(np.float64 if rows.dtype.kind != "c" else rows.dtype).mean(0)).astype(kept)
        rows = rows.astype(rows.dtype.newbyteorder("="))
        return np.asarray(FUNCTIONS[op].reduce(rows, axis=0, dtype=rows.dtype)).astype(mine.dtype)

    def _like(self, result: AnyArray, array: AnyArray) -> AnyArray:
        given: AnyArray = arrays.give_back(np.ascontiguousarray(result).reshape(result.shape), array)
        return given


class TestCollectiveOfAUser(CollectiveContract):
    large = 3001
    dtypes = ("bool", "int8", "float16", "float64", "complex64")
    wraps_integers = True

    @pytest.fixture
    def collective(self, communicator: Communicator) -> Collective:
        return PickledCollective(communicator)


class TestCollectiveOfAUserBehindTheFront(CollectiveContract):
    """As a strategy uses it."""

    large = 3001
    dtypes = ("bool", "int8", "float16", "float64", "complex64")
    wraps_integers = True

    @pytest.fixture
    def collective(self, communicator: Communicator) -> Collective:
        taken = take_collective(PickledCollective(communicator), communicator, CommunicationOptions())
        assert taken is not None
        return taken


def test_the_contract_finds_what_is_wrong(communicator: Communicator) -> None:
    class Wrong(PickledCollective):
        def _combined(self, mine: AnyArray, op: ReduceOp) -> AnyArray:
            return super()._combined(mine, op) + (self.communicator.rank == 0)

    contract, is_alone = CollectiveContract(), communicator.size == 1
    # What every rank sees, so that none waits for another.
    check = contract.test_large_arrays if is_alone else contract.test_results_have_the_same_bits_on_every_rank
    with pytest.raises((pytest.fail.Exception, AssertionError), match=r"all_reduce|differ between ranks"):
        check(Wrong(communicator))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("layout", ["node", "each"])
def test_check_looks_at_every_call(communicator: Communicator, layout: str) -> None:
    collective = selection.choose(lay_out(communicator, layout), CommunicationOptions(check=True))
    for _ in range(40):
        collective.all_reduce(np.ones(2))
    # First as many bytes: the call itself would pass, while MPI may end the job at other sizes, and the test with it.
    with pytest.raises(MismatchError, match="the collective call, its shape and dtype must be"):
        collective.all_reduce(np.ones(2, np.int32 if communicator.rank else np.uint32))
    with pytest.raises(MismatchError, match="the collective call, its shape and dtype must be"):
        collective.all_reduce(np.ones(2 + communicator.rank))


@pytest.mark.mpi(min_size=2)
def test_an_unavailable_backend_is_refused_by_name_with_all_reasons(
    communicator: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    each = lay_out(communicator, "each")
    with pytest.raises(UnavailableError, match=r"NODE, asked for by `implementation`.*no two ranks.*one of: AUTO, MPI"):
        selection.choose(each, CommunicationOptions(implementation="NODE"))
    monkeypatch.setenv("MPIDIST_COLLECTIVE", "nonsense")
    with pytest.raises(ValueError, match="nonsense"):
        selection.choose(communicator, CommunicationOptions())


@pytest.mark.parametrize("implementation", ["MPI", "RING", "AUTO"])
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MEAN, ReduceOp.MAX, ReduceOp.PROD])
def test_arrays_that_are_not_aligned_are_combined(
    communicator: Communicator, implementation: str, op: ReduceOp
) -> None:
    collective = selection.choose(communicator, CommunicationOptions(implementation=implementation))
    try:
        for count in (5, 70_000):
            # One rank alone has such an array, as of a file's records.
            mine = np.frombuffer(bytearray(8 * count + 1), np.float64, count, offset=int(communicator.rank == 0))
            mine[...] = communicator.rank + 1
            ranks = np.arange(1, communicator.size + 1)
            expected = getattr(ranks, op.name.lower())()
            assert np.array_equal(collective.all_reduce(mine, op), np.full(count, expected))
    finally:
        collective.close()


@pytest.mark.parametrize("implementation", ["MPI", "RING", "AUTO"])
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16"])
@pytest.mark.parametrize("count", [101, 5001])
def test_sums_of_small_integers_are_alike_everywhere(
    communicator: Communicator, implementation: str, dtype: str, count: int
) -> None:
    # Not a multiple of what the processor adds at once: Open MPI adds with saturation in vectors, and else wraps.
    largest = np.iinfo(dtype).max
    safe = np.full(count, largest // communicator.size, dtype)
    with selection.choose(communicator, CommunicationOptions(implementation=implementation)) as collective:
        expected = np.full(count, largest // communicator.size * communicator.size, dtype)
        assert np.array_equal(collective.all_reduce(safe, ReduceOp.SUM), expected)
        if communicator.size > 1:
            with pytest.raises(OverflowError, match=f"a SUM of {dtype} does not fit its dtype"):
                collective.all_reduce(np.full(count, largest, dtype), ReduceOp.SUM)
