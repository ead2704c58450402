"""Half precision on the wire: large float32 inputs are rounded once, the sum once, and half as much is sent."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from mpidist.arrays import AnyArray
from mpidist.comm.arithmetic.combine import named_dtype
from mpidist.comm.backends.ring import RingBackend
from mpidist.comm.choice import selection
from mpidist.comm.front.front import CollectiveFront
from mpidist.comm.front.halves import HALVED_FROM_BYTES
from mpidist.comm.group.communicator import Communicator
from mpidist.options import CommunicationOptions, ReduceOp
from tests.parallel.bits import require_same_bits

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("wire")]

# One element more than the least number that is rounded.
LEAST = HALVED_FROM_BYTES // 4
SIZE = LEAST + 1


@pytest.fixture(params=["float16", "bfloat16"])
def wire(request: pytest.FixtureRequest) -> np.dtype[Any]:
    if request.param == "bfloat16":
        pytest.importorskip("ml_dtypes", reason="bfloat16 comes from ml_dtypes")
    return named_dtype(request.param)


@pytest.fixture(params=["AUTO", "MPI", "RING", "NODE"])
def collective(request: pytest.FixtureRequest, communicator: Communicator, wire: np.dtype[Any]) -> CollectiveFront:
    options = CommunicationOptions(implementation=request.param, wire_dtype=wire.name)
    made = selection.choose(communicator, options)
    assert isinstance(made, CollectiveFront)
    return made


@functools.lru_cache(32)
def numbers_of(rank: int, size: int) -> AnyArray:
    return np.random.default_rng(rank).normal(size=size)


def array_of(rank: int, dtype: str = "float32", size: int = SIZE) -> AnyArray:
    return numbers_of(rank, size).astype(dtype)


def rounded_sum(arrays: list[AnyArray], wire: np.dtype[Any]) -> AnyArray:
    """Each array rounded, added in float32 in the order of the ranks, and the sum rounded."""
    total = arrays[0].astype(wire).astype(np.float32)
    for array in arrays[1:]:
        total += array.astype(wire).astype(np.float32)
    return np.asarray(total.astype(wire))


@pytest.mark.parametrize("dtype", ["float32", ">f4"])
@pytest.mark.parametrize("size", [LEAST, SIZE, 200_001])
def test_two_roundings_and_no_more(collective: CollectiveFront, wire: np.dtype[Any], dtype: str, size: int) -> None:
    ranks = range(collective.communicator.size)
    mine = array_of(collective.communicator.rank, dtype, size)
    before = mine.copy()
    result = collective.all_reduce(mine)
    expected = rounded_sum([array_of(rank, dtype, size) for rank in ranks], wire)
    assert result.dtype == mine.dtype
    np.testing.assert_array_equal(result, expected.astype(dtype))
    np.testing.assert_array_equal(mine, before)
    require_same_bits(collective.communicator, result)
    # Against the true sum: no more than two roundings of the largest number on the way.
    true = np.add.reduce([array_of(rank, "float64", size) for rank in ranks])
    unit = {"float16": 2.0**-11, "bfloat16": 2.0**-8}[wire.name]
    largest = sum(np.abs(array_of(rank, "float64", size)) for rank in ranks)
    assert (np.abs(result.astype("float64") - true) <= 2.01 * unit * largest + 1e-7).all()


def test_what_half_precision_holds_is_exact(collective: CollectiveFront) -> None:
    whole = np.tile(np.arange(-20, 21, dtype="float32"), (400, 1))
    n = collective.communicator.size
    np.testing.assert_array_equal(
        collective.all_reduce(whole * (collective.communicator.rank + 1) / 8), whole * n * (n + 1) / 16
    )


def test_means(collective: CollectiveFront, wire: np.dtype[Any]) -> None:
    n = collective.communicator.size
    result = collective.all_reduce(array_of(collective.communicator.rank), ReduceOp.MEAN)
    total = rounded_sum([array_of(rank) for rank in range(n)], wire)
    assert result.dtype == np.float32
    np.testing.assert_array_equal(result, np.asarray(total, "float32") / np.float32(n))


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MEAN])
@pytest.mark.parametrize("dtype", ["float32", ">f4"])
def test_in_place(collective: CollectiveFront, op: ReduceOp, dtype: str) -> None:
    mine = array_of(collective.communicator.rank, dtype, 170 * 118).reshape(170, 118)
    expected = collective.all_reduce(mine, op)
    assert collective.all_reduce(mine, op, in_place=True) is mine
    np.testing.assert_array_equal(mine, expected)


def test_strided_arrays(collective: CollectiveFront) -> None:
    mine = array_of(collective.communicator.rank, size=4 * LEAST).reshape(64, -1)
    np.testing.assert_array_equal(collective.all_reduce(mine.T[::2]), collective.all_reduce(mine).T[::2])


@pytest.mark.parametrize(("size", "dtype", "op"), [
    (size, dtype, op) for size in (1, LEAST - 1, SIZE) for dtype in ("float32", "float64", "longdouble", "int32")
    for op in (ReduceOp.SUM, ReduceOp.MEAN, ReduceOp.MAX, ReduceOp.PROD)
    if size != SIZE or dtype != "float32" or op in (ReduceOp.MAX, ReduceOp.PROD)
] + [(SIZE, "complex64", ReduceOp.SUM)])
def test_others_are_exact(collective: CollectiveFront, dtype: str, op: ReduceOp, size: int) -> None:
    """Small arrays, other dtypes and other operations; 2**20 + 3 has more digits than either half, or none."""
    n, rank = collective.communicator.size, collective.communicator.rank
    factor = 1 if op is ReduceOp.PROD else 2**20 + 3
    result = collective.all_reduce(np.full(size, factor + 2 * rank, dtype), op)
    values = [factor + 2 * other for other in range(n)]
    expected = {
        ReduceOp.SUM: sum(values), ReduceOp.MEAN: sum(values) / n, ReduceOp.MAX: max(values),
        ReduceOp.PROD: int(np.prod(values)),
    }[op]
    np.testing.assert_array_equal(result, np.full(size, expected).astype(result.dtype))


def test_too_much_for_float16_is_infinite_everywhere(communicator: Communicator, wire: np.dtype[Any]) -> None:
    collective = selection.choose(communicator, CommunicationOptions(wire_dtype=wire.name))
    # float32 and bfloat16 hold the sum of 30 ranks.
    result = collective.all_reduce(np.repeat(np.array([1e5, -1e37, 1.0], "float32"), LEAST))
    assert np.isfinite(result[::LEAST]).tolist() == [wire.name == "bfloat16", wire.name == "bfloat16", True]


@pytest.mark.mpi(min_size=2)
def test_half_the_bytes(communicator: Communicator, wire: np.dtype[Any]) -> None:
    n, size = communicator.size, 24_000

    def sent(**options: Any) -> int:
        ring = selection.choose(communicator, CommunicationOptions(implementation="RING", **options))
        backend = ring.backend
        assert isinstance(backend, RingBackend)
        ring.all_reduce(np.ones(size, "float32"))
        return backend.traffic.sent

    assert sent() == 2 * (n - 1) * size // n * 4
    assert sent(wire_dtype=wire.name) == 2 * (n - 1) * size // n * 2
