"""All ranks write their shares of one checkpoint file, and check their shares of one that is read."""

from __future__ import annotations

import contextlib
import os
import secrets
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, cast

import numpy as np

from mpidist.arrays import AnyArray
from mpidist.checkpoint import hdf5
from mpidist.checkpoint.hdf5 import Blank
from mpidist.checkpoint.layout import PAGE_BYTES, Record, component_share, first_pieces, share
from mpidist.checkpoint.positional import read_at, sync_directory, write_at
from mpidist.checkpoint.saved import SavedFile
from mpidist.comm.agreement import together
from mpidist.comm.communicator import Communicator
from mpidist.errors import CheckpointError


class ArrayToWrite(NamedTuple):
    """One array to write.

    Attributes:
        record: Its path, shape and dtype.
        value: Collective. Gives the array, the same one on every rank.
        is_component: Whether `value` gives this rank's component instead, and each rank writes its own.
    """

    record: Record
    value: Callable[[], AnyArray]
    is_component: bool = False


def write_checkpoint(
    communicator: Communicator, path: str, sources: Sequence[ArrayToWrite], shared: Mapping[str, str]
) -> None:
    """Collective. Write one file, all ranks at once, and give it its name when it is whole and on the disk.

    Whatever happens before that, a kill included, a file that had the name keeps it.

    Args:
        communicator: The ranks that write.
        path: Of the file; a missing directory is made.
        sources: What to write, in the same order on every rank.
        shared: See `layout.encode_index`.

    Raises:
        OSError: On every rank, if any rank cannot write: a full disk, a directory that is read-only or not shared.
    """
    is_root = communicator.rank == 0
    records = [source.record for source in sources]
    made = together(
        communicator, f"creating checkpoint {path!r}", lambda: _create(path, records, shared) if is_root else None
    )
    blank = cast(Blank, communicator.broadcast_object(made))
    try:
        writer = _Writer(blank, communicator.rank, communicator.size)
        try:
            together(communicator, f"opening checkpoint {path!r} for writing", writer.open)
            for number, source in enumerate(sources):
                array = source.value()
                if source.is_component:
                    heads = communicator.all_gather_object(_head(array))
                    writer.write_component(number, source.record, array, heads)
                else:
                    writer.write(number, source.record, array)
            together(communicator, f"writing checkpoint {path!r}", writer.finish)
        finally:
            writer.close()
        checksums: dict[int, int] = {}
        for part in communicator.all_gather_object(writer.checksums):
            checksums.update(part)
        together(
            communicator, f"completing checkpoint {path!r}",
            lambda: _publish(blank, [checksums[n] for n in range(len(checksums))], path) if is_root else None,
        )
    except BaseException:
        if is_root:
            with contextlib.suppress(OSError):
                os.unlink(blank.path)
        raise


def verify(communicator: Communicator, file: SavedFile, paths: Iterable[str]) -> None:
    """Collective. Compare arrays with their checksums, each rank a share of them.

    Args:
        communicator: The ranks that check.
        file: The same checkpoint on every rank.
        paths: Of the arrays to check, the same on every rank.

    Raises:
        CheckpointError: On every rank, naming an array that is damaged.
    """
    wanted = set(paths)
    together(
        communicator, f"checking checkpoint {file.contents.path!r}",
        lambda: _verify_share(file, wanted, communicator.rank, communicator.size),
    )


