"""Rounds on a server: the mean of several workers' gradients of one variable."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpidist.arrays import AnyArray
from mpidist.comm.arithmetic.combine import is_half
from mpidist.comm.arithmetic.rows import merge_rows
from mpidist.indexed_slices import IndexedSlices
from mpidist.parameter_server.heap.rows import pack, unpack
from mpidist.variables.kinds.served import ServedPlace


# An overflow gives an infinity in silence, as everywhere in updates.
@np.errstate(over="ignore", invalid="ignore")
def mean(place: ServedPlace, gradients: Sequence[tuple[AnyArray, float]], count: int) -> AnyArray:
    """Local. The mean of gradients, added in their order; that of half precision is taken in float32.

    Args:
        place: The place of the variable.
        gradients: The gradients, each flat and of the variable's dtype, with its factor; of a table rows, packed by
            `rows.pack`, each of them once. They are overwritten.
        count: The number of updates that count; gradients that are not given count as zeros.

    Returns:
        The mean, in the form of one of the gradients.
    """
    dtype = np.dtype(place.dtype)
    if place.block_rows:
        rows = [(*unpack(array, place), factor) for array, factor in gradients]
        values = np.concatenate([_times(one, factor) for _, one, factor in rows])
        numbers, total = merge_rows(np.concatenate([numbers for numbers, _, _ in rows]), values)
        return pack(IndexedSlices(_times(total, 1 / count).astype(dtype, copy=False), numbers))
    total, *others = [_times(array, factor) for array, factor in gradients]
    for other in others:
        np.add(total, other, out=total)
    return _times(total, 1 / count).astype(dtype, copy=False)


def _times(array: AnyArray, factor: float) -> AnyArray:
    """An array times a factor, in its place; of half precision another one in float32."""
    wide = array.astype(np.float32) if is_half(array.dtype) else array
    if factor != 1:
        np.multiply(wide, factor, out=wide)
    return wide
