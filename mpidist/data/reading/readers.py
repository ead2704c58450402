"""Readers of files for `from_files`: a path in, arrays out, as lazily as the format allows."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import h5py
import numpy as np


@dataclass(frozen=True)
class FileReader:
    """A reader that can count the examples of a file without reading them.

    Attributes:
        read: Returns the examples of a file.
        count_examples: Returns their number.
    """

    read: Callable[[str], Any]
    count_examples: Callable[[str], int]

    def __call__(self, path: str) -> Any:
        """Local. The examples of a file."""
        return self.read(path)


def read_npy(path: str | os.PathLike[str]) -> Any:
    """Local. The array of a .npy file, mapped into memory: only the rows that are used are read."""
    return np.load(path, mmap_mode="r")


def read_npz(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Local. The arrays of a .npz file by name. The whole file is read, since it is an archive."""
    with np.load(path) as archive:
        return {name: archive[name] for name in archive.files}


def hdf5_reader(*names: str) -> Callable[[str], Any]:
    """Local. Make a reader of some datasets of HDF5 files.

    Args:
        names: Names of the datasets. With one name an element is a row of it, with several a tuple of rows.

    Returns:
        A reader for `from_files`. It reads only the rows that are used, and none to count them.
    """

    def read(path: str | os.PathLike[str]) -> Any:
        file = h5py.File(path)
        found = tuple(file[name] for name in names)
        return found[0] if len(found) == 1 else found

    def count(path: str | os.PathLike[str]) -> int:
        with h5py.File(path) as file:
            return int(file[names[0]].shape[0])

    return FileReader(read, count)


def counter_of(reader: Callable[[Any], Any]) -> Callable[[Any], int] | None:
    """Local. The function that counts a file's examples without reading them, None where the reader has none.

    That is the reader's method `count_examples`. Of the readers in this module only `read_npz` has no count.
    """
    if reader is read_npy:
        return _rows_of_npy
    count: Callable[[Any], int] | None = getattr(reader, "count_examples", None)
    return count


def _rows_of_npy(path: str) -> int:
    return int(read_npy(path).shape[0])
