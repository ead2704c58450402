"""The transfer: all ranks write their shares of one checkpoint file, and check their shares of one that they read."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from mpidist.arrays import AnyArray
from mpidist.checkpoint import hdf5
from mpidist.checkpoint.directory import DirectoryWork
from mpidist.checkpoint.hdf5 import Blank
from mpidist.checkpoint.layout import PAGE_BYTES, Piece, Record, component_share, deal
from mpidist.checkpoint.positional import read_at, sync_directory, write_at
from mpidist.checkpoint.saved import SavedFile
from mpidist.comm.agreement import exchange, on_first_rank, together
from mpidist.comm.communicator import Communicator
from mpidist.errors import CheckpointError


class ArrayToWrite(NamedTuple):
    """One array to write.

    Attributes:
        record: Its path, shape and dtype.
        content: The array, the same one on every rank; or a Collective function that gives it. Where the record has a
            component for each rank, the function gives this rank's component.
    """

    record: Record
    content: AnyArray | Callable[[], AnyArray]


def write_checkpoint(
    communicator: Communicator, path: str, arrays: Sequence[ArrayToWrite], shared: Mapping[str, str],
    work: DirectoryWork,
) -> float:
    """Collective. Write one file, all ranks at once, and give it its name when it is whole and on the disk.

    Whatever happens before that, a kill included, a file that had the name keeps it.

    Args:
        communicator: The ranks that write.
        path: The file's name; a missing directory is made.
        arrays: What to write, in the same order on every rank.
        shared: See `layout.encode_index`.
        work: Done by rank 0 in the same rounds of agreement: its failure, too, is one of all ranks.

    Returns:
        When the file got its name, by rank 0's clock, in seconds since 1970.

    Raises:
        OSError: On every rank, if any rank cannot write: a full disk, a directory that is read-only or not shared.
    """
    records = list(map(attrgetter("record"), arrays))
    blank = on_first_rank(
        communicator, f"creating checkpoint {path!r}", partial(_create, path, records, shared, work.before)
    )
    try:
        dealt = deal(records, communicator.rank, communicator.size)
        checksums, error = _write_arrays(communicator, blank, arrays, dealt)
        # No rank goes on before every rank has synced its share: only then may the mark of a whole file be written.
        everyone = exchange(communicator, f"writing checkpoint {path!r}", checksums, error)
        return on_first_rank(
            communicator, f"completing checkpoint {path!r}", partial(_publish, blank, everyone, path, work.after)
        )
    except BaseException:
        if communicator.rank == 0:
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


def _create(
    path: str, records: Sequence[Record], shared: Mapping[str, str], before: Callable[[], object] | None
) -> Blank:
    if before is not None:
        before()
    directory, name = os.path.split(path)
    os.makedirs(directory or ".", exist_ok=True)
    # In the same directory: a rename is atomic only within one file system.
    temporary = os.path.join(directory, f".{name}.{secrets.token_hex(4)}.tmp")
    try:
        return hdf5.create(temporary, records, shared)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _write_arrays(
    communicator: Communicator, blank: Blank, arrays: Sequence[ArrayToWrite], dealt: Sequence[Sequence[Piece]]
) -> tuple[dict[int, int], Exception | None]:
    """Collective. Write this rank's share and sync it; returns its checksums by number, and what went wrong.

    A rank that fails goes on with asking for the arrays: `content` is collective, and the other ranks wait in it.
    """
    rank, size = communicator.rank, communicator.size
    checksums: dict[int, int] = {}
    error: Exception | None = None
    descriptor = -1
    try:
        descriptor = os.open(blank.path, os.O_WRONLY)
    except OSError as caught:
        error = caught
    try:
        for (record, content), offset, pieces in zip(arrays, blank.offsets, dealt, strict=True):
            array = content if isinstance(content, np.ndarray) else content()
            heads = communicator.all_gather_object(_head(array)) if record.replicas == size else None
            if error is None:
                try:
                    checksums.update(_write_array(descriptor, offset, record, array, pieces, rank, heads))
                except Exception as caught:
                    error = caught
        if error is None:
            try:
                os.fsync(descriptor)
            except OSError as caught:
                error = caught
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    return checksums, error


def _write_array(
    descriptor: int, offset: int, record: Record, array: AnyArray, pieces: Sequence[Piece], rank: int,
    heads: Sequence[bytes] | None,
) -> dict[int, int]:
    """Write this rank's pieces of one array; returns their checksums by number.

    Args:
        descriptor: The open file.
        offset: First byte of the dataset in the file.
        record: The dataset.
        array: Its whole value, or, where `heads` is given, this rank's component.
        pieces: This rank's.
        rank: This rank.
        heads: The first page of every rank's component.
    """
    shape = record.shape if heads is None else record.shape[1:]
    if array.shape != shape or array.dtype.newbyteorder("=") != record.dtype:
        raise CheckpointError(
            f"{record.path!r}: expected a state of shape {shape} and dtype {record.dtype}, as the variable says, got "
            f"shape {array.shape} and dtype {array.dtype}"
        )
    checksums: dict[int, int] = {}
    if pieces:
        data = np.ascontiguousarray(array, record.dtype).reshape(-1).view(np.uint8).data
        begin = 0 if heads is None else rank * record.component_bytes
        for number, start, stop in pieces:
            checksums[number] = zlib.crc32(data[start - begin : stop - begin])
            if heads is None:
                write_at(descriptor, data[start:stop], offset + start)
        if heads is not None:
            _write_component(descriptor, offset, record, data, rank, heads)
    return checksums


def _write_component(
    descriptor: int, offset: int, record: Record, data: memoryview, rank: int, heads: Sequence[bytes]
) -> None:
    """Write this rank's pages of a dataset of components; the last page may hold the beginning of the next ones."""
    start, stop = component_share(record, rank)
    if start == stop:
        return
    begin, end = rank * record.component_bytes, (rank + 1) * record.component_bytes
    write_at(descriptor, data[start - begin : stop - begin], offset + start)
    if stop > end:
        # The page is this rank's alone, see `layout.PAGE_BYTES`: it also writes what later ranks have in it.
        count = -(-(stop - end) // record.component_bytes)
        following = b"".join(heads[rank + 1 : rank + 1 + count])
        write_at(descriptor, memoryview(following)[: stop - end], offset + end)


def _head(array: AnyArray) -> bytes:
    """The first page of an array."""
    count = -(-PAGE_BYTES // array.itemsize)
    return array.reshape(-1)[:count].tobytes()[:PAGE_BYTES]


def _publish(
    blank: Blank, everyone: Sequence[Mapping[int, int]], path: str, after: Callable[[float], object] | None
) -> float:
    """Mark a file as whole and give it its name; the order of the steps is what keeps a crash harmless.

    The content is on the disk already, `complete` syncs the mark, and only then does the rename put the file in the
    place of an older one. The directory is synced next: without that, a crash may undo the rename, and a state file
    written by `after` would name a file that is not there.
    """
    checksums = [0] * sum(map(len, everyone))
    for share in everyone:
        for number, checksum in share.items():
            checksums[number] = checksum
    hdf5.complete(blank, checksums)
    os.replace(blank.path, path)
    sync_directory(os.path.dirname(path))
    now = time.time()
    if after is not None:
        after(now)
    return now


def _verify_share(file: SavedFile, wanted: set[str], rank: int, size: int) -> None:
    contents = file.contents
    dealt = deal(contents.records, rank, size)
    for record, offset, pieces in zip(contents.records, contents.offsets, dealt, strict=True):
        if record.path not in wanted:
            continue
        for number, start, stop in pieces:
            data = read_at(file.opened.descriptor, stop - start, offset + start)
            if zlib.crc32(data) != contents.checksums[number]:
                raise CheckpointError(
                    f"{contents.path!r} is damaged: bytes [{start}, {stop}) of {record.path!r} do not have the "
                    "checksum they were written with. Restore an older checkpoint"
                )
