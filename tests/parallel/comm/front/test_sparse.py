"""Sparse reductions: rows gathered, merged or all-reduced, against NumPy; and how much moves on the way."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mpidist.arrays import AnyArray
from mpidist.comm.backends.ring import RingBackend
from mpidist.comm.choice import selection
from mpidist.comm.collective import Collective
from mpidist.comm.front.sparse import gather_rows, reduce_slices
from mpidist.comm.group.communicator import Communicator
from mpidist.errors import MismatchError, is_shared
from mpidist.indexed_slices import IndexedSlices
from mpidist.options import CommunicationOptions, ReduceOp

pytestmark = pytest.mark.mpi

ROWS = 12


@pytest.fixture(params=["AUTO", "MPI", "RING"])
def collective(request: pytest.FixtureRequest, communicator: Communicator) -> Collective:
    return selection.choose(communicator, CommunicationOptions(implementation=request.param))


def slices_of(rank: int, dtype: str, row_shape: tuple[int, ...], overlap: str) -> IndexedSlices:
    """Any number of rows, some twice; none on the first rank where ranks name few rows in common."""
    generator = np.random.default_rng((rank, 3))
    count = {"none": 0, "few": 3 * rank, "all": 2 * ROWS}[overlap]
    indices = np.arange(count) % ROWS if overlap == "all" else generator.integers(0, ROWS, count)
    values = (generator.integers(0, 9, (count, *row_shape)) - 4) / 4
    return IndexedSlices(
        (4 * values if np.dtype(dtype).kind in "iu" else values).astype(dtype), indices.astype("int32"),
        (ROWS, *row_shape),
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", ">f4", "int8", "complex128", "longdouble"])
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MEAN])
def test_every_way_gives_the_dense_sum(collective: Collective, op: ReduceOp, dtype: str) -> None:
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes")
    shapes: list[tuple[int, ...]] = [(), (3,), (2, 4), (0,)]
    for row_shape, overlap in itertools.product(shapes, ("none", "few", "all")):
        require_dense_sum(collective, op, dtype, row_shape, overlap)


def require_dense_sum(
    collective: Collective, op: ReduceOp, dtype: str, row_shape: tuple[int, ...], overlap: str
) -> None:
    size = collective.communicator.size
    everyones = [slices_of(rank, dtype, row_shape, overlap) for rank in range(size)]
    wide = "complex128" if np.dtype(dtype).kind == "c" else "float64"
    expected = np.zeros((ROWS, *row_shape), wide)
    for one in everyones:
        np.add.at(expected, one.indices, one.values.astype(wide))
    expected = expected / size if op is ReduceOp.MEAN else expected
    mine = everyones[collective.communicator.rank]
    for kind in ({}, {"merge": True}, {"densify": True}):
        result = reduce_slices(collective, op, mine, **kind)
        assert result.indices.dtype == np.int64
        assert result.dense_shape == mine.dense_shape
        whole = IndexedSlices(result.values.astype(wide), result.indices, result.dense_shape)
        # Sums of integers are exact. A mean divides each rank's values: a row of several ranks is a sum of quotients.
        inexact = np.dtype(dtype).kind not in "iu" or op is ReduceOp.MEAN
        tolerance = {2: 1e-2, 4: 1e-6}.get(result.values.dtype.itemsize, 1e-14) if inexact else 0
        np.testing.assert_allclose(whole.to_dense(), expected, rtol=tolerance, atol=tolerance)
        named = np.concatenate([one.indices for one in everyones])
        np.testing.assert_array_equal(result.indices, np.unique(named) if kind else named)
        if op is ReduceOp.MEAN and dtype == "int8":
            assert result.dtype == np.float64
        else:
            assert result.dtype == np.dtype(dtype).newbyteorder("=")
        first = collective.communicator.broadcast_object(result.values)
        np.testing.assert_array_equal(result.values, first)


def test_merged_sums_go_in_the_order_of_the_ranks(collective: Collective) -> None:
    rank, size = collective.communicator.rank, collective.communicator.size

    def values_of(rank: int) -> AnyArray:
        return np.random.default_rng(rank).normal(size=(30, 5)).astype("float32")

    indices = np.arange(30) % 4
    result = reduce_slices(collective, ReduceOp.SUM, IndexedSlices(values_of(rank), indices), merge=True)
    expected = np.zeros((4, 5), "float32")
    for each in range(size):
        for index, value in zip(indices, values_of(each), strict=True):
            expected[index] += value
    np.testing.assert_array_equal(result.values, expected)


def test_means_of_small_integers_do_not_wrap(collective: Collective) -> None:
    rows = IndexedSlices(np.full((4, 2), 100, "int8"), np.array([1, 1, 1, 5]))
    for kind in ({"merge": True}, {"densify": True}):
        result = reduce_slices(collective, ReduceOp.MEAN, rows, **kind)
        assert result.values.tolist() == [[300, 300], [100, 100]]


@pytest.mark.parametrize("dtype", ["int8", "uint32", "int64", "uint64"])
@pytest.mark.parametrize("kind", [{"merge": True}, {"densify": True}], ids=["merge", "densify"])
def test_sums_of_integers_do_not_wrap(collective: Collective, dtype: str, kind: dict[str, bool]) -> None:
    rank, size = collective.communicator.rank, collective.communicator.size
    largest = int(np.iinfo(dtype).max)
    # The largest number is made of the ranks' together. One row is in two pieces on the first rank.
    share = largest // (size + 1)
    rest = largest - (size + 1) * share
    numbers, rows = ([share + rest, 1, share], [3, 5, 3]) if rank == 0 else ([0, share], [5, 3])
    mine = IndexedSlices(np.array(numbers, dtype).reshape(-1, 1), np.array(rows))
    found = reduce_slices(collective, ReduceOp.SUM, mine, **kind)
    assert found.dtype == dtype
    assert found.values[found.indices == 3].tolist() == [[largest]]
    more = IndexedSlices(np.array([*numbers, int(rank == size - 1)], dtype).reshape(-1, 1), np.array([*rows, 3]))
    with pytest.raises(OverflowError, match=f"a SUM of {dtype} does not fit its dtype") as caught:
        reduce_slices(collective, ReduceOp.SUM, more, **kind)
    assert is_shared(caught.value)


def test_the_argument_is_left_alone(collective: Collective) -> None:
    values, indices = np.ones((3, 2)), np.array([2, 0, 2])
    for kind in ({}, {"merge": True}, {"densify": True}):
        result = reduce_slices(collective, ReduceOp.MEAN, IndexedSlices(values, indices), **kind)
        result.values[...] = 7
        result.indices[...] = 7
    assert (values == 1).all()
    assert indices.tolist() == [2, 0, 2]


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("case", ["row shape", "dtype", "dense shape", "operation", "merge"])
def test_a_difference_is_a_mismatch_on_every_rank(collective: Collective, case: str) -> None:
    odd = collective.communicator.rank == collective.communicator.size - 1
    width, dtype = (3 if odd and case == "row shape" else 2), "int64" if odd and case == "dtype" else "float64"
    shape = (9 if odd and case == "dense shape" else 8, width)
    rows = IndexedSlices(np.ones((1, width), dtype), np.array([4]), shape)
    op = ReduceOp.MEAN if odd and case == "operation" else ReduceOp.SUM
    with pytest.raises(MismatchError, match="dense shape, row shape and dtype of IndexedSlices must be") as caught:
        reduce_slices(collective, op, rows, merge=odd and case == "merge")
    assert is_shared(caught.value)
    assert len(set(collective.communicator.all_gather_object(str(caught.value)))) == 1
    assert len(reduce_slices(collective, ReduceOp.SUM, IndexedSlices(np.ones(1), np.array([0]))).indices) > 1


def count_gathers(
    collective: Collective, tables_of: Callable[[int], list[tuple[AnyArray, AnyArray]]], monkeypatch: pytest.MonkeyPatch
) -> int:
    """Gather every rank's tables, check what comes, and count the messages of objects."""
    communicator = collective.communicator
    calls: list[Any] = []
    gather = communicator.all_gather_object

    def counted(value: Any) -> list[Any]:
        calls.append(value)
        return gather(value)

    with monkeypatch.context() as patch:
        patch.setattr(communicator, "all_gather_object", counted)
        result = gather_rows(collective, tables_of(communicator.rank), "tables")
    every = [tables_of(rank) for rank in range(communicator.size)]
    for number, (indices, values) in enumerate(result):
        np.testing.assert_array_equal(indices, np.concatenate([tables[number][0] for tables in every]))
        np.testing.assert_array_equal(values, np.concatenate([tables[number][1] for tables in every]))
        assert values.dtype == every[0][number][1].dtype
    return len(calls)


