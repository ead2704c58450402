"""Ordered integers: floating-point numbers as integers of the same order, so that MIN and MAX keep a NaN."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpidist import arrays
from mpidist.arrays import AnyArray
from mpidist.options import ReduceOp


def to_ordered(array: AnyArray, op: ReduceOp) -> AnyArray:
    """Local. Integers in the order of the numbers; a NaN is the extreme, which the operation keeps.

    Args:
        array: An array of float32 or float64.
        op: The operation, MIN or MAX.

    Returns:
        A new array, int32 or int64.
    """
    limits = np.iinfo(f"i{array.itemsize}")
    ordered = _turned(array.view(limits.dtype))
    ordered[arrays.namespace(array).isnan(array)] = limits.min if op is ReduceOp.MIN else limits.max
    return ordered


def from_ordered(ordered: AnyArray, dtype: np.dtype[Any]) -> AnyArray:
    """Local. The numbers of `to_ordered`, of its float32 or float64: a new array."""
    return _turned(ordered).view(dtype)


def _turned(bits: AnyArray) -> AnyArray:
    """Turn round the order of negative numbers, whose bits grow with their magnitude; twice gives the same again."""
    limits = np.iinfo(bits.dtype)
    result: AnyArray = bits ^ ((bits >> (limits.bits - 1)) & limits.max)
    return result
