"""The transfer: all ranks write their shares of one checkpoint file, and check their shares of one that they read."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from mpidist.arrays import AnyArray
from mpidist.checkpoint.directory.state import DirectoryWork
from mpidist.checkpoint.file import hdf5
from mpidist.checkpoint.file.checksum import crc32, joined_checksum
from mpidist.checkpoint.file.hdf5 import Blank
from mpidist.checkpoint.file.layout import PIECE_BYTES, Bounds, Owners, Piece, Record, deal, page_share, parts_of
from mpidist.checkpoint.file.positional import sync_directory, write_at
from mpidist.checkpoint.file.saved import SavedFile
from mpidist.comm.group.agreement import exchange, on_first_rank, together
from mpidist.comm.group.communicator import Communicator
from mpidist.errors import CheckpointError
from mpidist.variables.variable import Read

# The CRC32 of a piece, or of a part of it, and how many bytes it is of; by the number of the piece, and the first byte.
Checksums = dict[tuple[int, int], tuple[int, int]]


class ArrayToWrite(NamedTuple):
    """One array to write.

    Attributes:
        record: Its path, shape and dtype.
        content: The array, the same one on every rank; or a Collective function that opens it for reading, such as
            `BaseVariable.reader`. Where the record has a component for each rank, this rank's component is read.
        bounds: The bytes of the parts that ranks can read; None where every rank can read all.
        owners: The ranks of these parts.
    """

    record: Record
    content: AnyArray | Callable[[], Read]
    bounds: Bounds | None = None
    owners: Owners = None


def write_checkpoint(
    communicator: Communicator, path: str, arrays: Sequence[ArrayToWrite], shared: Mapping[str, str],
    work: DirectoryWork,
) -> float:
    """Collective. Write one file, all ranks at once, and give it its name when it is whole and on the disk.

    Whatever happens before that, a kill included, a file that had the name keeps it.

    Args:
        communicator: The ranks that write.
        path: The file's name; a missing directory is made.
        arrays: The arrays to write, in the same order on every rank.
        shared: See `layout.encode_index`.
        work: The work of rank 0 in the same rounds of agreement: its failure, too, is one of all ranks.

    Returns:
        The time at which the file got its name, by rank 0's clock, in seconds since 1970.

    Raises:
        OSError: On every rank, if any rank cannot write: a full disk, a directory that is read-only or not shared.
    """
    records = list(map(attrgetter("record"), arrays))
    blank = on_first_rank(
        communicator, f"creating checkpoint {path!r}", partial(create_blank, path, records, shared, work.before)
    )
    try:
        communicator.share_directory(os.path.dirname(os.path.abspath(path)))
        # What is in the file must not come from calls in which ranks differ.
        with communicator.order.enter("save", None, None) as order:
            order.show_call()
            dealt = deal(
                records, communicator.rank, communicator.size, list(map(attrgetter("bounds"), arrays)),
                list(map(attrgetter("owners"), arrays)),
            )
            checksums, error = write_arrays(communicator, blank, arrays, dealt)
            # No rank continues before every rank has synced its share: only then may the file be marked as complete.
            has_failed, everyone = communicator.gather_object(checksums, int(error is not None))
            if has_failed:
                exchange(communicator, f"writing checkpoint {path!r}", None, error)
            order.compare_across()
        # Rank 0 alone has the checksums of all ranks.
        return on_first_rank(
            communicator, f"completing checkpoint {path!r}", partial(publish, blank, everyone, path, work)
        )
    except BaseException:
        discard(communicator, blank)
        raise


def discard(communicator: Communicator, blank: Blank) -> None:
    """Local. Delete a file that was not completed, on rank 0."""
    if communicator.rank == 0:
        with contextlib.suppress(OSError):
            os.unlink(blank.path)


def verify(communicator: Communicator, file: SavedFile, paths: Iterable[str]) -> None:
    """Collective. Compare arrays with their checksums, each rank a share of them.

    Args:
        communicator: The ranks that check.
        file: The checkpoint, the same on every rank.
        paths: The paths of the arrays to check, the same on every rank.

    Raises:
        CheckpointError: On every rank, naming an array that is damaged.
    """
    wanted = set(paths)
    together(
        communicator, f"checking checkpoint {file.contents.path!r}",
        lambda: _verify_share(file, wanted, communicator.rank, communicator.size),
    )


def create_blank(
    path: str, records: Sequence[Record], shared: Mapping[str, str], before: Iterable[Callable[[], object]],
    *, with_blocks: bool = True,
) -> Blank:
    """Local. Make a file for these datasets, under another name; see `write_checkpoint`.

    Args:
        path: The name that it is to have.
        records: The datasets.
        shared: See `layout.encode_index`.
        before: Functions that are called one by one before the file is made.
        with_blocks: See `hdf5.create`.
    """
    for step in before:
        step()
    directory, name = os.path.split(path)
    os.makedirs(directory or ".", exist_ok=True)
    # In the same directory: a rename is atomic only within one file system.
    temporary = os.path.join(directory, f".{name}.{os.urandom(4).hex()}.tmp")
    try:
        return hdf5.create(temporary, records, shared, with_blocks=with_blocks)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def write_arrays(
    communicator: Communicator, blank: Blank, arrays: Sequence[ArrayToWrite], dealt: Sequence[Sequence[Piece]]
) -> tuple[Checksums, Exception | None]:
    """Collective. Write this rank's share and sync it; returns its checksums by number, and the error.

    A rank that fails continues with opening the arrays, which is collective: the other ranks wait in it.
    """
    checksums: Checksums = {}
    descriptor, error = _open_to_write(blank.path)
    try:
        several: list[tuple[int, OwnPart]] = []
        has_parts = False
        for array, offset, pieces in zip(arrays, blank.offsets, dealt, strict=True):
            content = array.content.reshape(-1) if isinstance(array.content, np.ndarray) else array.content()
            whole: list[OwnPart | None] = [None]
            if array.bounds is not None:
                has_parts = True
                parts = parts_of(array.owners, communicator.rank)
                owned = [OwnPart(array.record, array.bounds, part) for part in parts]
                several += [(offset, one) for one in owned]
                whole = [*owned]
            if error is None:
                try:
                    for own in whole:
                        write_pieces(descriptor, offset, array.record, content, pieces, own, checksums)
                except Exception as caught:
                    error = caught
        if has_parts:
            error = _write_heads(communicator, descriptor, several, error)
        # Many ranks have nothing of a small file, and each sync waits for the disk.
        if error is None and (checksums or several):
            # Each rank syncs what it has written: the file is marked as complete only after all of them.
            try:
                os.fsync(descriptor)
            except OSError as caught:
                error = caught
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    return checksums, error


def _open_to_write(path: str) -> tuple[int, Exception | None]:
    """The file, or -1 and why this rank cannot open it."""
    try:
        return os.open(path, os.O_WRONLY), None
    except FileNotFoundError:
        return -1, FileNotFoundError(
            errno.ENOENT, f"rank 0 has made {path!r}, and this rank does not see it: save checkpoints to a file system "
            f"that all hosts share, and by an absolute path (here the working directory is {os.getcwd()!r})"
        )
    except OSError as caught:
        return -1, caught


def _write_heads(
    communicator: Communicator, descriptor: int, several: Sequence[tuple[int, OwnPart]], error: Exception | None
) -> Exception | None:
    """Collective. Write what follows this rank's parts in their last pages, which other ranks have; in one round.

    Args:
        communicator: The ranks that write.
        descriptor: The open file.
        several: The parts of this rank, each with the first byte of its dataset.
        error: The error of this rank so far.

    Returns:
        The error of this rank so far.
    """
    gathered = communicator.all_gather_object([(offset, one.part, one.head) for offset, one in several])
    heads: dict[int, list[bytes]] = {}
    for offset, _, head in sorted(itertools.chain.from_iterable(gathered)):
        heads.setdefault(offset, []).append(head)
    if error is None:
        try:
            for offset, one in several:
                write_at(descriptor, one.following(heads[offset]), offset + one.end)
        except OSError as caught:
            return caught
    return error


class OwnPart:
    """A part of a dataset that this rank can read, and the pages of the file that it writes with it.

    Args:
        record: The dataset.
        bounds: The parts of all ranks.
        part: The number of the part.

    Attributes:
        part: The constructor's argument.
        begin: First byte of the part.
        end: The byte after the last.
        first: The element at which this rank's reader begins to count.
        head: The bytes of the part in a page that an earlier rank writes, as far as they have been read.
    """

    def __init__(self, record: Record, bounds: Bounds, part: int) -> None:
        self.part = part
        self.begin, self.end = bounds[part], bounds[part + 1]
        self.first = self.begin // record.dtype.itemsize if record.replicas else 0
        self.head = b""
        self._start, self._stop = page_share(bounds, part)

    def take(self, data: memoryview, start: int) -> tuple[memoryview, int]:
        """Local. Bytes of the part from `start` on, without those that an earlier rank writes, and where they begin."""
        foreign = max(0, min(self._start - start, len(data)))
        self.head += data[:foreign]
        return data[foreign:], start + foreign

    def following(self, heads: Sequence[bytes]) -> memoryview:
        """Local. The bytes after the part that are in its last page, which is this rank's alone.

        Args:
            heads: The heads of all parts, in their order.
        """
        # Of the next parts: one that is wholly in this page is followed by another one.
        count = self._stop - self.end if self._start < self._stop else 0
        return memoryview(b"".join(heads[self.part + 1 :]) if count > 0 else b"")[: max(0, count)]


def write_pieces(
    descriptor: int, offset: int, record: Record, content: AnyArray | Read, pieces: Sequence[Piece],
    own: OwnPart | None, checksums: Checksums,
) -> None:
    """Local. Write this rank's pieces of one array, read one by one; adds their checksums by number.

    Args:
        descriptor: The open file.
        offset: First byte of the dataset in the file.
        record: The dataset.
        content: The flattened array, or a function that reads it.
        pieces: The pieces of this rank.
        own: Where this rank can read only parts, one of them: the pieces of the others are left out.
        checksums: The checksums by number, to which those of the pieces are added.
    """
    first, itemsize = 0 if own is None else own.first, record.dtype.itemsize
    for number, start, stop in pieces:
        if own is not None and not own.begin <= start < own.end:
            continue
        # Whole elements around the bytes of the piece.
        low, high = start // itemsize, -(-stop // itemsize)
        read = content[low:high] if isinstance(content, np.ndarray) else content(low - first, high - first)
        if read.shape != (high - low,) or read.dtype.newbyteorder("=") != record.dtype:
            raise unlike_elements(record, high - low, read)
        data = np.ascontiguousarray(read, record.dtype).view(np.uint8).data
        data = data[start - low * itemsize : stop - low * itemsize]
        checksums[number, start] = crc32(data), len(data)
        data, position = (data, start) if own is None else own.take(data, start)
        write_at(descriptor, data, offset + position)


def unlike_elements(record: Record, count: int, read: AnyArray) -> CheckpointError:
    """Local. The error for an array that was read, and is not `count` elements of the record's dtype."""
    return CheckpointError(
        f"{record.path!r}: expected {count} elements of dtype {record.dtype}, as the variable says, got shape "
        f"{read.shape} and dtype {read.dtype}"
    )


