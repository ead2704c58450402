"""Arrays of all ranks whose combination is known, and what is expected of results."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from mpidist.arrays import AnyArray
from mpidist.comm.collective import Collective
from mpidist.options import ReduceOp

# The relative error of a sum or a mean of small numbers that is rounded to the dtype.
_TOLERANCES = {"bfloat16": 1e-2, "float16": 1e-3}
_FUNCTIONS: dict[ReduceOp, Callable[..., Any]] = {
    ReduceOp.SUM: np.sum, ReduceOp.MEAN: np.mean, ReduceOp.MIN: np.min, ReduceOp.MAX: np.max, ReduceOp.PROD: np.prod,
}


def known_dtypes(names: Sequence[str]) -> list[tuple[str, np.dtype[Any]]]:
    """Local. The dtypes of these names, without bfloat16 where ml_dtypes is not installed."""
    if "bfloat16" in names and importlib.util.find_spec("ml_dtypes") is not None:
        # NumPy knows the name bfloat16 only after this import.
        importlib.import_module("ml_dtypes")
        return [(name, np.dtype(name)) for name in names]
    return [(name, np.dtype(name)) for name in names if name != "bfloat16"]


def arrays_of(collective: Collective, dtype: np.dtype[Any], shape: tuple[int, ...] = (70,)) -> list[AnyArray]:
    """Local. One array per rank, of numbers so small that every dtype holds their sum and product over a few ranks."""
    made = []
    for rank in range(collective.communicator.size):
        values: AnyArray = (np.arange(int(np.prod(shape))) + rank) % (3 if rank < 4 else 1) + 1
        if dtype.kind == "c":
            values = values + 1j * rank
        elif dtype.kind == "b":
            values = values % 2
        made.append(values.reshape(shape).astype(dtype))
    return made


def arrays_with_nan(size: int, count: int, dtype: np.dtype[Any]) -> list[AnyArray]:
    """Local. One array per rank, with NaNs at places where all others have numbers, and with zeros of both signs."""
    made = []
    for rank in range(size):
        values = (np.arange(count) * (rank + 1)) % 7 - 3.0
        values[rank :: size + 1] = np.nan if rank % 2 else -np.nan
        values[size :: size + 1] = 0.0 if rank % 2 else -0.0
        made.append(values.astype(dtype))
    return made


def integers_at_the_limit(
    size: int, count: int, dtype: np.dtype[Any], op: ReduceOp, *, largest: bool
) -> tuple[list[AnyArray], AnyArray]:
    """Local. One array per rank, and their combination, whose last element is a limit of the dtype.

    Args:
        size: Number of ranks, at least two.
        count: Number of elements of each array.
        dtype: An integer dtype.
        op: SUM or PROD.
        largest: Whether that is the largest number of the dtype, or the smallest one; a product of unsigned numbers
            always has the largest.
    """
    limits = np.iinfo(dtype)
    made = [(np.arange(count) % 3 + 1).astype(dtype) if rank < 2 else np.ones(count, dtype) for rank in range(size)]
    is_signed = dtype.kind == "i"
    extreme = limits.max if largest or (op is ReduceOp.PROD and not is_signed) else limits.min
    others = [int(op is ReduceOp.PROD)] * (size - 1)
    if op is ReduceOp.SUM and largest and is_signed:
        # A partial sum does not fit the dtype, or would not with the ranks in another order.
        others = [1] * (size - 2) + [2 - size]
    for one, last in zip(made, [extreme, *others], strict=True):
        one[-1] = last
    function = np.add if op is ReduceOp.SUM else np.multiply
    # Partial sums wrap, and the last one wraps back.
    return made, np.asarray(function.reduce(np.stack(made), axis=0, dtype=dtype.newbyteorder("=")))


def is_defined(op: ReduceOp, dtype: np.dtype[Any]) -> bool:
    """Local. Whether arrays of this dtype can be combined so."""
    if dtype.kind == "b":
        return op in (ReduceOp.MIN, ReduceOp.MAX)
    return dtype.kind != "c" or op not in (ReduceOp.MIN, ReduceOp.MAX)


def combined(arrays: list[AnyArray], op: ReduceOp, dtype: np.dtype[Any]) -> AnyArray:
    """Local. NumPy's combination of the ranks' arrays, made in this dtype."""
    return np.asarray(_FUNCTIONS[op](np.stack([array.astype(dtype) for array in arrays]), axis=0))


def compare(result: AnyArray, arrays: list[AnyArray], op: ReduceOp, what: str) -> None:
    """Local. Compare with NumPy's result in the widest type, in which these small numbers are exact."""
    dtype = arrays[0].dtype
    wanted = combined(arrays, op, np.dtype(np.clongdouble if dtype.kind == "c" else np.longdouble))
    kept = np.dtype(np.float64) if op is ReduceOp.MEAN and dtype.kind in "iu" else dtype
    text = f"{op.name} of {what}"
    expect(result.dtype == kept, f"{text}: the result is of {result.dtype}, expected {kept}")
    np.testing.assert_allclose(
        result.astype(wanted.dtype), wanted, rtol=_TOLERANCES.get(dtype.name, 1e-6), err_msg=text, strict=True
    )


def expect(condition: bool, text: str) -> None:
    """Local. Fail the test with this text unless the condition holds."""
    if not condition:
        pytest.fail(text, pytrace=True)


def expect_equal(got: AnyArray, wanted: AnyArray, what: str) -> None:
    """Local. Compare values, shapes and dtypes; `what` the arrays are is part of the text of a failure."""
    np.testing.assert_array_equal(got, wanted, err_msg=what)
    expect(got.shape == wanted.shape, f"{what}: shape {got.shape}, expected {wanted.shape}")
    # Operations that only move arrays may return the native byte order.
    expect(got.dtype.newbyteorder("=") == wanted.dtype.newbyteorder("="), f"{what}: {got.dtype}, not {wanted.dtype}")
