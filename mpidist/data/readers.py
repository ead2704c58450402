"""Readers of files for `from_files`: a path in, arrays out, read as lazily as the format allows."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import h5py
import numpy as np


def read_npy(path: str | os.PathLike[str]) -> Any:
    """Local. The array of a .npy file, mapped into memory: only rows that are asked for are read."""
    return np.load(path, mmap_mode="r")


def read_npz(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Local. The arrays of a .npz file by name; the whole file is read, since it is an archive."""
    with np.load(path) as archive:
        return {name: archive[name] for name in archive.files}


def hdf5_reader(*names: str) -> Callable[[str], Any]:
    """Local. A reader of some datasets of HDF5 files.

    Args:
        names: Of the datasets. One gives elements that are its rows, several give tuples.

    Returns:
        A reader for `from_files`; only rows that are asked for are read.
    """

    def read(path: str | os.PathLike[str]) -> Any:
        file = h5py.File(path)
        found = tuple(file[name] for name in names)
        return found[0] if len(found) == 1 else found

    return read
