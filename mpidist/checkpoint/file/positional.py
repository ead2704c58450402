"""Ranges of bytes of a file, read and written whole, although one system call may do only a part."""

from __future__ import annotations

import os

from mpidist.errors import CheckpointError

# Linux moves at most 2 GiB in one call, and reports the shorter count as a success.
_CALL_BYTES = 1 << 30


def write_at(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    """Local. Write all of `data` at `offset`; ranks may write other ranges of the same file at the same time.

    Raises:
        OSError: The disk is full, or another failure of the system.
    """
    view = memoryview(data)
    while view:
        count = os.pwrite(descriptor, view[:_CALL_BYTES], offset)
        view, offset = view[count:], offset + count


def read_at(descriptor: int, count: int, offset: int) -> bytearray:
    """Local. Read exactly `count` bytes from `offset`.

    Raises:
        CheckpointError: The file ends too early.
        OSError: A failure of the system.
    """
    data = bytearray(count)
    read_into(descriptor, memoryview(data), offset)
    return data


def read_into(descriptor: int, view: memoryview, offset: int) -> None:
    """Local. Fill memory with the bytes of a file from `offset` on.

    Raises:
        CheckpointError: The file ends too early.
        OSError: A failure of the system.
    """
    while view:
        got = os.preadv(descriptor, [view[:_CALL_BYTES]], offset)
        if got == 0:
            raise CheckpointError(f"expected {len(view)} more bytes at {offset}, but the file ends: it was truncated")
        view, offset = view[got:], offset + got


def sync_directory(path: str) -> None:
    """Local. Make the names in a directory durable: syncing a file does not sync its name.

    Raises:
        OSError: A failure of the system.
    """
    descriptor = os.open(path or ".", os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
