"""Readers of files for `from_files`: a path in, arrays out, as lazily as the format allows."""

from __future__ import annotations

import errno
import importlib
import os
import threading
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

# NumPy parses headers as Python code, and some versions of Python fail (SystemError) where two threads do so at a time.
_READING_HEADERS = threading.Lock()


@dataclass(frozen=True)
class FileReader:
    """A reader that can count the examples of a file without reading them.

    Attributes:
        read: A function that returns the examples of a file.
        count_examples: A function that returns their number.
    """

    read: Callable[[str], Any]
    count_examples: Callable[[str], int]

    def __call__(self, path: str) -> Any:
        """Local. The examples of a file."""
        return self.read(path)


def read_npy(path: str | os.PathLike[str]) -> Any:
    """Local. The array of a .npy file, mapped into memory: only the rows that are used are read.

    Raises:
        ValueError: The file is no .npy file, or is shorter than its header says.
    """
    try:
        with _READING_HEADERS:
            return np.lib.format.open_memmap(path, mode="r")
    except (ValueError, EOFError) as error:
        raise ValueError(f"read_npy: {os.fspath(path)!r} cannot be read as a .npy file: {error}") from error


def read_npz(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Local. The arrays of a .npz file by name. The whole file is read, since it is an archive.

    Raises:
        ValueError: The file is no .npz file, or is damaged.
    """
    try:
        loaded = np.load(path)
        if not isinstance(loaded, np.lib.npyio.NpzFile):
            raise ValueError("it holds one array. Use read_npy")
        with loaded as archive, _READING_HEADERS:
            return {name: archive[name] for name in archive.files}
    except (ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"read_npz: {os.fspath(path)!r} cannot be read as a .npz file: {error}") from error


def hdf5_reader(*names: str) -> Callable[[str], Any]:
    """Local. Make a reader of some datasets of HDF5 files.

    Args:
        names: Names of the datasets. With one name an element is a row of it, with several a tuple of rows.

    Returns:
        A reader for `from_files`. It reads only the rows that are used, and none to count them. It raises OSError for
        what is no HDF5 file, and KeyError for a file without one of the datasets.

    Raises:
        TypeError: There is no name, or one is no string.
    """
    if not names or not all(isinstance(name, str) for name in names):
        raise TypeError(f"hdf5_reader: expected the names of datasets, at least one, got {names!r}")

    def read(path: str | os.PathLike[str]) -> Any:
        file = _open_hdf5(path)
        found = tuple(_dataset_in(file, name) for name in names)
        return found[0] if len(found) == 1 else found

    def count(path: str | os.PathLike[str]) -> int:
        with _open_hdf5(path) as file:
            return int(_dataset_in(file, names[0]).shape[0])

    return FileReader(read, count)


def counter_of(reader: Callable[[Any], Any]) -> Callable[[Any], int] | None:
    """Local. The function that counts a file's examples without reading them, None where the reader has none.

    That is the reader's method `count_examples`. Of the readers in this module only `read_npz` has no count.
    """
    if reader is read_npy:
        return _rows_of_npy
    count: Callable[[Any], int] | None = getattr(reader, "count_examples", None)
    return count


def _open_hdf5(path: str | os.PathLike[str]) -> Any:
    try:
        # Loaded by name, since most programs read other files: it takes 3 MB of each rank.
        return importlib.import_module("h5py").File(path)
    except FileNotFoundError:
        raise FileNotFoundError(errno.ENOENT, "hdf5_reader: there is no such file", os.fspath(path)) from None
    except OSError as error:
        raise OSError(f"hdf5_reader: {os.fspath(path)!r} cannot be opened as an HDF5 file: {error}") from error


def _dataset_in(file: Any, name: str) -> Any:
    found = file.get(name)
    if not isinstance(found, importlib.import_module("h5py").Dataset):
        raise KeyError(
            f"hdf5_reader: expected a dataset {name!r} in {file.filename!r}, got a file with {sorted(file)!r}"
        )
    return found


def _rows_of_npy(path: str) -> int:
    return int(read_npy(path).shape[0])
