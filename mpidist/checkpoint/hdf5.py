"""The HDF5 file of a checkpoint: making one in which every dataset has its final place, and finding the places again.

The library lays files out and reads their structure; the bytes themselves are written and read at their offsets by
all ranks at once, which needs no HDF5 with MPI. The group `_mpidist` holds what belongs to the file as a whole:
`index` (JSON: paths, shapes, dtypes), `checksums` (CRC32 of every piece of 1 MiB) and `complete`, which is written
last: 1 and the CRC32 of the other two.
"""

from __future__ import annotations

import contextlib
import os
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import h5py
import numpy as np

from mpidist.checkpoint.layout import OWN_GROUP, PAGE_BYTES, Record, decode_index, encode_index, first_pieces
from mpidist.checkpoint.positional import write_at
from mpidist.errors import CheckpointError

INDEX = f"{OWN_GROUP}/index"
CHECKSUMS = f"{OWN_GROUP}/checksums"
COMPLETE = f"{OWN_GROUP}/complete"
_VERSIONS = ("earliest", "v110")


@dataclass(frozen=True)
class Contents:
    """What is where in a checkpoint file.

    Attributes:
        path: The file.
        file_bytes: Its size.
        records: The datasets, in the order of their checksums.
        offsets: First byte of each dataset; 0 for an empty one.
        checksums: CRC32 of all pieces of all datasets.
        shared: See `layout.encode_index`.
    """

    path: str
    file_bytes: int
    records: list[Record]
    offsets: list[int]
    checksums: list[int]
    shared: dict[str, str]


@dataclass(frozen=True)
class Blank:
    """A file whose datasets have their place, and no content yet.

    Attributes:
        path: The file.
        file_bytes: Its size, which writing does not change.
        offsets: First byte of each dataset; 0 for an empty one.
        checksums_offset: Where the checksums belong.
        complete_offset: Where the mark belongs that makes it a checkpoint.
        index: What `layout.encode_index` gave.
    """

    path: str
    file_bytes: int
    offsets: list[int]
    checksums_offset: int
    complete_offset: int
    index: bytes


def check_storable(path: str, dtype: np.dtype[Any]) -> None:
    """Local. Raise unless HDF5 has a type for `dtype`.

    Raises:
        CheckpointError: It has none, or none that keeps it as it is.
    """
    try:
        known = dtype.kind in "biufcS" and h5py.h5t.py_create(dtype, logical=True).dtype == dtype
    except TypeError:
        known = False
    if not known:
        raise CheckpointError(
            f"{path!r}: expected a boolean, integer, floating or complex dtype, got {dtype}, which HDF5 cannot hold. "
            "Store it as another dtype, bfloat16 as float32 for instance"
        )


