"""The HDF5 file of a checkpoint: lays out a file with every dataset in its final place, and finds the places again.

HDF5 only lays files out and reads their structure. All ranks write and read the bytes themselves, at their offsets,
at the same time; that needs no HDF5 with MPI. The group `_mpidist` belongs to the file as a whole: `index` (JSON:
paths, shapes, dtypes), `checksums` (CRC32 of every piece of 1 MiB) and `complete`, which is written last: 1 and the
CRC32 of the other two.
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
from typing import Any

import h5py
import numpy as np

from mpidist.checkpoint.file.layout import OWN_GROUP, PAGE_BYTES, Record, decode_index, encode_index, stored_dtype
from mpidist.checkpoint.file.positional import read_at, write_at
from mpidist.errors import CheckpointError, DamagedCheckpointError

INDEX = f"{OWN_GROUP}/index"
CHECKSUMS = f"{OWN_GROUP}/checksums"
COMPLETE = f"{OWN_GROUP}/complete"
_VERSIONS = ("earliest", "v110")
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
        complete_offset: Place of the mark of a whole checkpoint.
        complete: The mark; with the checksum of all checksums in it, a file of another content has another one.
    """

    path: str
    file_bytes: int
    records: list[Record]
    offsets: list[int]
    checksums: list[int]
    shared: dict[str, str]
    complete_offset: int
    complete: bytes


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
    """

    path: str
    file_bytes: int
    offsets: list[int]
    checksums_offset: int
    complete_offset: int
    index: bytes


@functools.cache
def is_storable(dtype: np.dtype[Any]) -> bool:
    """Local. Whether HDF5 has a type that keeps `dtype` as it is, or its bits."""
    dtype = stored_dtype(dtype)
    try:
        return dtype.kind in "biufcS" and bool(h5py.h5t.py_create(dtype, logical=True).dtype == dtype)
    except TypeError:
        return False


def create(path: str, records: Sequence[Record], shared: Mapping[str, str]) -> Blank:
    """Local. Make a file with all datasets allocated on the disk; none has its content yet.

    Args:
        path: A name that no file has yet.
        records: The datasets.
        shared: See `layout.encode_index`.

    Returns:
        The places of everything.

    Raises:
        OSError: No such directory, no permission, or not enough room for the whole file (ENOSPC).
    """
    # Raises the operating system's own error; h5py would raise one of its own.
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    index = encode_index(records, shared)
    piece_count = sum(map(attrgetter("piece_count"), records))
    own = [
        Record(COMPLETE, (2,), np.dtype("<u4")),
        Record(CHECKSUMS, (piece_count,), np.dtype("<u4")),
        Record(INDEX, (), np.dtype(f"S{len(index)}")),
    ]
    everything = [*records, *own]
    offsets = [0] * len(everything)
    try:
        with h5py.File(
            path, "w", libver=_VERSIONS, locking=False, alignment_threshold=PAGE_BYTES, alignment_interval=PAGE_BYTES
        ) as file:
            # Small datasets are not aligned, so several are in one page. All of them belong to rank 0, and they come
            # first, so that none shares a page with a large dataset, which other ranks write at the same time.
            for is_large in (False, True):
                for number, record in enumerate(everything):
                    if (record.nbytes >= PAGE_BYTES) is is_large:
                        offsets[number] = _add_dataset(file, record)
    except (RuntimeError, OSError) as error:
        # HDF5 hides the operating system's error, a full disk for instance, in the text of an error of another type.
        hidden = re.search(r"errno = (\d+)", str(error))
        if hidden is None:
            raise
        raise OSError(int(hidden[1]), os.strerror(int(hidden[1]))) from error
    # The whole file gets its blocks now: a full disk is an error here, before any rank has begun to write. The size
    # and the structure are on the disk before the content is, so that the later syncs only write content.
    descriptor = os.open(path, os.O_RDWR)
    try:
        file_bytes = os.fstat(descriptor).st_size
        os.posix_fallocate(descriptor, 0, file_bytes)
        write_at(descriptor, index, offsets[-1])
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return Blank(path, file_bytes, offsets[: len(records)], offsets[-2], offsets[-3], index)


def complete(blank: Blank, checksums: Sequence[int]) -> None:
    """Local. Write the checksums and the mark that make a file a checkpoint.

    Call it after every rank has written and synced its content. The mark must not reach the disk before the content:
    a crash would leave a file that passes for a checkpoint.

    Raises:
        CheckpointError: The file has another size than it was made with.
        OSError: It cannot be written.
    """
    table = np.asarray(checksums, dtype="<u4").tobytes()
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
        FileNotFoundError: No such file, or no longer.
        DamagedCheckpointError: Not HDF5, truncated, not completed, damaged, or not written by mpidist.
        CheckpointError: A later version of mpidist wrote it.
        OSError: It cannot be read.
    """
    # Raises the operating system's own error where the file cannot be opened.
    with open(path, "rb") as raw:
        try:
            # Not HDF5's usual driver: it refuses a file that this process has open in another way.
            with h5py.File(path, "r", driver="stdio", locking=False) as file:
                return _contents(path, file, raw.fileno())
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


