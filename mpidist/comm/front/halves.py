"""Sums in half precision: large float32 arrays are sent in the wire dtype, and added up in float32.

This is for gradients, and for calls that ask for it. Norms, metrics and other sums are small, or must not be rounded.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mpidist import arrays
from mpidist.arrays import AnyArray, as_bytes
from mpidist.comm.arithmetic.combine import add_halves
from mpidist.comm.arithmetic.slices import even_sizes, in_bytes
from mpidist.comm.backend import Backend

# Smaller arrays are sent as they are: the time of a message hardly depends on their size.
HALVED_FROM_BYTES = 1 << 16


def is_halved(dtype: np.dtype[Any], byte_count: int, wire_dtype: np.dtype[Any]) -> bool:
    """Local. Whether a sum of arrays of this dtype and size is sent in the wire dtype.

    Args:
        dtype: The dtype: float32 and the wire dtype itself are sent so. float64 never is: its users need its digits.
        byte_count: The size of one rank's array; arrays of 64 KB and more are sent so.
        wire_dtype: The wire dtype, float16 or bfloat16.
    """
    return byte_count >= HALVED_FROM_BYTES and (
        dtype == wire_dtype or (dtype.kind == "f" and dtype.itemsize == np.dtype(np.float32).itemsize)
    )


# A value too large for the wire dtype becomes an infinity in silence. A warning would come on one rank only.
@np.errstate(over="ignore", invalid="ignore")
def all_reduce_in_halves(backend: Backend, source: AnyArray, total: AnyArray, wire_dtype: np.dtype[Any]) -> None:
    """Collective. Each rank gets its slice of all arrays, adds them up in float32, and sends the sum.

    Args:
        backend: The backend that sends the bytes.
        source: A flat, contiguous array; it is rounded once.
        total: The array for the sum, which is rounded once more; it may be `source`.
        wire_dtype: The wire dtype, float16 or bfloat16.
    """
    xp, size, rank = arrays.namespace(source), backend.communicator.size, backend.communicator.rank
    counts = even_sizes(source.size, size)
    byte_counts = in_bytes(counts, wire_dtype.itemsize)
    got = xp.empty(counts[rank] * size, wire_dtype)
    backend.all_to_all(as_bytes(source.astype(wire_dtype)), byte_counts, as_bytes(got), [byte_counts[rank]] * size)
    mine = add_halves(got.reshape(size, counts[rank]))
    gathered = xp.empty(source.size, wire_dtype)
    backend.all_gather(as_bytes(mine.astype(wire_dtype)), as_bytes(gathered), byte_counts)
    # This rank, too, takes its own slice rounded to the wire dtype: all ranks get the same bits.
    total[...] = gathered
