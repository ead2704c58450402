"""Combination of the ranks' arrays, element by element: in the given order, half precision in float32."""

from __future__ import annotations

import contextvars
import importlib
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from mpidist import arrays
from mpidist.arrays import AnyArray
from mpidist.errors import UnavailableError
from mpidist.options import ReduceOp

FUNCTIONS: dict[ReduceOp, np.ufunc] = {
    ReduceOp.SUM: np.add,
    ReduceOp.MEAN: np.add,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.PROD: np.multiply,
}
_IN_FLOAT32 = (ReduceOp.SUM, ReduceOp.MEAN, ReduceOp.PROD)


def is_half(dtype: np.dtype[Any]) -> bool:
    """Local. Whether the dtype is float16 or the bfloat16 of ml_dtypes."""
    # NumPy knows bfloat16 as kind "V"; plain void dtypes never get here (`collective.check_reducible`).
    return dtype.itemsize == 2 and dtype.kind in "fV"


def named_dtype(name: npt.DTypeLike | None) -> np.dtype[Any]:
    """Local. The dtype of a name of NumPy's, or "bfloat16"; of anything else `np.dtype(name)`.

    Raises:
        TypeError: There is no such dtype.
        UnavailableError: bfloat16 was asked for, and the package ml_dtypes is not installed.
    """
    if isinstance(name, str) and name == "bfloat16":
        # NumPy knows the name bfloat16 only after this import.
        try:
            importlib.import_module("ml_dtypes")
        except ImportError as error:
            raise UnavailableError(
                f"arrays of dtype bfloat16 need the package ml_dtypes, which is not installed ({error}): pip install "
                "ml_dtypes"
            ) from error
    return np.dtype(name)


def combined_dtype(dtype: np.dtype[Any], op: ReduceOp, *, combines_halves: bool) -> np.dtype[Any]:
    """Local. The dtype in which arrays are combined: their own, unless the backend lacks it or a mean may overflow.

    Args:
        dtype: The arrays' dtype.
        op: The operation.
        combines_halves: See `Backend`.
    """
    if op is ReduceOp.MEAN and dtype.kind in "iu":
        # The sum of small integers may not fit their own dtype.
        return np.dtype(np.float64)
    if is_half(dtype):
        # The mean may fit half precision where the sum does not.
        keeps = combines_halves and op is not ReduceOp.MEAN
        return dtype.newbyteorder("=") if keeps else np.dtype(np.float32)
    if dtype.kind == "b" and not combines_halves:
        return np.dtype(np.uint8)
    return cast("np.dtype[Any]", dtype.newbyteorder("="))


# An overflow gives an infinity in silence, as it does where MPI adds. A warning would come on one rank only.
@np.errstate(all="ignore")
def combine(sources: Sequence[AnyArray], out: AnyArray, op: ReduceOp) -> None:
    """Local. Combine arrays of one shape in their order, and write the result into `out`.

    Args:
        sources: At least one array.
        out: An array of the same shape and dtype. It may be one of the first two sources, or share memory with them,
            but not with a later one: `out` is written before that one is read.
        op: The operation; MEAN adds.
    """
    if len(sources) == 1:
        if out is not sources[0]:
            out[...] = sources[0]
        return
    function = FUNCTIONS[op]
    if op in _IN_FLOAT32 and is_half(out.dtype):
        total = function(sources[0].astype(np.float32), sources[1].astype(np.float32))
        for source in sources[2:]:
            function(total, source.astype(np.float32), out=total)
        out[...] = total.astype(out.dtype)
        return
    function(sources[0], sources[1], out=out)
    for source in sources[2:]:
        function(out, source, out=out)


def open_quiet() -> Callable[..., object]:
    """Local. A callable that calls a function with arguments and without NumPy's warnings.

    It costs no more than a call. `np.errstate` costs a microsecond, as much as combining a small array.
    """
    # NumPy keeps its error state in a context variable. A context cannot be entered twice at the same time: each thread
    # needs a callable of its own.
    context = contextvars.Context()
    context.run(np.seterr, all="ignore")
    return context.run


def add_halves(rows: AnyArray) -> AnyArray:
    """Local. The sum over the first dimension, in float32, row by row."""
    total: AnyArray = rows[0].astype(np.float32)
    for row in rows[1:]:
        arrays.namespace(rows).add(total, row.astype(np.float32), out=total)
    return total