def create(path: str, records: Sequence[Record], shared: Mapping[str, str]) -> Blank:
    """Local. Make a file with all datasets allocated on the disk; nothing of their content is written yet.

    Args:
        path: Of a file that does not exist.
        records: The datasets.
        shared: See `layout.encode_index`.

    Returns:
        Where everything belongs.

    Raises:
        OSError: No such directory, no permission, or not enough room for the whole file (ENOSPC).
    """
    # Raises the operating system's own error; h5py would give one of its own.
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    index = encode_index(records, shared)
    own = [
        Record(COMPLETE, (2,), np.dtype("<u4")),
        Record(CHECKSUMS, (first_pieces(records)[-1],), np.dtype("<u4")),
        Record(INDEX, (), np.dtype(f"S{len(index)}")),
    ]
    everything = [*records, *own]
    offsets = [0] * len(everything)
    with _errors_of_the_system(), h5py.File(
        path, "w", libver=_VERSIONS, locking=False, alignment_threshold=PAGE_BYTES, alignment_interval=PAGE_BYTES
    ) as file:
        # The small ones come first: they are rank 0's, and share no page with what other ranks write meanwhile.
        for number in sorted(range(len(everything)), key=lambda n: everything[n].nbytes >= PAGE_BYTES):
            offsets[number] = _add_dataset(file, everything[number])
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
    """Local. Write the checksums and the mark that make a file a checkpoint; all else has been written and synced.

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
        write_at(descriptor, table, blank.checksums_offset)
        write_at(descriptor, mark, blank.complete_offset)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_contents(path: str) -> Contents:
    """Local. What a checkpoint holds and where, checked against itself.

    Raises:
        FileNotFoundError: No such file.
        CheckpointError: Not HDF5, truncated, not completed, damaged, or not written by mpidist.
        OSError: It cannot be read.
    """
    with open(path, "rb"):
        pass  # the operating system's own error where it cannot be opened
    way_out = "Restore an older checkpoint, or save again"
    try:
        with h5py.File(path, "r", locking=False) as file:
            return _contents(path, file)
    except CheckpointError as error:
        raise CheckpointError(f"{path!r} is not a whole checkpoint: {error}. {way_out}") from None
    except (OSError, KeyError, ValueError, TypeError, RuntimeError) as error:
        raise CheckpointError(
            f"{path!r} cannot be read as a checkpoint: it is truncated, damaged or no HDF5 file ({error}). {way_out}"
        ) from error


@contextlib.contextmanager
def _errors_of_the_system() -> Iterator[None]:
    """HDF5 hides a full disk in the text of an error of another type."""
    try:
        yield
    except (RuntimeError, OSError) as error:
        number = re.search(r"errno = (\d+)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1]))) from error


def _add_dataset(file: h5py.File, record: Record) -> int:
    links = h5py.h5p.create(h5py.h5p.LINK_CREATE)
    links.set_create_intermediate_group(True)
    links.set_char_encoding(h5py.h5t.CSET_UTF8)
    storage = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    storage.set_layout(h5py.h5d.CONTIGUOUS)
    storage.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    storage.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    # Equal content makes equal files.
    storage.set_obj_track_times(False)
    dtype = record.dtype
    if dtype.kind == "S":
        dtype = h5py.string_dtype("utf-8", dtype.itemsize)
    kind = h5py.h5t.py_create(dtype, logical=True)
    space = h5py.h5s.create_simple(record.shape) if record.shape else h5py.h5s.create(h5py.h5s.SCALAR)
    dataset = h5py.h5d.create(file.id, record.path.encode(), kind, space, storage, links)
    return int(dataset.get_offset() or 0)


def _contents(path: str, file: h5py.File) -> Contents:
    if not all(isinstance(file.get(name), h5py.Dataset) for name in (COMPLETE, INDEX, CHECKSUMS)):
        raise CheckpointError(f"it has no datasets in {OWN_GROUP!r}, so it was not written by mpidist")
    done, expected = file[COMPLETE][:].tolist()
    if done != 1:
        raise CheckpointError("its writing was interrupted")
    index = bytes(file[INDEX][()])
    table = file[CHECKSUMS][:]
    if zlib.crc32(table.tobytes(), zlib.crc32(index)) != expected:
        raise CheckpointError("the checksum of its index does not fit")
    records, shared = decode_index(index)
    offsets = [_offset(file, record) for record in records]
    file_bytes = os.stat(path).st_size
    end = max((o + r.nbytes for o, r in zip(offsets, records, strict=True)), default=0)
    if end > file_bytes:
        raise CheckpointError(f"expected at least {end} bytes, got {file_bytes}")
    return Contents(path, file_bytes, records, offsets, table.tolist(), shared)


def _offset(file: h5py.File, record: Record) -> int:
    dataset = file[record.path]
    if not isinstance(dataset, h5py.Dataset):
        raise CheckpointError(f"expected {record.path!r} to be a dataset, got a group")
    if dataset.shape != record.shape or dataset.dtype != record.dtype:
        raise CheckpointError(
            f"expected dataset {record.path!r} of shape {record.shape} and dtype {record.dtype}, got {dataset.shape} "
            f"and {dataset.dtype}"
        )
    offset = dataset.id.get_offset()
    if record.nbytes and offset is None:
        raise CheckpointError(f"dataset {record.path!r} is not contiguous; the file was rewritten by another program")
    return int(offset or 0)