def publish(blank: Blank, everyone: Sequence[Checksums], path: str, work: DirectoryWork) -> float:
    """Local. Mark a file as whole and give it its name; the order of the steps is what keeps a crash harmless.

    The content is on the disk already, `complete` syncs the mark, and only then does the rename put the file in the
    place of an older one. The directory is synced next: without that, a crash may undo the rename, and a state file
    written by `after` would name a missing file.
    """
    if work.announce is not None:
        work.announce()
    checksums: dict[int, int] = {}
    # In the order of the parts of a piece, which need not be that of their ranks.
    for (number, _), (checksum, count) in sorted(itertools.chain.from_iterable(map(dict.items, everyone))):
        before = checksums.get(number)
        checksums[number] = checksum if before is None else joined_checksum(before, checksum, count)
    hdf5.complete(blank, list(map(checksums.__getitem__, range(len(checksums)))))
    was_there = os.path.lexists(path)
    try:
        os.replace(blank.path, path)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            errno.ENOENT, f"{path!r} was not written: its temporary file is gone. Another job has begun to write to "
            "the same file, or the file was deleted. Write to a file of another name"
        ) from error
    try:
        sync_directory(os.path.dirname(path))
        now = time.time()
        if work.after is not None:
            work.after(now)
    except BaseException:
        # No state file names the new checkpoint, so nothing would delete it. One that was there before may be named.
        if not was_there:
            with contextlib.suppress(OSError):
                os.unlink(path)
        raise
    return now


def _verify_share(file: SavedFile, wanted: set[str], rank: int, size: int) -> None:
    buffer, opened = memoryview(bytearray(PIECE_BYTES)), file.opened
    records = file.contents.records
    for number, (record, pieces) in enumerate(zip(records, deal(records, rank, size), strict=True)):
        if record.path in wanted:
            first = opened.first_piece(number)
            opened.verify(number, [piece.number - first for piece in pieces], buffer)
