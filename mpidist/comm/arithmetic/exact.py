"""Sums and products of integers that never wrap in silence: made in a wider dtype, and cut back with a check.

There is nothing wider than 64 bits. A sum of such integers is made of two sums, of their upper and of their lower
halves. A product is made twice: modulo 2**64, and in float64, from which follows how often it has wrapped.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpidist import arrays
from mpidist.arrays import AnyArray
from mpidist.errors import mark_shared
from mpidist.options import ReduceOp

_SUM, _PROD = ReduceOp.SUM, ReduceOp.PROD
_WHOLE = np.dtype(np.int64)
# Where the halves of a 64-bit integer are.
_LOW, _HIGH = (0, 1) if sys.byteorder == "little" else (1, 0)
_HALF_BITS = 32
_MASK = (1 << _HALF_BITS) - 1
# So many integers of 16 bits have sums that fit 32 bits.
_MOST_IN_32_BITS = 1 << 15
# Products that are equal modulo 2**64 are at least so far apart, with room for the rounding of float64.
_APART = 2.0**62


def is_checked(dtype: np.dtype[Any], op: ReduceOp) -> bool:
    """Local. Whether a result of this operation may wrap: a sum or a product of integers."""
    return (op is _SUM or op is _PROD) and dtype.kind in "iu"


def fits(array: AnyArray, op: ReduceOp, count: int) -> bool:
    """Local. Whether no sum or product of `count` integers as large as the largest of these leaves their dtype.

    Args:
        array: The integers, at least one.
        op: SUM or PROD.
        count: Number of integers.
    """
    limit = int(np.iinfo(array.dtype).max)
    largest = int(array.max())
    if array.dtype.kind == "i":
        largest = max(largest, -int(array.min()))
    if op is _SUM:
        return largest <= limit // count
    return largest <= 1 or largest.bit_length() * count <= limit.bit_length()


def wide_dtype(dtype: np.dtype[Any], op: ReduceOp, count: int) -> np.dtype[Any]:
    """Local. A dtype that holds the sum of `count` integers of up to 32 bits, or detects that a product is too large.

    Args:
        dtype: The dtype of up to 32 bits.
        op: SUM or PROD.
        count: Number of integers.
    """
    is_small = dtype.itemsize < np.dtype(np.int32).itemsize
    if op is _PROD:
        # A product that fits is exact in it, and so is each intermediate product: none is larger, but beside a zero.
        return np.dtype(np.float32 if is_small else np.float64)
    return np.dtype(np.int32 if is_small and count < _MOST_IN_32_BITS else np.int64)


def narrowed(wide: AnyArray, dtype: np.dtype[Any], op: ReduceOp) -> AnyArray:
    """Local. Sums or products of `wide_dtype` in their own dtype; they are the same on every rank.

    Args:
        wide: The sums or products, which may be changed.
        dtype: The dtype of the integers.
        op: SUM or PROD.

    Raises:
        OverflowError: A number does not fit; on every rank.
    """
    if op is _PROD:
        # Where an infinity met a zero, the product is zero.
        wide[wide != wide] = 0
    with np.errstate(invalid="ignore"):
        result: AnyArray = wide.astype(dtype)
    wrong = result != wide
    if wrong.any():
        raise overflow(op, dtype, float(wide[wrong][0]) if op is _PROD else int(wide[wrong][0]))
    return result


def parts(array: AnyArray, op: ReduceOp, count: int) -> list[AnyArray]:
    """Local. The arrays, of integers or float64, whose sums or products over `count` ranks `whole` takes.

    Args:
        array: C-contiguous integers of a native dtype.
        op: SUM or PROD.
        count: Number of ranks.
    """
    if array.itemsize < _WHOLE.itemsize:
        return [array.astype(wide_dtype(array.dtype, op, count))]
    return [halves(array)] if op is _SUM else [array.copy(), array.astype(np.float64)]


def parts_along(array: AnyArray, op: ReduceOp, axes: tuple[int, ...]) -> list[AnyArray]:
    """Local. As `parts`, of the sums or products along these axes, which need not fit.

    Args:
        array: The integers.
        op: SUM or PROD.
        axes: The axes, each once, from 0.

    Returns:
        C-contiguous arrays.
    """
    xp = arrays.namespace(array)
    return [xp.ascontiguousarray(part).reshape(part.shape) for part in _parts_along(array, op, axes)]


def _parts_along(array: AnyArray, op: ReduceOp, axes: tuple[int, ...]) -> list[AnyArray]:
    own = array.dtype.newbyteorder("=")
    if op is _PROD:
        with np.errstate(all="ignore"):
            about = arrays.as_array(array.prod(axes, dtype=np.float64))
        return [about] if own.itemsize < _WHOLE.itemsize else [arrays.as_array(array.prod(axes, dtype=own)), about]
    if own.itemsize < _WHOLE.itemsize:
        return [arrays.as_array(array.sum(axes, dtype=_WHOLE))]
    count = math.prod(array.shape[axis] for axis in axes)
    if not array.size or fits(array, op, max(1, count)):
        return [halves(arrays.as_array(array.sum(axes, dtype=own)))]
    bits, mask = own.type(_HALF_BITS), own.type(_MASK)
    sums = [(array >> bits).sum(axes, dtype=_WHOLE), (array & mask).sum(axes, dtype=_WHOLE)]
    return [carried(arrays.namespace(array).stack(sums))]


def small_enough(part: AnyArray, dtype: np.dtype[Any], count: int) -> AnyArray | None:
    """Local. The integers of a part, if a sum of `count` that are as large as the largest of them fits their dtype.

    Args:
        part: The part of sums, as of `parts_along`; at least one element.
        dtype: The dtype of the integers, native.
        count: Number of integers.

    Returns:
        A new array, C-contiguous.
    """
    limit = int(np.iinfo(dtype).max) // count
    if dtype.itemsize < _WHOLE.itemsize:
        return part.astype(dtype) if -limit <= int(part.min()) <= int(part.max()) <= limit else None
    # The limit of the upper halves: all lower halves together are less than one unit of them.
    limit >>= _HALF_BITS
    return joined(part, dtype) if -limit <= int(part[0].min()) <= int(part[0].max()) < limit else None


def whole(combined: Sequence[AnyArray], dtype: np.dtype[Any], op: ReduceOp) -> AnyArray:
    """Local. The integers whose `parts` have been combined so; they are the same on every rank.

    Args:
        combined: The combined parts, which may be changed.
        dtype: The dtype of the integers, native.
        op: SUM or PROD.

    Raises:
        OverflowError: A number does not fit; on every rank.
    """
    if dtype.itemsize < _WHOLE.itemsize:
        return narrowed(combined[0], dtype, op)
    if op is _SUM:
        return joined(combined[0], dtype)
    require_product(*combined)
    return combined[0]


def halves(array: AnyArray) -> AnyArray:
    """Local. The upper and the lower halves of 64-bit integers, C-contiguous and native: int64 of shape (2, ...)."""
    found = array.reshape(-1).view(np.uint32).reshape(-1, 2)
    made: AnyArray = arrays.namespace(array).empty((2, array.size), _WHOLE)
    made[0] = found[:, _HIGH] if array.dtype.kind == "u" else found.view(np.int32)[:, _HIGH]
    made[1] = found[:, _LOW]
    return made.reshape(2, *array.shape)


def joined(sums: AnyArray, dtype: np.dtype[Any]) -> AnyArray:
    """Local. The integers whose `halves` have these sums, which are the same on every rank.

    Args:
        sums: The sums of the halves, shape (2, ...).
        dtype: The dtype of the integers.

    Raises:
        OverflowError: A number does not fit; on every rank.
    """
    high, low = carried(sums.reshape(2, -1))
    wrong = high != high.astype(np.uint32 if dtype.kind == "u" else np.int32)
    if wrong.any():
        raise overflow(_SUM, dtype, (int(high[wrong][0]) << _HALF_BITS) + int(low[wrong][0]))
    made: AnyArray = ((high << _HALF_BITS) | low).view(dtype).reshape(sums.shape[1:])
    return made


def carried(sums: AnyArray) -> AnyArray:
    """Local. The same numbers as sums of `halves`, with lower halves of 32 bits again."""
    made: AnyArray = arrays.namespace(sums).empty_like(sums)
    made[0] = sums[0] + (sums[1] >> _HALF_BITS)
    made[1] = sums[1] & _MASK
    return made


def require_product(product: AnyArray, about: AnyArray) -> None:
    """Local. Raise an error if products of 64-bit integers have wrapped.

    Args:
        product: The products modulo 2**64; the same on every rank.
        about: The products in float64.

    Raises:
        OverflowError: A number does not fit; on every rank.
    """
    with np.errstate(invalid="ignore"):
        # NaN is an infinity that has met a zero: the product is zero.
        wrong = abs(about - product.astype(np.float64)) >= _APART
    if wrong.any():
        raise overflow(_PROD, product.dtype, float(about[wrong][0]))


def overflow(op: ReduceOp, dtype: np.dtype[Any], found: float) -> Exception:
    """Local. The error of a sum or product that does not fit, which every rank raises.

    Args:
        op: SUM or PROD.
        dtype: The dtype of the integers.
        found: A number that does not fit.
    """
    limits = np.iinfo(dtype)
    wider = (
        ".astype(np.int64), or np.float64" if dtype.itemsize < _WHOLE.itemsize
        else ".astype(np.float64), which rounds from 2**53 on"
    )
    return mark_shared(OverflowError(
        f"a {op.name} of {dtype.name} does not fit its dtype: expected {limits.min} to {limits.max}, got "
        f"{f'{found:.6g}' if isinstance(found, float) else found}. Combine a wider dtype: array{wider}"
    ))
