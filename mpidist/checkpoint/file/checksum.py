"""The checksum of a checkpoint's bytes: the CRC32 of zlib, by the fastest library that there is."""

from __future__ import annotations

import zlib
from collections.abc import Callable

try:
    # Gives the same numbers with the CPU's instructions for carry-less products, which many builds of zlib do not use.
    from isal.isal_zlib import crc32 as _crc32
except ImportError:
    from zlib import crc32 as _crc32

crc32: Callable[..., int] = _crc32

__all__ = ["crc32", "joined_checksum"]


def joined_checksum(first: int, second: int, count: int) -> int:
    """Local. Compute the CRC32 of bytes from that of their first part and that of the other one, of `count` bytes."""
    # A CRC is linear, but for what it begins with: zeros in the place of the second part show what the first gives.
    zeros = bytes(count)
    return zlib.crc32(zeros, first) ^ zlib.crc32(zeros) ^ second
