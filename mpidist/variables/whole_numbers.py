"""Integers of variables: what does not fit their dtype is an error, where NumPy would wrap."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpidist import arrays
from mpidist.arrays import AnyArray
from mpidist.indexed_slices import first_misfit

# The name of the method that subtracts; `add_array` gets its argument with the other sign.
SUBTRACT = "assign_sub"
# The methods by the name in the message to a server.
METHODS = {"add": "assign_add", "sub": SUBTRACT}
_CHANGES = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


def fitting(name: str, values: AnyArray, dtype: np.dtype[Any]) -> AnyArray:
    """Local. Integers in the dtype of a variable.

    Args:
        name: The name of the variable.
        values: Integers or booleans.
        dtype: The dtype of the variable: integers.

    Raises:
        OverflowError: They do not fit.
    """
    cast: AnyArray = values.astype(dtype)
    wrong = cast != values
    if wrong.any():
        raise _error(name, dtype, "got", _first(values, wrong))
    return cast


def changed(name: str, value: AnyArray, array: AnyArray, method: str) -> AnyArray:
    """Local. The sum of a variable's integers and of an array, in a new array.

    Args:
        name: The name of the variable.
        value: The value of the variable.
        array: The array of the same dtype, as `BaseVariable.add_array` takes it.
        method: The name of the method; under `SUBTRACT` the array has the other sign, which may have wrapped.

    Raises:
        OverflowError: It does not fit.
    """
    subtracts = method == SUBTRACT
    delta = np.negative(array) if subtracts else array
    result = (np.subtract if subtracts else np.add)(value, delta)
    if value.dtype.kind == "u":
        wrong = value < delta if subtracts else result < value
    else:
        # A sum has another sign than both numbers, a difference than the first one, whose sign the second one lacks.
        wrong = (value ^ result) & (value ^ delta if subtracts else delta ^ result) < 0
    if wrong.any():
        first, second = _first(value, wrong), _first(delta, wrong)
        raise _error(name, value.dtype, f"{method} would make", first - second if subtracts else first + second)
    return arrays.as_array(result)


def changed_rows(name: str, kind: str, target: AnyArray, values: AnyArray, indices: AnyArray) -> None:
    """Local. Raise an error if a change of rows of integers would wrap.

    Args:
        name: The name of the variable.
        kind: See `Scatter.scatter`.
        target: The variable's value.
        values: The values of the rows, of the same dtype.
        indices: The indices of the rows.

    Raises:
        OverflowError: A number would wrap.
    """
    found = first_misfit(_CHANGES[kind], target, values, indices) if kind in _CHANGES else None
    if found is not None:
        raise _error(name, target.dtype, f"scatter_{kind} would make", found)


def _first(values: AnyArray, wrong: AnyArray) -> int:
    host = arrays.to_host(arrays.as_array(wrong))
    return int(np.broadcast_to(arrays.to_host(values), host.shape)[host][0])


def _error(name: str, dtype: np.dtype[Any], what: str, number: int) -> OverflowError:
    limits = np.iinfo(dtype)
    return OverflowError(
        f"variable {name!r} of dtype {dtype.name}: expected values from {limits.min} to {limits.max}, {what} {number}. "
        "Make it with a wider dtype, np.int64 or np.float64 for instance"
    )
