"""Combination of the ranks' arrays, element by element: in the given order, half precision in float32."""

from __future__ import annotations

import contextvars
import importlib
import re
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
# A dtype of these names is one of ml_dtypes.
_NAMES_OF_ML_DTYPES = re.compile("bfloat16|float[468]_[a-z0-9]+|u?int[124]")
_IN_FLOAT32 = (ReduceOp.SUM, ReduceOp.MEAN, ReduceOp.PROD)


def is_half(dtype: np.dtype[Any]) -> bool:
    """Local. Whether the dtype is float16, or the bfloat16 or a float8 of ml_dtypes."""
    # NumPy knows most of these as kind "V"; plain void dtypes never get here (`collective.check_reducible`), and the
    # integers of less than a byte, which are of kind "V", too, are no floating numbers.
    return dtype.kind in "fV" and (dtype.itemsize == 2 or (dtype.itemsize == 1 and dtype.name.startswith("float8")))


def named_dtype(name: npt.DTypeLike | None) -> np.dtype[Any]:
    """Local. The dtype with a name of NumPy or ml_dtypes, such as "bfloat16"; for anything else `np.dtype(name)`.

    Raises:
        TypeError: There is no such dtype.
        UnavailableError: A dtype of ml_dtypes was asked for, and that package is not installed, or is too old for it.
    """
    if isinstance(name, str) and _NAMES_OF_ML_DTYPES.fullmatch(name):
        # NumPy knows these names only after this import.
        try:
            return cast("np.dtype[Any]", np.dtype(getattr(importlib.import_module("ml_dtypes"), name)))
        except (ImportError, AttributeError) as error:
            raise UnavailableError(
                f"arrays of dtype {name} need the package ml_dtypes, which is not installed or too old ({error}): pip "
                "install --upgrade ml_dtypes"
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
        sources: The arrays, at least one.
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
