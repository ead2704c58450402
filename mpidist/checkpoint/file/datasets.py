"""Datasets of HDF5 files, made and opened by HDF5's own calls.

With h5py's objects ten thousand of them would take seconds. A rank that opens no HDF5 file does not load this module.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import h5py
import numpy as np

from mpidist.checkpoint.file.layout import OF_ML_DTYPES, PAGE_BYTES, Record, stored_dtype
from mpidist.errors import DamagedCheckpointError

# An attribute of datasets whose dtype does not say what their values are, for readers that do not look into the index.
NAME_OF_TYPE = "mpidist_dtype"
_VERSIONS = ("earliest", "v110")


def holds(dtype: np.dtype[Any]) -> bool:
    """Local. Whether HDF5 has a type that keeps `dtype` as it is."""
    try:
        return bool(h5py.h5t.py_create(dtype, logical=True).dtype == dtype)
    except TypeError:
        return False


def lay_out(path: str, records: Sequence[Record]) -> list[int]:
    """Local. Make a file with a dataset for each record; gives the first byte of each one there, 0 where it is empty.

    Args:
        path: An empty file.
        records: The datasets.

    Raises:
        ValueError: See `add_dataset`.
        RuntimeError, OSError: HDF5 cannot write it.
    """
    offsets = [0] * len(records)
    with h5py.File(
        path, "w", libver=_VERSIONS, locking=False, alignment_threshold=PAGE_BYTES, alignment_interval=PAGE_BYTES
    ) as file:
        # Small datasets are not aligned, so several are in one page. All of them belong to rank 0, and they come
        # first, so that none shares a page with a large dataset, which other ranks write at the same time.
        groups: dict[str, Any] = {"": file.id}
        for is_large in (False, True):
            for number, record in enumerate(records):
                if (record.nbytes >= PAGE_BYTES) is is_large:
                    offsets[number] = add_dataset(file, groups, record)
    return offsets


@contextmanager
def open_datasets(path: str, file_bytes: int) -> Iterator[Datasets]:
    """Local. Open the datasets of a file, to be read.

    Args:
        path: The file.
        file_bytes: Its size.
    """
    # Not HDF5's usual driver: it refuses a file that this process has open in another way.
    with h5py.File(path, "r", driver="stdio", locking=False) as file:
        yield Datasets(file, file_bytes)


def add_dataset(file: h5py.File, groups: dict[str, Any], record: Record) -> int:
    """Local. Add a dataset to a new file, and give its first byte there, 0 where it is empty.

    Args:
        file: The file.
        groups: Its groups by path, as far as datasets are in them.
        record: The dataset.

    Raises:
        ValueError: Another array has its path, or one is inside the other.
    """
    storage, links = _properties()
    way, _, name = record.path.rpartition("/")
    parent = groups.get(way)
    if parent is None:
        parent, name = file.id, record.path
    try:
        dataset = h5py.h5d.create(
            parent, name.encode(), _type_of(record.dtype), _space_of(record.shape), storage, links
        )
    except ValueError as error:
        raise ValueError(
            f"{record.path!r}: another array has this path, or the path of one is inside the other, so one file cannot "
            f"hold both ({error}). Rename one of them; keys such as 1 and '1' give the same path"
        ) from error
    if way not in groups:
        groups[way] = h5py.h5g.open(file.id, way.encode())
    if record.kind or record.dtype.isbuiltin == OF_ML_DTYPES:
        h5py.Dataset(dataset).attrs[NAME_OF_TYPE] = np.bytes_(record.type_name)
    return int(dataset.get_offset() or 0)


@functools.cache
def _properties() -> tuple[Any, Any]:
    """The properties of all datasets, and of the links to them."""
    storage = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    storage.set_layout(h5py.h5d.CONTIGUOUS)
    storage.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    storage.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    # Without times, equal content makes equal files.
    storage.set_obj_track_times(False)
    links = h5py.h5p.create(h5py.h5p.LINK_CREATE)
    links.set_create_intermediate_group(True)
    links.set_char_encoding(h5py.h5t.CSET_UTF8)
    return storage, links


@functools.lru_cache(256)
def _space_of(shape: tuple[int, ...]) -> Any:
    return h5py.h5s.create_simple(shape) if shape else h5py.h5s.create(h5py.h5s.SCALAR)


@functools.cache
def _type_of(dtype: np.dtype[Any]) -> Any:
    """HDF5's type of a dataset."""
    dtype = stored_dtype(dtype)
    if dtype.kind == "S":
        dtype = h5py.string_dtype("utf-8", dtype.itemsize)
    return h5py.h5t.py_create(dtype, logical=True)


