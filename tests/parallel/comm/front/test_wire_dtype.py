"""Half precision on the wire: inputs are rounded once, the sum once, and half as much is sent."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from mpidist.arrays import AnyArray
from mpidist.comm.arithmetic.combine import half_dtype
from mpidist.comm.backends.ring import RingBackend
from mpidist.comm.choice import selection
from mpidist.comm.communicator import Communicator
from mpidist.comm.front.front import CollectiveFront
from mpidist.options import CommunicationOptions, ReduceOp
from tests.parallel.bits import require_same_bits

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("wire")]

BACKENDS = ["AUTO", *(backend.name for backend in selection.BACKENDS)]


@pytest.fixture(params=["float16", "bfloat16"])
def wire(request: pytest.FixtureRequest) -> np.dtype[Any]:
    if request.param == "bfloat16":
        pytest.importorskip("ml_dtypes", reason="bfloat16 comes from ml_dtypes")
    return half_dtype(request.param)


@pytest.fixture(params=["AUTO", "MPI", "RING", "NODE"])
def collective(request: pytest.FixtureRequest, communicator: Communicator, wire: np.dtype[Any]) -> CollectiveFront:
    options = CommunicationOptions(implementation=request.param, wire_dtype=wire.name)
    made = selection.choose(communicator, options)
    assert isinstance(made, CollectiveFront)
    return made


@functools.lru_cache(32)
def numbers_of(rank: int, size: int) -> AnyArray:
    return np.random.default_rng(rank).normal(size=size)


def array_of(rank: int, dtype: str = "float32", size: int = 1003) -> AnyArray:
    return numbers_of(rank, size).astype(dtype)


def rounded_sum(arrays: list[AnyArray], wire: np.dtype[Any]) -> AnyArray:
    """Each array rounded, added in float32 in the order of the ranks, and the sum rounded."""
    total = arrays[0].astype(wire).astype(np.float32)
    for array in arrays[1:]:
        total += array.astype(wire).astype(np.float32)
    return np.asarray(total.astype(wire))


@pytest.mark.parametrize("dtype", ["float32", "float64", ">f4", "longdouble"])
@pytest.mark.parametrize("size", [1, 2, 1003, 200_001])
def test_two_roundings_and_no_more(collective: CollectiveFront, wire: np.dtype[Any], dtype: str, size: int) -> None:
    ranks = range(collective.communicator.size)
    mine = array_of(collective.communicator.rank, dtype, size)
    before = mine.copy()
    result = collective.all_reduce(mine)
    expected = rounded_sum([array_of(rank, dtype, size) for rank in ranks], wire)
    assert result.dtype == mine.dtype
    np.testing.assert_array_equal(result, expected.astype(dtype))
    np.testing.assert_array_equal(mine, before)
    # A longdouble has bytes that mean nothing; what came by the wire fits a double.
    require_same_bits(collective.communicator, result.astype("float64"))
    # Against the true sum: no more than two roundings of the largest number on the way.
    true = np.add.reduce([array_of(rank, "float64", size) for rank in ranks])
    unit = {"float16": 2.0**-11, "bfloat16": 2.0**-8}[wire.name]
    largest = sum(np.abs(array_of(rank, "float64", size)) for rank in ranks)
    assert (np.abs(result.astype("float64") - true) <= 2.01 * unit * largest + 1e-7).all()


def test_what_half_precision_holds_is_exact(collective: CollectiveFront) -> None:
    mine = np.arange(-20, 21, dtype="float32").reshape(1, 41) * (collective.communicator.rank + 1) / 8
    n = collective.communicator.size
    np.testing.assert_array_equal(collective.all_reduce(mine), np.arange(-20, 21).reshape(1, 41) * n * (n + 1) / 16)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_means(collective: CollectiveFront, wire: np.dtype[Any], dtype: str) -> None:
    n = collective.communicator.size
    result = collective.all_reduce(array_of(collective.communicator.rank, dtype), ReduceOp.MEAN)
    total = rounded_sum([array_of(rank, dtype) for rank in range(n)], wire)
    assert result.dtype == np.dtype(dtype)
    expected = np.asarray(total, "float64" if dtype == "float64" else "float32") / n
    np.testing.assert_array_equal(result, expected.astype(dtype))


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MEAN])
@pytest.mark.parametrize("dtype", ["float32", "float64", ">f4"])
def test_in_place(collective: CollectiveFront, op: ReduceOp, dtype: str) -> None:
    mine = array_of(collective.communicator.rank, dtype).reshape(17, 59)
    expected = collective.all_reduce(mine, op)
    assert collective.all_reduce(mine, op, in_place=True) is mine
    np.testing.assert_array_equal(mine, expected)


def test_strided_arrays(collective: CollectiveFront) -> None:
    mine = array_of(collective.communicator.rank).reshape(17, 59)
    np.testing.assert_array_equal(collective.all_reduce(mine.T[::2]), collective.all_reduce(mine).T[::2])


@pytest.mark.parametrize(
    ("dtype", "op"),
    [("float32", ReduceOp.MAX), ("float32", ReduceOp.PROD), ("int32", ReduceOp.SUM), ("complex64", ReduceOp.SUM)],
)
def test_others_are_as_without(collective: CollectiveFront, dtype: str, op: ReduceOp) -> None:
    plain = selection.choose(collective.communicator, CommunicationOptions(implementation="MPI"))
    mine = np.round(100 * array_of(collective.communicator.rank, "float64")).astype(dtype)
    np.testing.assert_allclose(collective.all_reduce(mine, op), plain.all_reduce(mine, op), rtol=1e-6)


def test_too_much_for_float16_is_infinite_everywhere(communicator: Communicator, wire: np.dtype[Any]) -> None:
    collective = selection.choose(communicator, CommunicationOptions(wire_dtype=wire.name))
    result = collective.all_reduce(np.array([1e5, -1e39, 1.0]))
    assert np.isfinite(result).tolist() == [wire.name == "bfloat16", False, True]


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_half_the_bytes(communicator: Communicator, wire: np.dtype[Any], dtype: str) -> None:
    n, size = communicator.size, 12_000

    def sent(**options: Any) -> int:
        ring = selection.choose(communicator, CommunicationOptions(implementation="RING", **options))
        backend = ring.backend
        assert isinstance(backend, RingBackend)
        ring.all_reduce(np.ones(size, dtype))
        return backend.traffic.sent

    item = np.dtype(dtype).itemsize
    assert sent() == 2 * (n - 1) * size // n * item
    assert sent(wire_dtype=wire.name) == 2 * (n - 1) * size // n * 2