class _Writer:
    """One rank's part in writing a file; a failure is kept until all ranks can hear of it."""

    def __init__(self, blank: Blank, rank: int, size: int) -> None:
        self.blank = blank
        self.rank = rank
        self.size = size
        self.checksums: dict[int, int] = {}
        self._descriptor: int | None = None
        self._first = 0
        self._error: Exception | None = None

    def open(self) -> None:
        """Open the file that rank 0 made."""
        self._descriptor = os.open(self.blank.path, os.O_WRONLY)

    def write(self, number: int, record: Record, array: AnyArray) -> None:
        """Write this rank's pieces of the next array."""
        first, self._first = self._first, self._first + record.piece_count
        if self._descriptor is None or self._error is not None:
            return
        try:
            _require_fit(record, record.shape, array)
            pieces = share(record, number, self.rank, self.size)
            if not pieces:
                return
            data = _bytes_of(np.ascontiguousarray(array, record.dtype))
            for piece in pieces:
                start, stop = record.piece(piece)
                self.checksums[first + piece] = zlib.crc32(data[start:stop])
                write_at(self._descriptor, data[start:stop], self.blank.offsets[number] + start)
        except Exception as error:
            self._error = error

    def write_component(self, number: int, record: Record, array: AnyArray, heads: Sequence[bytes]) -> None:
        """Write this rank's pages of the next array, of which it has one component.

        Args:
            number: Place of the array.
            record: Of all components.
            array: This rank's.
            heads: The first page of every rank's component: the last page written here may hold some of the next.
        """
        first, self._first = self._first, self._first + record.piece_count
        if self._descriptor is None or self._error is not None:
            return
        try:
            _require_fit(record, record.shape[1:], array)
            data = _bytes_of(np.ascontiguousarray(array, record.dtype))
            begin = self.rank * record.component_bytes
            for piece in range(self.rank * record.component_pieces, (self.rank + 1) * record.component_pieces):
                start, stop = record.piece(piece)
                self.checksums[first + piece] = zlib.crc32(data[start - begin : stop - begin])
            start, stop = component_share(record, self.rank)
            if start < stop:
                place, end = self.blank.offsets[number], begin + record.component_bytes
                write_at(self._descriptor, data[start - begin : stop - begin], place + start)
                if stop > end:
                    count = -(-(stop - end) // record.component_bytes)
                    following = b"".join(heads[self.rank + 1 : self.rank + 1 + count])
                    write_at(self._descriptor, memoryview(following)[: stop - end], place + end)
        except Exception as error:
            self._error = error

    def finish(self) -> None:
        """Bring everything to the disk, or raise what went wrong on the way."""
        if self._error is not None:
            raise self._error
        if self._descriptor is not None:
            os.fsync(self._descriptor)

    def close(self) -> None:
        """Close the file."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _bytes_of(array: AnyArray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _head(array: AnyArray) -> bytes:
    count = -(-PAGE_BYTES // array.itemsize)
    return array.reshape(-1)[:count].tobytes()[:PAGE_BYTES]


def _require_fit(record: Record, shape: tuple[int, ...], array: AnyArray) -> None:
    if array.shape != shape or array.dtype.newbyteorder("=") != record.dtype:
        raise CheckpointError(
            f"{record.path!r}: expected a state of shape {shape} and dtype {record.dtype} as the variable says, got "
            f"{array.shape} and {array.dtype}"
        )


def _create(path: str, records: Sequence[Record], shared: Mapping[str, str]) -> Blank:
    directory, name = os.path.split(path)
    os.makedirs(directory or ".", exist_ok=True)
    temporary = os.path.join(directory, f".{name}.{secrets.token_hex(4)}.tmp")
    try:
        return hdf5.create(temporary, records, shared)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _publish(blank: Blank, checksums: Sequence[int], path: str) -> None:
    hdf5.complete(blank, checksums)
    os.replace(blank.path, path)
    sync_directory(os.path.dirname(path))


def _verify_share(file: SavedFile, wanted: set[str], rank: int, size: int) -> None:
    contents = file.contents
    firsts = first_pieces(contents.records)
    for number, record in enumerate(contents.records):
        if record.path not in wanted:
            continue
        for piece in share(record, number, rank, size):
            start, stop = record.piece(piece)
            data = read_at(file.opened.descriptor, stop - start, contents.offsets[number] + start)
            if zlib.crc32(data) != contents.checksums[firsts[number] + piece]:
                raise CheckpointError(
                    f"{contents.path!r} is damaged: bytes [{start}, {stop}) of {record.path!r} do not have the "
                    "checksum they were written with. Restore an older checkpoint"
                )