class Datasets:
    """The datasets of an open file, which are looked up by their paths.

    Args:
        file: The file.
        file_bytes: Its size.

    Attributes:
        extents: First byte and number of bytes of the library's own datasets that were read.
    """

    def __init__(self, file: h5py.File, file_bytes: int) -> None:
        self.extents: list[tuple[int, int]] = []
        self._file_bytes = file_bytes
        self._groups: dict[str, tuple[Any, Any]] = {"": (file.id, file.id.links)}

    def open(self, path: str) -> Any:
        """Local. Open a dataset, without a link in between that may lead out of the file.

        HDF5 opens whatever an external link names, and would wait without end for a pipe.
        """
        way, _, name = path.rpartition("/")
        group, links = self._groups.get(way) or self._group(way)
        self._require_hard(links, name, path)
        dataset = h5py.h5o.open(group, name.encode())
        if not isinstance(dataset, h5py.h5d.DatasetID):
            raise DamagedCheckpointError(f"expected {path!r} to be a dataset, got a group")
        return dataset

    @staticmethod
    def described(dataset: Any) -> Any:
        """Local. An open dataset as h5py's object, which has its shape and dtype."""
        return h5py.Dataset(dataset)

    def has(self, path: str) -> bool:
        """Local. Whether there is something at a path of two parts, whose first one is a group."""
        way, _, name = path.rpartition("/")
        return bool(self._group(way)[1].exists(name.encode()))

    def place_of(self, record: Record) -> int:
        """Local. The first byte of a dataset, 0 where it is empty; an error unless the index describes it."""
        dataset = self.open(record.path)
        # Most have the very type that `create` gave; others, such as of other programs, are compared by NumPy's.
        is_same = dataset.get_type().equal(_type_of(record.dtype)) or dataset.dtype == stored_dtype(record.dtype)
        if not is_same or dataset.shape != record.shape:
            shown = h5py.Dataset(dataset)
            raise DamagedCheckpointError(
                f"expected dataset {record.path!r} of shape {record.shape} and dtype {record.dtype}, got "
                f"{shown.shape} and {shown.dtype}"
            )
        return self.offset(dataset, record.path, record.nbytes)

    def offset(self, dataset: Any, path: str, nbytes: int) -> int:
        """Local. The first byte of an open dataset of `nbytes`; an error where its bytes are not in one place."""
        if not nbytes:
            return 0
        offset = dataset.get_offset()
        if offset is None:
            raise DamagedCheckpointError(f"dataset {path!r} is not contiguous: another program has rewritten the file")
        if offset + nbytes > self._file_bytes:
            raise DamagedCheckpointError(f"expected at least {offset + nbytes} bytes, got {self._file_bytes}")
        return int(offset)

    def _group(self, path: str) -> tuple[Any, Any]:
        way, _, name = path.rpartition("/")
        parent, links = self._groups.get(way) or self._group(way)
        self._require_hard(links, name, path)
        group = h5py.h5o.open(parent, name.encode())
        if not isinstance(group, h5py.h5g.GroupID):
            raise KeyError(f"there is nothing below {path!r}")
        self._groups[path] = group, group.links
        return self._groups[path]

    @staticmethod
    def _require_hard(links: Any, name: str, path: str) -> None:
        try:
            kind = links.get_info(name.encode()).type
        except RuntimeError as error:
            raise KeyError(f"there is no {path!r}") from error
        if kind != h5py.h5l.TYPE_HARD:
            raise DamagedCheckpointError(f"{path!r} is a link to another place, expected a dataset or a group")
