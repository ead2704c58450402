"""The copy of one rank's share of a checkpoint: taken while the program waits, and written by a thread."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mpidist.arrays import AnyArray
from mpidist.checkpoint.file.layout import PAGE_BYTES, Piece, Record, deal, parts_of
from mpidist.checkpoint.file.positional import write_at
from mpidist.checkpoint.transfer import ArrayToWrite, Checksums, OwnPart, unlike_elements, write_pieces
from mpidist.variables.variable import Read

Buffer = npt.NDArray[np.uint8]
# By the number of the array: the parts that a rank has of it, and their bytes in the last page of an earlier part.
Heads = dict[int, list[tuple[int, bytes]]]

# Of an array on a GPU, or one that is converted, no more is in memory twice.
_BLOCK_BYTES = 1 << 24
_ALIGNMENT = 64


class _Run(NamedTuple):
    """Consecutive bytes of one dataset that this rank writes.

    Attributes:
        number: The place of the dataset among all.
        record: The dataset.
        part: The number of the part that this rank can read; None where it can read all.
        pieces: The pieces.
        low: First element.
        high: The element after the last.
        place: First byte in the copy.
    """

    number: int
    record: Record
    part: int | None
    pieces: Sequence[Piece]
    low: int
    high: int
    place: int


class ShareCopy:
    """Local; some methods are Collective. This rank's share of a checkpoint.

    Args:
        arrays: The arrays to write, in the same order on every rank.
        rank: This rank.
        size: The number of ranks that write.

    Attributes:
        nbytes: The bytes that the copy takes.
    """

    def __init__(self, arrays: Sequence[ArrayToWrite], rank: int, size: int) -> None:
        self._bounds = [array.bounds for array in arrays]
        owners = [array.owners for array in arrays]
        records = [array.record for array in arrays]
        self._runs: list[_Run] = []
        self.nbytes = 0
        for number, pieces in enumerate(deal(records, rank, size, self._bounds, owners)):
            bounds = self._bounds[number]
            if bounds is None:
                self._add(number, records[number], None, pieces)
                continue
            for part in parts_of(owners[number], rank):
                begin, end = bounds[part], bounds[part + 1]
                its = [piece for piece in pieces if begin <= piece.start < end]
                self._add(number, records[number], part, its)

    def _add(self, number: int, record: Record, part: int | None, pieces: Sequence[Piece]) -> None:
        if not pieces and part is None:
            return
        itemsize = record.dtype.itemsize
        # Whole elements around the bytes of the pieces.
        low, high = (pieces[0].start // itemsize, -(-pieces[-1].stop // itemsize)) if pieces else (0, 0)
        self._runs.append(_Run(number, record, part, pieces, low, high, self.nbytes))
        self.nbytes += -(-(high - low) * itemsize // _ALIGNMENT) * _ALIGNMENT

    def take(self, arrays: Sequence[ArrayToWrite], buffer: Buffer) -> tuple[Heads, Exception | None]:
        """Collective. Copy the share; a rank that fails continues with opening the arrays, which is collective.

        Args:
            arrays: The arrays of the constructor.
            buffer: The memory for the copy: `nbytes` or more.

        Returns:
            The first bytes of this rank's parts, which other ranks write, and the error of this rank.
        """
        heads: Heads = {}
        error: Exception | None = None
        runs = iter(self._runs)
        run = next(runs, None)
        for number, array in enumerate(arrays):
            content = array.content.reshape(-1) if isinstance(array.content, np.ndarray) else array.content()
            while run is not None and run.number == number:
                if error is None:
                    try:
                        self._copy(run, content, buffer)
                        if run.part is not None:
                            heads.setdefault(number, []).append((run.part, self._head(run, buffer)))
                    except Exception as caught:
                        error = caught
                run = next(runs, None)
        return heads, error

    def write(self, path: str, offsets: Sequence[int], heads: Sequence[Heads], buffer: Buffer) -> Checksums:
        """Local. Write the copied share to a file, and sync it.

        Args:
            path: The file, whose datasets have their places.
            offsets: First byte of each dataset.
            heads: The first bytes of parts that `take` returned on all ranks.
            buffer: The copy.

        Returns:
            The checksums of the written pieces.

        Raises:
            OSError: The file is gone, the disk is full, or another failure of the system.
        """
        checksums: Checksums = {}
        joined = _joined(heads)
        descriptor = os.open(path, os.O_WRONLY)
        try:
            for run in self._runs:
                own, offset = self._own(run), offsets[run.number]
                first = 0 if own is None else own.first
                read = _reader(_view(run, buffer), run.low - first)
                write_pieces(descriptor, offset, run.record, read, run.pieces, own, checksums)
                if own is not None:
                    write_at(descriptor, own.following(joined[run.number]), offset + own.end)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        return checksums

    def _own(self, run: _Run) -> OwnPart | None:
        bounds = self._bounds[run.number]
        return None if run.part is None or bounds is None else OwnPart(run.record, bounds, run.part)

    def _copy(self, run: _Run, content: AnyArray | Read, buffer: Buffer) -> None:
        target, own = _view(run, buffer), self._own(run)
        first = 0 if own is None else own.first
        length = max(1, _BLOCK_BYTES // run.record.dtype.itemsize)
        for low in range(run.low, run.high, length):
            high = min(low + length, run.high)
            read = content[low:high] if isinstance(content, np.ndarray) else content(low - first, high - first)
            if read.shape != (high - low,) or read.dtype.newbyteorder("=") != run.record.dtype:
                raise unlike_elements(run.record, high - low, read)
            np.copyto(target[low - run.low : high - run.low], read)

    def _head(self, run: _Run, buffer: Buffer) -> bytes:
        """The bytes of a part in a page that an earlier rank writes."""
        own = self._own(run)
        if own is None or not run.pieces:
            return b""
        data = _view(run, buffer).view(np.uint8).data
        skipped = run.pieces[0].start - run.low * run.record.dtype.itemsize
        own.take(data[skipped : skipped + PAGE_BYTES], run.pieces[0].start)
        return own.head


def _view(run: _Run, buffer: Buffer) -> AnyArray:
    nbytes = (run.high - run.low) * run.record.dtype.itemsize
    view: npt.NDArray[Any] = buffer[run.place : run.place + nbytes].view(run.record.dtype)
    return view


def _reader(copied: AnyArray, first: int) -> Read:
    return lambda low, high: copied[low - first : high - first]


def _joined(everyone: Sequence[Heads]) -> Mapping[int, list[bytes]]:
    """The heads of all parts of each array, in the order of the parts."""
    numbers = {number for heads in everyone for number in heads}
    return {
        number: [head for _, head in sorted(one for heads in everyone for one in heads.get(number, ()))]
        for number in numbers
    }
