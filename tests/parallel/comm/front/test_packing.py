"""Packing: the bits of one call per array, fewer calls, no copy of neighbours, errors before anything is changed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import mpidist
from mpidist.arrays import AnyArray
from mpidist.comm.choice import selection
from mpidist.comm.choice.table import BACKENDS
from mpidist.comm.front import packing
from mpidist.comm.front.front import CollectiveFront
from mpidist.comm.front.packing import all_reduce_list, all_reduce_nest
from mpidist.comm.group.communicator import Communicator
from mpidist.comm.memory.shared_buffers import address_of
from mpidist.errors import MismatchError, is_shared
from mpidist.indexed_slices import IndexedSlices
from mpidist.options import CommunicationImplementation, CommunicationOptions, ReduceOp
from tests.helpers.amounts import amount
from tests.parallel.layouts import make_strategy

pytestmark = pytest.mark.mpi

DTYPES = ["float32", "float64", "float16", "int32", "uint8", "bool", ">f4", "complex64"]


def open_collective(communicator: Communicator, backend: str) -> CollectiveFront:
    collective = selection.choose(communicator, CommunicationOptions(implementation=backend))
    assert isinstance(collective, CollectiveFront)
    return collective


@pytest.fixture(params=["AUTO", *(one.name for one, row in BACKENDS.items() if row.takes_host_arrays)])
def collective(request: pytest.FixtureRequest, communicator: Communicator) -> CollectiveFront:
    return open_collective(communicator, request.param)


def calls_of(collective: CollectiveFront) -> int:
    return collective.communicator.order.number


def is_defined(op: ReduceOp, dtype: str) -> bool:
    if dtype == "bool":
        return op in (ReduceOp.MIN, ReduceOp.MAX)
    return dtype != "complex64" or op not in (ReduceOp.MIN, ReduceOp.MAX)


def same_bits(a: AnyArray, b: AnyArray) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


@settings(max_examples=amount(30, 2000), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_packed_equals_one_by_one(collective: CollectiveFront, data: st.DataObject) -> None:
    op = data.draw(st.sampled_from(ReduceOp))
    dtypes = [dtype for dtype in DTYPES if is_defined(op, dtype)]
    layout = data.draw(
        st.lists(st.tuples(st.sampled_from(dtypes), st.lists(st.integers(0, 5), max_size=3)), min_size=2, max_size=12)
    )
    limit = data.draw(st.sampled_from([0, 1, 64, 300]))
    random = np.random.default_rng([collective.communicator.rank, len(layout)])
    # Small integers: their sums and products over four ranks are exact in every order.
    arrays = [random.integers(0, 4, shape).astype(dtype) for dtype, shape in layout]
    expected = [collective.all_reduce(array, op) for array in arrays]
    before = [array.copy() for array in arrays]
    results = all_reduce_list(collective, arrays, op, bytes_per_pack=limit)
    assert all(map(same_bits, results, expected))
    assert all(map(same_bits, arrays, before))
    if not (op is ReduceOp.MEAN and any(np.dtype(dtype).kind in "iu" for dtype, _ in layout)):
        results = all_reduce_list(collective, arrays, op, in_place=True, bytes_per_pack=limit)
        assert all(result is array for result, array in zip(results, arrays, strict=True))
        assert all(map(same_bits, arrays, expected))


@pytest.mark.keeps_memory
@settings(max_examples=amount(20, 2000), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sizes=st.lists(st.integers(0, 40), min_size=2, max_size=12), seed=st.integers(0, 9))
def test_any_numbers_where_the_order_is_that_of_the_ranks(
    communicator: Communicator, sizes: list[int], seed: int
) -> None:
    """Two ranks add in one way only; node memory is added up in the order of the ranks, wherever an element lies."""
    collective = _node_or_pair(communicator)
    if collective is None:
        pytest.skip("this order of addition depends on the element's place")
    random = np.random.default_rng([communicator.rank, seed])
    arrays = [random.standard_normal(size).astype(np.float32) for size in sizes]
    expected = [collective.all_reduce(array) for array in arrays]
    assert all(map(same_bits, all_reduce_list(collective, arrays, bytes_per_pack=64), expected))
    all_reduce_list(collective, arrays, in_place=True)
    assert all(map(same_bits, arrays, expected))


@settings(max_examples=amount(25, 2000), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_neighbours_differ_between_ranks(collective: CollectiveFront, data: st.DataObject) -> None:
    """Each rank lays its arrays out in its own way; what lies between them stays as it is."""
    n, rank = collective.communicator.size, collective.communicator.rank
    sizes = data.draw(st.lists(st.integers(0, 9000), min_size=2, max_size=6))
    # Less is packed without a look at where it lies.
    sizes.insert(data.draw(st.integers(0, len(sizes))), packing.ALONE_BYTES // 4)
    largest = data.draw(st.integers(0, 2))
    everyones = [
        data.draw(st.lists(st.integers(0, largest), min_size=len(sizes), max_size=len(sizes))) for _ in range(n)
    ]
    gaps = everyones[rank]
    memory = np.full(sum(sizes) + sum(gaps), -1.0, np.float32)
    arrays, at = [], 0
    for size, gap in zip(sizes, gaps, strict=True):
        arrays.append(memory[at : at + size])
        arrays[-1][...] = np.arange(size) + rank
        at += size + gap
    before = calls_of(collective)
    all_reduce_list(collective, arrays, in_place=True)
    # NumPy puts an empty view at the beginning of the memory.
    if n > 1 and all(sizes) and not any(any(own[:-1]) for own in everyones):
        assert calls_of(collective) - before == 1 + 2, "one for the nest, one to agree, and one for all arrays"
    for array, size in zip(arrays, sizes, strict=True):
        np.testing.assert_array_equal(array, n * np.arange(size) + n * (n - 1) / 2)
    assert (memory == -1).sum() == sum(gaps)


@pytest.mark.mpi(min_size=2)
def test_the_number_of_calls(collective: CollectiveFront) -> None:
    """One call names the nest; then a bucket per dtype, large arrays alone, neighbours as one after one agreement."""
    n = collective.communicator.size
    large = np.ones(packing.ALONE_BYTES // 4, np.float32)
    nest = {"w": [np.ones(3, np.float32)] * 50, "large": large, "n": (np.ones(2, np.int64), np.ones((), np.int64))}
    before = calls_of(collective)
    result = all_reduce_nest(collective, nest)
    assert calls_of(collective) - before == 1 + 3
    assert [int(one.sum()) for one in (*result["w"], result["large"], *result["n"])] == [
        *([3 * n] * 50), large.size * n, 2 * n, n
    ]
    memory = np.ones(4 * large.size, np.float32)
    arrays = [part.reshape(2, -1) for part in np.split(memory, 16)]
    before = calls_of(collective)
    all_reduce_list(collective, arrays, in_place=True)
    assert calls_of(collective) - before == 1 + 2
    np.testing.assert_array_equal(memory, n)
    before = calls_of(collective)
    all_reduce_list(collective, [np.ones(packing.PACK_BYTES // 128, np.float32) for _ in range(65)])
    assert calls_of(collective) - before == 1 + 3  # 32, 32 and 1


def test_arrays_of_two_allocations_are_no_neighbours(collective: CollectiveFront) -> None:
    memory = memoryview(bytearray(2 * packing.ALONE_BYTES))
    # One memory, seen as two: to a program they are two, even though their addresses touch.
    cut = packing.ALONE_BYTES
    halves = [np.frombuffer(memory[:cut], np.float32), np.frombuffer(memory[cut:], np.float32)]
    assert address_of(halves[0]) + halves[0].nbytes == address_of(halves[1])
    for number, half in enumerate(halves):
        half[...] = np.arange(half.size) + number
    expected = [collective.all_reduce(half) for half in halves]
    before = calls_of(collective)
    all_reduce_list(collective, halves, in_place=True)
    # A rank that is alone compares its calls with nobody's, and does not count them.
    assert calls_of(collective) - before == (0 if collective.communicator.size == 1 else 1 + 3), "they were not joined"
    assert all(map(same_bits, halves, expected))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("in_place", [False, True])
def test_nests_that_differ(communicator: Communicator, in_place: bool) -> None:
    """The same bytes in all, so that the packed arrays alone would not tell."""
    collective = open_collective(communicator, "MPI")
    sizes = (2, 3) if communicator.rank == 1 else (3, 2)
    arrays = [np.ones(size, np.float32) for size in sizes]
    with pytest.raises(MismatchError, match=r"reduced together.*\(3,\).*\(2,\).*on rank") as caught:
        all_reduce_list(collective, arrays, in_place=in_place)
    assert is_shared(caught.value)
    with pytest.raises(MismatchError, match="reduced together"):
        all_reduce_list(collective, [np.ones(2)] * (2 + communicator.rank), in_place=in_place)
    assert all((array == 1).all() for array in arrays)


def test_differences_are_found_for_ever_under_check(communicator: Communicator) -> None:
    collective = selection.choose(communicator, CommunicationOptions(check=True))
    for _ in range(40):
        all_reduce_list(collective, [np.ones(2), np.ones(3)])
    sizes = (2, 3) if communicator.rank == 0 else (3, 2)
    if communicator.size > 1:
        with pytest.raises(MismatchError, match="reduced together"):
            all_reduce_list(collective, [np.ones(size) for size in sizes])


def test_errors_come_before_changes(collective: CollectiveFront) -> None:
    good = np.ones(4, np.float32)
    frozen = np.ones(4, np.float32)
    frozen.flags.writeable = False
    cases: list[tuple[Any, ReduceOp, bool, type[Exception], str]] = [
        (np.array([True, False]), ReduceOp.SUM, False, TypeError, "booleans"),
        (np.array(["a", "b"]), ReduceOp.SUM, False, TypeError, "cannot be reduced"),
        (None, ReduceOp.SUM, False, TypeError, "NoneType"),
        (np.ones(3, np.int32), ReduceOp.MEAN, True, TypeError, "MEAN of int32"),
        (np.ones((4, 4))[:, ::2], ReduceOp.SUM, True, ValueError, "C-contiguous"),
        (frozen, ReduceOp.SUM, True, ValueError, "writeable=False"),
    ]
    for bad, op, in_place, kind, text in cases:
        with pytest.raises(kind, match=text):
            all_reduce_list(collective, [bad, good] if collective.communicator.size == 1 else [good, bad], op,
                            in_place=in_place)
        assert (good == 1).all()


def test_sparse_leaves_and_structure(collective: CollectiveFront) -> None:
    n, rank = collective.communicator.size, collective.communicator.rank
    rows = IndexedSlices(np.full((rank, 2), 1.0, np.float32), np.zeros(rank, np.int64), (3, 2))
    nest = {"b": (rows, np.float32(1)), "a": [np.arange(4).reshape(2, 2)]}
    result = all_reduce_nest(collective, nest)
    assert list(result) == ["b", "a"] or list(result) == ["a", "b"]
    assert isinstance(result["b"][0], IndexedSlices)
    assert result["b"][0].values.shape == (n * (n - 1) // 2, 2)
    assert result["b"][1] == n
    np.testing.assert_array_equal(result["a"][0], n * np.arange(4).reshape(2, 2))
    assert all_reduce_nest(collective, []) == []


def test_arrays_of_another_library(collective: CollectiveFront) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    n = collective.communicator.size
    tensors = [torch.ones(3), torch.full((2, 2), 2.0)]
    results = all_reduce_list(collective, tensors)
    assert [type(one) for one in results] == [torch.Tensor] * 2
    assert results[1].tolist() == [[2 * n, 2 * n]] * 2
    assert all_reduce_list(collective, tensors, in_place=True)[0] is tensors[0]
    assert tensors[0].tolist() == [n] * 3


def test_a_strategy_packs_what_it_reduces(communicator: Communicator) -> None:
    strategy = make_strategy(communicator, "node")
    n, rank = strategy.num_replicas_in_sync, communicator.rank
    nest = {"loss": 1.5, "counts": [np.int64(rank), np.arange(3)], "weights": [np.full(2, 0.5)] * 20}
    collective = strategy.arena.collective
    assert isinstance(collective, CollectiveFront)
    before = calls_of(collective)
    result = strategy.reduce("SUM", nest, axis=None)
    assert calls_of(collective) - before == (1 + 3 if n > 1 else 0)
    assert isinstance(result["loss"], np.float32)
    assert result["loss"] == 1.5 * n
    assert result["counts"][0] == n * (n - 1) // 2
    assert result["weights"][19].tolist() == [0.5 * n] * 2
    mean = strategy.run(lambda: _context().all_reduce("MEAN", nest))
    assert mean["loss"] == 1.5
    assert (mean["counts"][0], mean["counts"][0].dtype) == ((n - 1) / 2, np.float64)
    assert strategy.reduce("SUM", [np.ones(2)], axis=None)[0].tolist() == [n] * 2


def _context() -> mpidist.ReplicaContext:
    context = mpidist.get_replica_context()
    assert context is not None
    return context


_opened: dict[int, CollectiveFront] = {}


def _node_or_pair(communicator: Communicator) -> CollectiveFront | None:
    if id(communicator) not in _opened:
        one_node = len(communicator.node_sizes) == 1 and communicator.size > 1
        backend = CommunicationImplementation.NODE if one_node else CommunicationImplementation.AUTO
        _opened[id(communicator)] = open_collective(communicator, backend.name)
    return _opened[id(communicator)] if communicator.size <= 2 or len(communicator.node_sizes) == 1 else None
