"""The places of a file's datasets, kept in it, so that a reader need not look up each of them by HDF5.

They count only while the file's structure, all bytes between the datasets, is still as its writer left it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

import numpy as np

from mpidist.checkpoint.file.checksum import crc32
from mpidist.checkpoint.file.layout import Record
from mpidist.checkpoint.file.positional import read_at

# The size of the file and the checksum of its structure, before the offset of each dataset.
HEAD_COUNT = 2
# A file of fewer datasets has no places: looking them up takes little time.
LEAST_DATASETS = 200
_WINDOW_BYTES = 1 << 20

# First byte and number of bytes.
Extent = tuple[int, int]


def encode_places(descriptor: int, offsets: Sequence[int], extents: Iterable[Extent]) -> bytes:
    """Local. Make the content of the dataset `places`.

    Args:
        descriptor: The file, whose structure is complete.
        offsets: First byte of each dataset of the index, in its order.
        extents: The bytes of all datasets, also of the library's own.

    Raises:
        CheckpointError, OSError: The file cannot be read.
    """
    size = os.fstat(descriptor).st_size
    head = [size, _structure_checksum(descriptor, size, extents)]
    return np.array([*head, *offsets], "<u8").tobytes()


def decode_places(
    descriptor: int, raw: bytes | bytearray, records: Sequence[Record], own: Iterable[Extent]
) -> list[int] | None:
    """Local. Give the offsets of the datasets, or None where they must be looked up.

    Args:
        descriptor: The file.
        raw: The content of `places`.
        records: The datasets of the index.
        own: The bytes of the library's own datasets.

    Raises:
        CheckpointError, OSError: The file cannot be read.
    """
    size = os.fstat(descriptor).st_size
    if len(raw) != 8 * (HEAD_COUNT + len(records)):
        return None
    written, checksum, *offsets = np.frombuffer(raw, "<u8").tolist()
    extents = [(offset, record.nbytes) for offset, record in zip(offsets, records, strict=True)]
    if written != size or any(offset + count > size for offset, count in extents):
        return None
    return offsets if _structure_checksum(descriptor, size, [*extents, *own]) == checksum else None


def _structure_checksum(descriptor: int, size: int, extents: Iterable[Extent]) -> int:
    """The checksum of all bytes that belong to no dataset; large gaps between datasets are read in windows."""
    checksum, at = 0, 0
    begin, window = 0, memoryview(b"")
    for offset, count in sorted((*extents, (size, 1))):
        if not count:
            continue
        while at < offset:
            if not begin <= at < begin + len(window):
                begin, window = at, memoryview(read_at(descriptor, min(_WINDOW_BYTES, size - at), at))
            stop = min(offset, begin + len(window))
            checksum = crc32(window[at - begin : stop - begin], checksum)
            at = stop
        at = max(at, offset + count)
    return checksum
