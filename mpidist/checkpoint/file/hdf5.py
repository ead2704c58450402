"""The HDF5 file of a checkpoint: lays out a file with every dataset in its final place, and finds the places again.

HDF5 only lays files out and reads their structure. All ranks write and read the bytes themselves, at their offsets,
at the same time; that needs no HDF5 with MPI. The group `_mpidist` belongs to the file as a whole: `index` (JSON:
paths, shapes, dtypes), `checksums` (CRC32 of every piece of 1 MiB), `places` and `complete`, which is written last: 1
and the CRC32 of the first two.
"""

from __future__ import annotations

import errno
import functools
import os
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from mpidist.checkpoint.file.layout import OWN_GROUP, Record, decode_index, encode_index, stored_dtype
from mpidist.checkpoint.file.places import HEAD_COUNT, LEAST_DATASETS, decode_places, encode_places
from mpidist.checkpoint.file.positional import read_at, write_at
from mpidist.comm.first_use import at_first_use
from mpidist.errors import CheckpointError, DamagedCheckpointError

if TYPE_CHECKING:
    from mpidist.checkpoint.file.datasets import Datasets, holds, lay_out, open_datasets
else:
    # h5py takes a tenth of a second of every rank's core to load, and most ranks need none of it.
    holds = at_first_use("mpidist.checkpoint.file.datasets", "holds")
    lay_out = at_first_use("mpidist.checkpoint.file.datasets", "lay_out")
    open_datasets = at_first_use("mpidist.checkpoint.file.datasets", "open_datasets")

INDEX = f"{OWN_GROUP}/index"
CHECKSUMS = f"{OWN_GROUP}/checksums"
COMPLETE = f"{OWN_GROUP}/complete"
PLACES = f"{OWN_GROUP}/places"
# HDF5 need not be asked of these numbers, nor of bytes.
_ALWAYS_HELD = frozenset(map(np.dtype, "?bBhHiIlLefdFD"))
WAY_OUT = "Restore an older checkpoint, which `restore_or_initialize(fallback=True)` finds, or save again"


@dataclass(frozen=True)
class Contents:
    """The datasets of a checkpoint file, and their places.

    Attributes:
        path: The file.
        file_bytes: Its size.
        records: The datasets, in the order of their checksums.
        offsets: First byte of each dataset; 0 for an empty one.
        checksums: CRC32 of all pieces of all datasets.
        shared: See `layout.encode_index`.
        format: The number of its format.
        complete_offset: Place of the mark of a whole checkpoint.
        complete: The mark; with the checksum of all checksums in it, a file of another content has another one.
        opened_as: The path by which this rank opens a copy in memory, which has no checksums of pieces.
    """

    path: str
    file_bytes: int
    records: list[Record]
    offsets: list[int]
    checksums: list[int]
    shared: dict[str, str]
    format: int
    complete_offset: int
    complete: bytes
    opened_as: str = ""


@dataclass(frozen=True)
class Blank:
    """A file whose datasets have their places, and no content yet.

    Attributes:
        path: The file.
        file_bytes: Its size, which writing does not change.
        offsets: First byte of each dataset; 0 for an empty one.
        checksums_offset: Place of the checksums.
        complete_offset: Place of the mark that makes the file a checkpoint.
        index: The text that `layout.encode_index` returned.
        extra_checksums: The CRC32 of the places, which follows those of the pieces; empty for a file without them.
    """

    path: str
    file_bytes: int
    offsets: list[int]
    checksums_offset: int
    complete_offset: int
    index: bytes
    extra_checksums: tuple[int, ...] = ()


@functools.cache
def is_storable(dtype: np.dtype[Any]) -> bool:
    """Local. Whether HDF5 has a type that keeps `dtype` as it is, or its bits."""
    dtype = stored_dtype(dtype)
    if dtype in _ALWAYS_HELD or (dtype.kind == "S" and dtype.itemsize):
        return True
    return dtype.kind in "biufcS" and holds(dtype)


def create(
    path: str, records: Sequence[Record], shared: Mapping[str, str], *, with_blocks: bool = True
) -> Blank:
    """Local. Make a file in which all datasets have their places; none has its content yet.

    Args:
        path: A name that no file has yet.
        records: The datasets.
        shared: See `layout.encode_index`.
        with_blocks: Whether all datasets are allocated on the disk, and the structure is synced.

    Returns:
        The places of everything.

    Raises:
        OSError: No such directory, no permission, or not enough room for the whole file (ENOSPC).
    """
    # Raises the operating system's own error; h5py would raise one of its own.
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    index = encode_index(records, shared)
    piece_count = sum(map(attrgetter("piece_count"), records))
    has_places = len(records) >= LEAST_DATASETS
    own = [
        Record(COMPLETE, (2,), np.dtype("<u4")),
        Record(CHECKSUMS, (piece_count + has_places,), np.dtype("<u4")),
        *([Record(PLACES, (HEAD_COUNT + len(records),), np.dtype("<u8"))] if has_places else []),
        Record(INDEX, (), np.dtype(f"S{len(index)}")),
    ]
    everything = [*records, *own]
    try:
        offsets = lay_out(path, everything)
    except (RuntimeError, OSError) as error:
        # HDF5 hides the operating system's error, a full disk for instance, in the text of an error of another type.
        hidden = re.search(r"errno = (\d+)", str(error))
        if hidden is None:
            raise
        raise OSError(int(hidden[1]), os.strerror(int(hidden[1]))) from error
    descriptor = os.open(path, os.O_RDWR)
    try:
        file_bytes = os.fstat(descriptor).st_size
        if with_blocks:
            # The whole file gets its blocks now: a full disk is an error here, before any rank has begun to write. No
            # rank may: where the file system has no such call, the C library writes back a byte of each block.
            os.posix_fallocate(descriptor, 0, file_bytes)
        extra: tuple[int, ...] = ()
        if has_places:
            extents = zip(offsets, map(attrgetter("nbytes"), everything), strict=True)
            places = encode_places(descriptor, offsets[: len(records)], extents)
            write_at(descriptor, places, offsets[-2])
            extra = (zlib.crc32(places),)
        write_at(descriptor, index, offsets[-1])
        if with_blocks:
            # The size and the structure are on the disk before the content is: the later syncs only write content.
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
    complete_offset, checksums_offset = offsets[len(records) : len(records) + 2]
    return Blank(path, file_bytes, offsets[: len(records)], checksums_offset, complete_offset, index, extra)