def _add_dataset(file: h5py.File, record: Record) -> int:
    links = h5py.h5p.create(h5py.h5p.LINK_CREATE)
    links.set_create_intermediate_group(True)
    links.set_char_encoding(h5py.h5t.CSET_UTF8)
    storage = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    storage.set_layout(h5py.h5d.CONTIGUOUS)
    storage.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    storage.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    # Without times, equal content makes equal files.
    storage.set_obj_track_times(False)
    dtype = stored_dtype(record.dtype)
    if dtype.kind == "S":
        dtype = h5py.string_dtype("utf-8", dtype.itemsize)
    kind = h5py.h5t.py_create(dtype, logical=True)
    space = h5py.h5s.create_simple(record.shape) if record.shape else h5py.h5s.create(h5py.h5s.SCALAR)
    try:
        dataset = h5py.h5d.create(file.id, record.path.encode(), kind, space, storage, links)
    except ValueError as error:
        raise ValueError(
            f"{record.path!r}: another array has this path, or the path of one is inside the other, so one file cannot "
            f"hold both ({error}). Rename one of them; keys such as 1 and '1' give the same path"
        ) from error
    return int(dataset.get_offset() or 0)


def _contents(path: str, file: h5py.File, descriptor: int) -> Contents:
    file_bytes = os.fstat(descriptor).st_size
    checked: set[str] = set()
    complete = bytes(_own(file, COMPLETE, (2,), descriptor, checked))
    done, expected = np.frombuffer(complete, "<u4").tolist()
    if done != 1:
        raise DamagedCheckpointError("the job that wrote it was interrupted")
    index = bytes(_own(file, INDEX, (), descriptor, checked))
    table = _own(file, CHECKSUMS, None, descriptor, checked)
    if zlib.crc32(table, zlib.crc32(index)) != expected:
        raise DamagedCheckpointError("its index does not have the checksum it was written with")
    records, shared = decode_index(index)
    checksums = np.frombuffer(table, "<u4").tolist()
    count = sum(map(attrgetter("piece_count"), records))
    if len(checksums) != count:
        raise DamagedCheckpointError(f"expected {count} checksums, got {len(checksums)}")
    offsets = []
    for record in records:
        dataset = _dataset(file, record.path, checked)
        if dataset.shape != record.shape or dataset.dtype != stored_dtype(record.dtype):
            raise DamagedCheckpointError(
                f"expected dataset {record.path!r} of shape {record.shape} and dtype {record.dtype}, got "
                f"{dataset.shape} and {dataset.dtype}"
            )
        offsets.append(_offset(dataset, record.path, file_bytes))
    complete_offset = _offset(_dataset(file, COMPLETE, checked), COMPLETE, file_bytes)
    return Contents(path, file_bytes, records, offsets, checksums, shared, complete_offset, complete)


def _own(
    file: h5py.File, name: str, shape: tuple[int, ...] | None, descriptor: int, checked: set[str]
) -> bytearray:
    """The bytes of one of the library's own datasets: of a shape, or of one dimension."""
    try:
        dataset = _dataset(file, name, checked)
    except KeyError:
        raise DamagedCheckpointError(
            f"it has no datasets in {OWN_GROUP!r}, so it was not written by mpidist"
        ) from None
    is_text = dataset.dtype.kind == "S"
    if is_text != (name == INDEX) or not (is_text or dataset.dtype == "<u4") or (
        dataset.ndim != 1 if shape is None else dataset.shape != shape
    ):
        raise DamagedCheckpointError(f"{name!r} has an impossible shape {dataset.shape} or dtype {dataset.dtype}")
    return read_at(descriptor, dataset.nbytes, _offset(dataset, name, os.fstat(descriptor).st_size))


def _dataset(file: h5py.File, path: str, checked: set[str]) -> h5py.Dataset:
    """The dataset at `path`, without a link in between that may lead out of the file.

    HDF5 opens whatever an external link names, and would wait without end for a pipe.
    """
    way = ""
    for part in path.split("/"):
        way = f"{way}/{part}" if way else part
        if way not in checked:
            if not file.id.links.exists(way.encode()):
                raise KeyError(f"there is no {way!r}")
            if file.id.links.get_info(way.encode()).type != h5py.h5l.TYPE_HARD:
                raise DamagedCheckpointError(f"{way!r} is a link to another place, expected a dataset or a group")
            checked.add(way)
    dataset = file[path]
    if not isinstance(dataset, h5py.Dataset):
        raise DamagedCheckpointError(f"expected {path!r} to be a dataset, got a group")
    return dataset


def _offset(dataset: h5py.Dataset, path: str, file_bytes: int) -> int:
    offset = dataset.id.get_offset()
    if not dataset.nbytes:
        return 0
    if offset is None:
        raise DamagedCheckpointError(f"dataset {path!r} is not contiguous: another program has rewritten the file")
    if offset + dataset.nbytes > file_bytes:
        raise DamagedCheckpointError(f"expected at least {offset + dataset.nbytes} bytes, got {file_bytes}")
    return int(offset)
