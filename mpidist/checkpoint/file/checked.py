"""The reading of a checkpoint file: whatever is read is compared with its checksums, in the same pass."""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Iterable
from operator import attrgetter

import numpy as np

from mpidist.checkpoint.file.checksum import crc32
from mpidist.checkpoint.file.hdf5 import WAY_OUT, Contents
from mpidist.checkpoint.file.layout import PAGE_BYTES
from mpidist.checkpoint.file.positional import read_into
from mpidist.errors import DamagedCheckpointError

# Files up to this size are checked as a whole before a restore changes anything.
HELD_BYTES = 1 << 25


class CheckedFile:
    """An open checkpoint file; it is closed with the last array that reads from it.

    Local. Pieces are read whole, since each has one checksum. Between `hold` and `release` what is small is in memory.
    A file without checksums, a copy in memory, is read as it is.

    Args:
        contents: Its datasets and their places.

    Attributes:
        contents: The constructor's argument.
        descriptor: The open file.

    Raises:
        OSError: This rank cannot open the file.
    """

    def __init__(self, contents: Contents) -> None:
        self.contents = contents
        self.descriptor = os.open(contents.opened_as or contents.path, os.O_RDONLY)
        weakref.finalize(self, os.close, self.descriptor)
        self._first: list[int] = list(itertools.accumulate(map(attrgetter("piece_count"), contents.records), initial=0))
        self._held = bytearray()
        self._begin = 0
        # Datasets of which all is held and checked.
        self._good: set[int] = set()
        # Of a piece that was read in part: another part is often read next.
        self._last: tuple[int, bytearray] | None = None

    def hold(self, numbers: Iterable[int]) -> None:
        """Local. Read what is small at once, and keep it until `release`: the file, or else its small datasets.

        Args:
            numbers: The datasets that are wanted, by their places in the index. Those that are held are checked.

        Raises:
            DamagedCheckpointError: One of them is damaged.
            CheckpointError: The file was truncated.
            OSError: It cannot be read.
        """
        if not self.contents.checksums:
            return
        records, offsets = self.contents.records, self.contents.offsets
        begin, end = 0, self.contents.file_bytes
        if end > HELD_BYTES:
            small = [
                (offset, offset + record.nbytes) for record, offset in zip(records, offsets, strict=True)
                if 0 < record.nbytes < PAGE_BYTES
            ]
            begin, end = min((one for one, _ in small), default=0), max((one for _, one in small), default=0)
        if end - begin > HELD_BYTES:
            return
        held = bytearray(end - begin)
        view = memoryview(held)
        read_into(self.descriptor, view, begin)
        for number in numbers:
            record, offset = records[number], offsets[number] - begin
            if offset >= 0 and offset + record.nbytes <= len(held):
                if record.piece_count == 1:
                    self._check(number, 0, view[offset : offset + record.nbytes])
                else:
                    for piece in range(record.piece_count):
                        low, high = record.piece(piece)
                        self._check(number, piece, view[offset + low : offset + high])
                self._good.add(number)
        self._held, self._begin = held, begin

    def release(self) -> None:
        """Local. Forget what is held in memory."""
        self._held, self._last = bytearray(), None
        self._good.clear()

    def read(self, number: int, start: int, stop: int) -> bytearray | memoryview:
        """Local. Read the bytes [start, stop) of a dataset into new memory, and check the pieces that they are in.

        Args:
            number: The place of the dataset in the index.
            start: The first byte.
            stop: The byte after the last.

        Raises:
            DamagedCheckpointError: A piece is damaged.
            CheckpointError: The file was truncated after it was opened.
            OSError: It cannot be read.
        """
        if number in self._good:
            place = self.contents.offsets[number] - self._begin
            return self._held[place + start : place + stop]
        # Not a bytearray, which would be filled with zeros first.
        data = np.empty(stop - start, np.uint8).data
        if start >= stop:
            return data
        if not self.contents.checksums:
            read_into(self.descriptor, data, self.contents.offsets[number] + start)
            return data
        record = self.contents.records[number]
        for piece in range(record.piece_at(start), record.piece_at(stop - 1) + 1):
            low, high = record.piece(piece)
            if start <= low and high <= stop:
                self._read(number, piece, low, data[low - start : high - start])
            else:
                whole = self._piece(number, piece, low, high)
                begin, end = max(low, start), min(high, stop)
                data[begin - start : end - start] = whole[begin - low : end - low]
        return data

    def verify(self, number: int, pieces: Iterable[int], buffer: memoryview) -> None:
        """Local. Compare pieces of a dataset with their checksums.

        Args:
            number: The place of the dataset in the index.
            pieces: The numbers of the pieces in it.
            buffer: Memory for one piece.

        Raises:
            DamagedCheckpointError, CheckpointError, OSError: See `read`.
        """
        record = self.contents.records[number]
        for piece in pieces:
            low, high = record.piece(piece)
            self._read(number, piece, low, buffer[: high - low])

    def first_piece(self, number: int) -> int:
        """Local. The number of a dataset's first piece among those of all datasets."""
        return self._first[number]

    def _piece(self, number: int, piece: int, low: int, high: int) -> bytearray:
        place = self._first[number] + piece
        if self._last is None or self._last[0] != place:
            data = bytearray(high - low)
            self._read(number, piece, low, memoryview(data))
            self._last = place, data
        return self._last[1]

    def _read(self, number: int, piece: int, low: int, view: memoryview) -> None:
        read_into(self.descriptor, view, self.contents.offsets[number] + low)
        self._check(number, piece, view)

    def _check(self, number: int, piece: int, data: memoryview) -> None:
        if self.contents.opened_as:
            return  # A copy in memory, which was compared as a whole.
        if crc32(data) != self.contents.checksums[self._first[number] + piece]:
            record = self.contents.records[number]
            start, stop = record.piece(piece)
            raise DamagedCheckpointError(
                f"{self.contents.path!r} is damaged: bytes [{start}, {stop}) of {record.path!r} do not have the "
                f"checksum they were written with. {WAY_OUT}"
            )
