"""Values as arrays: of a variable's shape and dtype, or of the dtypes that Python's numbers have by default."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from mpidist import arrays
from mpidist.arrays import AnyArray
from mpidist.variables.whole_numbers import fitting


def coerced(name: str, shape: tuple[int, ...], dtype: np.dtype[Any], value: npt.ArrayLike) -> AnyArray:
    """Local. See `BaseVariable.coerce`.

    Args:
        name: The name of the variable, for errors.
        shape: The shape of the variable.
        dtype: The dtype of the variable.
        value: The value.
    """
    array = arrays.as_array(value)
    if array.shape != shape:
        raise ValueError(f"variable {name!r}: expected a value of shape {shape}, got {array.shape}")
    if array.dtype == dtype:
        return array
    # A Python number takes the variable's dtype, as in NumPy's own arithmetic.
    if isinstance(value, (bool, int, float, complex)) and _weak_cast(array.dtype.kind, dtype.kind):
        try:
            return np.asarray(value, dtype)
        except OverflowError:
            if dtype.kind in "iu":
                fitting(name, array, dtype)
            raise
    if not np.can_cast(array.dtype, dtype, "same_kind"):
        raise TypeError(
            f"variable {name!r}: expected a value of dtype {dtype}, got {array.dtype}; convert it by "
            f".astype({dtype.name!r}) if that is meant"
        )
    # Larger integers would wrap.
    return fitting(name, array, dtype) if dtype.kind in "iu" else array.astype(dtype)


def default_array(value: Any, dtype: npt.DTypeLike | None = None) -> AnyArray:
    """Local. An initial value as an array: Python floats become float32 and ints int32, arrays keep their dtype."""
    array = arrays.as_array(value)
    if dtype is not None:
        # NumPy refuses Python's numbers that do not fit, and wraps those of an array.
        return np.array(value, dtype) if isinstance(value, (bool, int, float, list, tuple)) else array.astype(dtype)
    # Python's numbers, and lists of them, have none of these. A table of pandas has no `dtype`, yet is an array.
    if any(hasattr(value, name) for name in ("dtype", "__array__", "__dlpack__")):
        return array
    if array.dtype == np.float64:
        return array.astype(np.float32)
    if array.dtype == np.int64 and array.size and array.min() >= -(2**31) and array.max() < 2**31:
        return array.astype(np.int32)
    return array


def _weak_cast(have: str, want: str) -> bool:
    order = "biufc"
    return have in order and want in order and order.index(have) <= order.index(want)
