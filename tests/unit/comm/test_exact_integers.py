"""Sums and products of integers against Python's, which have no end."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpidist.comm.arithmetic import exact
from mpidist.errors import is_shared
from mpidist.options import ReduceOp
from tests.helpers.amounts import amount

DTYPES = ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]
FUNCTIONS: dict[ReduceOp, np.ufunc] = {ReduceOp.SUM: np.add, ReduceOp.PROD: np.multiply}
PYTHONS: dict[ReduceOp, Any] = {ReduceOp.SUM: sum, ReduceOp.PROD: math.prod}
OPS = st.sampled_from(list(FUNCTIONS))


def numbers(dtype: np.dtype[Any]) -> st.SearchStrategy[int]:
    """Numbers of the dtype, many of them at its limits, at their roots and parts, and near zero."""
    limits = np.iinfo(dtype)
    low, high = int(limits.min), int(limits.max)
    marked = {high, high - 1, low, low + 1, high // 2, high // 2 + 1, high // 3, math.isqrt(high), math.isqrt(high) + 1}
    marked |= {-one for one in marked if low <= -one <= high} | {0, 1, 2} | ({-1, -2} if low else set())
    return st.one_of(st.sampled_from(sorted(marked)), st.integers(low, high))


def combine(ranks: list[list[np.ndarray[Any, Any]]], op: ReduceOp) -> list[np.ndarray[Any, Any]]:
    """What a collective makes of the ranks' parts."""
    stacked = [np.stack(parts) for parts in zip(*ranks, strict=True)]
    with np.errstate(all="ignore"):
        return [np.asarray(FUNCTIONS[op].reduce(parts, dtype=parts.dtype)) for parts in stacked]


def check(found: Any, wanted: list[int], dtype: np.dtype[Any]) -> None:
    """`found()` gives these numbers, or raises where one of them does not fit."""
    limits = np.iinfo(dtype)
    if all(limits.min <= one <= limits.max for one in wanted):
        result = found()
        assert result.dtype == dtype
        assert result.reshape(-1).tolist() == wanted
        return
    with pytest.raises(OverflowError, match=f"of {dtype.name} does not fit its dtype: expected {limits.min}") as caught:
        found()
    assert is_shared(caught.value)


@settings(max_examples=amount(80, 5000))
@given(st.data(), st.sampled_from(DTYPES), OPS)
def test_over_ranks(data: st.DataObject, name: str, op: ReduceOp) -> None:
    dtype = np.dtype(name)
    # More than eight products of 16 bits are no float32 any more.
    size = data.draw(st.integers(2, 4) | st.integers(5, 40))
    rows = [data.draw(st.lists(numbers(dtype), min_size=3, max_size=3)) for _ in range(size)]
    arrays = [np.array(row, dtype) for row in rows]
    wanted = [PYTHONS[op](column) for column in zip(*rows, strict=True)]
    if all(exact.fits(array, op, size) for array in arrays):
        # What may be combined as it is.
        assert combine([[array] for array in arrays], op)[0].tolist() == wanted
    combined = combine([exact.parts(array, op, size) for array in arrays], op)
    check(lambda: exact.whole(combined, dtype, op), wanted, dtype)


@settings(max_examples=amount(80, 5000))
@given(st.data(), st.sampled_from(DTYPES), OPS, st.sampled_from([(0,), (1,), (0, 1), ()]), st.booleans())
def test_along_axes(
    data: st.DataObject, name: str, op: ReduceOp, axes: tuple[int, ...], swapped: bool
) -> None:
    dtype = np.dtype(name)
    size = data.draw(st.integers(1, 3))
    lengths = [data.draw(st.integers(0, 4)) if 0 in axes else 2 for _ in range(size)]
    rows = [
        np.array([[data.draw(numbers(dtype)) for _ in range(3)] for _ in range(length)], object).reshape(length, 3)
        for length in lengths
    ]
    local = [FUNCTIONS[op].reduce(row, axis=axes or None) if axes else row for row in rows]
    total = FUNCTIONS[op].reduce(np.stack([np.asarray(one, object) for one in local]))
    given_arrays = [row.astype(dtype.newbyteorder("S") if swapped else dtype) for row in rows]
    combined = combine([exact.parts_along(array, op, axes) for array in given_arrays], op)
    check(lambda: exact.whole(combined, dtype, op), np.asarray(total, object).reshape(-1).tolist(), dtype)


def test_the_error_names_the_way_out() -> None:
    with pytest.raises(OverflowError, match=r"a SUM of uint8 .* 0 to 255, got 300\. .*array\.astype\(np\.int64\)"):
        exact.whole([np.array([300])], np.dtype(np.uint8), ReduceOp.SUM)
    sums = exact.halves(np.array([1 << 62])) * 2
    with pytest.raises(OverflowError, match=rf"int64 .*got {1 << 63}\. .*array\.astype\(np\.float64\), which rounds"):
        exact.whole([sums], np.dtype(np.int64), ReduceOp.SUM)
