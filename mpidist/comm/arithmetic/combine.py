"""How the ranks' arrays are combined element by element: in the order given, halves in float32."""

from __future__ import annotations

import contextvars
import importlib
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np

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
    """Local. Whether the dtype is float16, or bfloat16 of ml_dtypes."""
    return dtype.itemsize == 2 and dtype.kind in "fV"


def half_dtype(name: str) -> np.dtype[Any]:
    """Local. The dtype "float16" or "bfloat16".

    Raises:
        UnavailableError: bfloat16 without ml_dtypes.
    """
    if name == "bfloat16":
        # NumPy knows the name once the package is imported.
        try:
            importlib.import_module("ml_dtypes")
        except ImportError as error:
            raise UnavailableError("bfloat16 arrays need the package ml_dtypes: pip install ml_dtypes") from error
    return np.dtype(name)


def combined_dtype(dtype: np.dtype[Any], op: ReduceOp, *, combines_halves: bool) -> np.dtype[Any]:
    """Local. The dtype in which arrays are combined: their own, unless the backend lacks it or a sum may overflow.

    Args:
        dtype: Of the arrays.
        op: The operation.
        combines_halves: See `Backend`.
    """
    if op is ReduceOp.MEAN and dtype.kind in "iu":
        # The sum of small integers may not fit their own dtype.
        return np.dtype(np.float64)
    if is_half(dtype):
        # A mean of halves may fit where their sum does not.
        keeps = combines_halves and op is not ReduceOp.MEAN
        return dtype.newbyteorder("=") if keeps else np.dtype(np.float32)
    if dtype.kind == "b" and not combines_halves:
        return np.dtype(np.uint8)
    return cast("np.dtype[Any]", dtype.newbyteorder("="))


# An overflow is an infinity, as it is where MPI adds; no warning on one rank.
@np.errstate(all="ignore")
def combine(parts: Sequence[AnyArray], out: AnyArray, op: ReduceOp) -> None:
    """Local. Combine arrays of one shape into `out`, which may be one of them, in their order.

    Args:
        parts: At least one array.
        out: Of the same shape and dtype; the first part, or one that only shares memory with the first two.
        op: The operation; MEAN adds.
    """
    if len(parts) == 1:
        if out is not parts[0]:
            out[...] = parts[0]
        return
    function = FUNCTIONS[op]
    if op in _IN_FLOAT32 and is_half(out.dtype):
        total = function(parts[0].astype(np.float32), parts[1].astype(np.float32))
        for part in parts[2:]:
            function(total, part.astype(np.float32), out=total)
        out[...] = total.astype(out.dtype)
        return
    function(parts[0], parts[1], out=out)
    for part in parts[2:]:
        function(out, part, out=out)


def open_quiet() -> Callable[..., object]:
    """Local. What calls a function with arguments and without NumPy's warnings; for one thread at a time.

    It takes as long as a call; `np.errstate` takes a microsecond, as long as a small array does.
    """
    context = contextvars.Context()
    context.run(np.seterr, all="ignore")
    return context.run


def add_halves(rows: AnyArray) -> AnyArray:
    """Local. The sum over the first dimension, in float32, row by row."""
    total: AnyArray = rows[0].astype(np.float32)
    for row in rows[1:]:
        arrays.namespace(rows).add(total, row.astype(np.float32), out=total)
    return total
