"""Requests for rows of a heap, as they are sent to the rank that has the heap."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np

from mpidist.arrays import AnyArray
from mpidist.comm.arithmetic.gathering import gather

# Where row 0 begins, and the number of bytes in a row; then the numbers of the rows.
_HEADER = struct.Struct("<QQ")
# The size of the rows in one answer, which their owner copies, and of the numbers in one request.
_PIECE_BYTES = 16 << 20


def questions(offset: int, numbers: AnyArray, into: AnyArray) -> Iterator[tuple[bytes, AnyArray]]:
    """Local. The requests for some rows, and the place of each answer: one request, unless there are very many rows.

    Args:
        offset: The first byte of row 0 in the heap.
        numbers: The numbers of the rows, int64.
        into: An array of bytes of shape (n, row bytes), without gaps; the answers are flat parts of it.
    """
    row_bytes = into.shape[1]
    length = max(1, _PIECE_BYTES // max(8, row_bytes))
    for low in range(0, len(numbers), length):
        asked = _HEADER.pack(offset, row_bytes) + numbers[low : low + length].tobytes()
        yield asked, into[low : low + length].reshape(-1)


def answer(memory: AnyArray, asked: bytes | bytearray | memoryview) -> AnyArray:
    """Local. A copy of the rows of a request, as they are now.

    Args:
        memory: The heap.
        asked: See `questions`.

    Returns:
        Bytes of shape (n, row bytes).

    Raises:
        ValueError: `asked` is no request, or the heap has no such rows.
    """
    size = memoryview(asked).nbytes - _HEADER.size
    if size < 0 or size % 8:
        raise ValueError(f"a question of {size + _HEADER.size} bytes")
    offset, row_bytes = _HEADER.unpack_from(asked)
    numbers = np.frombuffer(asked, np.int64, offset=_HEADER.size)
    most = (memory.size - offset) // row_bytes if row_bytes else 0
    if numbers.size and not 0 <= int(numbers.min()) <= int(numbers.max()) < most:
        raise ValueError(f"rows {numbers.min()} to {numbers.max()} of a heap that has {most}")
    rows: AnyArray = np.empty((len(numbers), row_bytes), np.uint8)
    gather(memory, offset, numbers, rows)
    return rows
