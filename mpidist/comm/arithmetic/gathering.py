"""Rows of a block of memory by their numbers."""

from __future__ import annotations

import numpy as np

from mpidist.arrays import AnyArray


def gather(memory: AnyArray, offset: int, numbers: AnyArray, into: AnyArray) -> None:
    """Local. Copy rows that are one after another in a block of memory.

    Args:
        memory: The block, as bytes.
        offset: The first byte of row 0.
        numbers: The numbers of the rows, int64 of shape (n,); the block has them all.
        into: An array of bytes of shape (n, row bytes), without gaps; it is overwritten.
    """
    row_bytes = into.shape[1]
    if not into.size:
        return
    # Words of eight bytes are read in one piece.
    unit = np.uint64 if row_bytes % 8 == 0 and offset % 8 == 0 else np.uint8
    count = (len(memory) - offset) // row_bytes
    rows = memory[offset : offset + count * row_bytes].view(unit).reshape(count, -1)
    # "clip" writes straight into `out`.
    np.take(rows, numbers, axis=0, out=into.view(unit), mode="clip")