def test_tables_go_in_one_message(collective: Collective, monkeypatch: pytest.MonkeyPatch) -> None:
    def tables_of(rank: int) -> list[tuple[AnyArray, AnyArray]]:
        return [
            (np.arange(rank), np.full((rank, 3), rank, "float16")),
            (np.arange(0), np.ones((0, 2))),
            (np.arange(5) + rank, np.full((5, 1), rank, "float64")),
        ]

    assert count_gathers(collective, tables_of, monkeypatch) == 1


def test_some_ranks_have_much(collective: Collective) -> None:
    """Values that are large go by themselves, on all ranks if on any."""
    rank, size = collective.communicator.rank, collective.communicator.size

    def tables_of(rank: int) -> list[tuple[AnyArray, AnyArray]]:
        counts = (7 if rank else 20_000, 3)
        return [(np.arange(n), np.random.default_rng((rank, n)).normal(size=(n, 2))) for n in counts]

    for number, (indices, values) in enumerate(gather_rows(collective, tables_of(rank), "tables")):
        np.testing.assert_array_equal(indices, np.concatenate([tables_of(r)[number][0] for r in range(size)]))
        np.testing.assert_array_equal(values, np.concatenate([tables_of(r)[number][1] for r in range(size)]))


def test_small_tables_share_a_message_beside_large_ones(
    collective: Collective, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One message for all indices and what is small, one more for each table that is large on some rank."""
    size = collective.communicator.size

    def tables_of(rank: int) -> list[tuple[AnyArray, AnyArray]]:
        # Bytes that are no whole number of 64-bit words, on each rank other ones; the first is large on one rank.
        counts = (60_000 if rank == size - 1 else 5, *range(rank, rank + 20), 70_000)
        random = np.random.default_rng(rank)
        return [(np.arange(n) + rank, random.normal(size=(n, 3)).astype("float16")) for n in counts]

    assert count_gathers(collective, tables_of, monkeypatch) == 3


@pytest.mark.mpi(min_size=2)
def test_bytes_that_move(communicator: Communicator) -> None:
    n, width = communicator.size, 64
    ring = selection.choose(communicator, CommunicationOptions(implementation="RING"))
    backend = ring.backend
    assert isinstance(backend, RingBackend)

    def sent_by_all(indices: AnyArray, **kind: bool) -> int:
        rows = IndexedSlices(np.ones((len(indices), width), "float32"), indices, (10_000, width))
        before = backend.traffic.sent
        reduce_slices(ring, ReduceOp.SUM, rows, **kind)
        return sum(communicator.all_gather_object(backend.traffic.sent - before))

    apart = np.arange(30) + 1000 * communicator.rank
    row = 4 * width
    assert sent_by_all(apart) == (n - 1) * n * (30 * (8 + row) + 24)
    # The indices first, then the rows: a gathered row goes around the ring.
    assert sent_by_all(apart, densify=True) == (n - 1) * n * (30 * (8 + row) + 24)
    # Everyone's rows are the same: they are all-reduced where that is less, far from all 10 000 rows.
    together = sent_by_all(np.arange(30), densify=True)
    values = n * 30 * row if n <= 2 else 2 * 30 * row
    assert together == (n - 1) * (n * (30 * 8 + 24) + values)
    # Rows that a rank names often travel once.
    assert sent_by_all(np.zeros(500, int), densify=True) == (n - 1) * (n * (8 + 24) + (n if n <= 2 else 2) * row)