def complete(blank: Blank, checksums: Sequence[int]) -> None:
    """Local. Write the checksums and the mark that make a file a checkpoint.

    Call it after every rank has written and synced its content. The mark must not reach the disk before the content:
    a crash would leave a file that passes for a checkpoint.

    Raises:
        CheckpointError: The file has another size than it was made with.
        OSError: It cannot be written.
    """
    table = np.array([*checksums, *blank.extra_checksums], dtype="<u4").tobytes()
    mark = np.array([1, zlib.crc32(table, zlib.crc32(blank.index))], dtype="<u4").tobytes()
    descriptor = os.open(blank.path, os.O_RDWR)
    try:
        size = os.fstat(descriptor).st_size
        if size != blank.file_bytes:
            raise CheckpointError(f"expected {blank.path!r} to have {blank.file_bytes} bytes, got {size}; save again")
        # The mark has the checksum of index and table: if a crash leaves a part of the three, it does not fit, and the
        # file counts as interrupted or damaged.
        write_at(descriptor, table, blank.checksums_offset)
        write_at(descriptor, mark, blank.complete_offset)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_contents(path: str) -> Contents:
    """Local. Read which datasets a checkpoint has and their places, and check the index against its checksum.

    Nothing but the file itself is opened, and no more memory is taken than it has bytes, whatever it says.

    Raises:
        FileNotFoundError: There is no such file, or no longer.
        DamagedCheckpointError: Not HDF5, truncated, not completed, damaged, or not written by mpidist.
        CheckpointError: A later version of mpidist wrote it.
        OSError: It cannot be read.
    """
    # Raises the operating system's own error where the file cannot be opened.
    with open(path, "rb") as raw:
        try:
            with open_datasets(path, os.fstat(raw.fileno()).st_size) as datasets:
                return _contents(path, datasets, raw.fileno())
        # A damaged file may raise anything in HDF5, in h5py, and where its index is read.
        except Exception as error:
            if os.fstat(raw.fileno()).st_nlink == 0:
                raise FileNotFoundError(errno.ENOENT, "it was just deleted or replaced", path) from error
            if isinstance(error, DamagedCheckpointError):
                raise DamagedCheckpointError(f"{path!r} is not a complete checkpoint: {error}. {WAY_OUT}") from None
            if isinstance(error, CheckpointError):
                raise CheckpointError(f"{path!r} cannot be read: {error}") from None
            raise DamagedCheckpointError(
                f"{path!r} cannot be read as a checkpoint: it is truncated, damaged or no HDF5 file ({error}). "
                f"{WAY_OUT}"
            ) from error


def _contents(path: str, datasets: Datasets, descriptor: int) -> Contents:
    file_bytes = os.fstat(descriptor).st_size
    complete = bytes(_own(datasets, COMPLETE, (2,), descriptor))
    done, expected = np.frombuffer(complete, "<u4").tolist()
    if done != 1:
        raise DamagedCheckpointError("the job that wrote it was interrupted")
    index = bytes(_own(datasets, INDEX, (), descriptor))
    table = _own(datasets, CHECKSUMS, None, descriptor)
    if zlib.crc32(table, zlib.crc32(index)) != expected:
        raise DamagedCheckpointError("its index does not have the checksum it was written with")
    records, shared, number = decode_index(index)
    checksums = np.frombuffer(table, "<u4").tolist()
    count = sum(map(attrgetter("piece_count"), records))
    offsets = None
    if len(checksums) == count + 1:
        last = checksums.pop()
        places = _own(datasets, PLACES, None, descriptor) if datasets.has(PLACES) else b""
        if zlib.crc32(places) == last:
            offsets = decode_places(descriptor, places, records, datasets.extents)
    if len(checksums) != count:
        raise DamagedCheckpointError(f"expected {count} checksums, got {len(checksums)}")
    if offsets is None:
        offsets = list(map(datasets.place_of, records))
    complete_offset = datasets.offset(datasets.open(COMPLETE), COMPLETE, len(complete))
    return Contents(path, file_bytes, records, offsets, checksums, shared, number, complete_offset, complete)


def _own(datasets: Datasets, name: str, shape: tuple[int, ...] | None, descriptor: int) -> bytearray:
    """The bytes of one of the library's own datasets: of a shape, or of one dimension."""
    try:
        opened = datasets.open(name)
    except KeyError:
        raise DamagedCheckpointError(
            f"it has no datasets in {OWN_GROUP!r}, so it was not written by mpidist"
        ) from None
    dataset = datasets.described(opened)
    is_text = dataset.dtype.kind == "S"
    if is_text != (name == INDEX) or not (is_text or dataset.dtype == ("<u8" if name == PLACES else "<u4")) or (
        dataset.ndim != 1 if shape is None else dataset.shape != shape
    ):
        raise DamagedCheckpointError(f"{name!r} has an impossible shape {dataset.shape} or dtype {dataset.dtype}")
    offset = datasets.offset(opened, name, dataset.nbytes)
    datasets.extents.append((offset, dataset.nbytes))
    return read_at(descriptor, dataset.nbytes, offset)
