"""The saved arrays of a checkpoint file, which are read when an object asks for them."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from mpidist.arrays import AnyArray
from mpidist.checkpoint.file.hdf5 import Contents
from mpidist.checkpoint.file.layout import Record, resolve, split
from mpidist.checkpoint.file.positional import read_at
from mpidist.errors import CheckpointError
from mpidist.variables.variable import BaseVariable, Read

# A nested dictionary, or a single array.
Saved = Any


class _Opened:
    """A file descriptor for reading, closed with the last array that reads from it."""

    def __init__(self, path: str) -> None:
        self.descriptor = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self.descriptor)


class SavedFile:
    """An open checkpoint file; it stays readable after its name is deleted.

    Local. It is closed with the last array that was taken from it.

    Args:
        contents: Its datasets and their places.

    Attributes:
        contents: The same.
        opened: The open file.
        arrays: Every array by its path.

    Raises:
        OSError: This rank cannot open the file.
        CheckpointError: This rank reads another file than rank 0.
    """

    def __init__(self, contents: Contents) -> None:
        self.contents = contents
        self.opened = _Opened(contents.path)
        size = os.fstat(self.opened.descriptor).st_size
        # Another one of the same size and structure would mix its values with those of the first, as far as no
        # checksum is this rank's to check.
        if size != contents.file_bytes or contents.complete != read_at(
            self.opened.descriptor, len(contents.complete), contents.complete_offset
        ):
            raise CheckpointError(
                f"{contents.path!r}: expected the file of {contents.file_bytes} bytes that rank 0 has read, got "
                f"another one, of {size} bytes. Save checkpoints to a file system that all hosts share; or, if "
                "another job has just saved one of this name, restore it again"
            )
        self.arrays = {
            record.path: SavedArray(self.opened, record, offset)
            for record, offset in zip(contents.records, contents.offsets, strict=True)
        }
        self._tree = self._build_tree()

    def find(self, path: str) -> Saved | None:
        """Local. Look up a path.

        Args:
            path: Escaped, see `layout`; it may lead through shared objects.

        Returns:
            The array stored there, or everything stored below as nested dictionaries; None where nothing is stored.
        """
        node: Any = self._tree
        for part in split(resolve(path, self.contents.shared)):
            if not isinstance(node, dict) or part not in node:
                return None
            node = node[part]
        return node

    def _build_tree(self) -> dict[str, Saved]:
        tree: dict[str, Saved] = {}
        leaves = dict(self.arrays)
        # A variable that belongs to two objects is stored once; both must find it.
        leaves.update({alias: self.arrays[path] for alias, path in self.contents.shared.items() if path in self.arrays})
        for path, array in leaves.items():
            *way, last = split(path)
            node = tree
            for part in way:
                node = node.setdefault(part, {})
            node[last] = array
        return tree


class SavedArray:
    """One array of a checkpoint; a scalar or a text is an array without dimensions.

    `int`, `float`, `str` and NumPy's functions take it as the value that was saved.

    Attributes:
        name: Its path in the checkpoint.
        shape: The full, global shape.
        replicas: Number of replicas whose components the first dimension holds; 0 where all shared one value.
        dtype: The dtype of the arrays that `read` and `numpy` return. A text has the dtype of its bytes in UTF-8, and
            `numpy` decodes them.
        size: Number of elements.
    """

    def __init__(self, opened: _Opened, record: Record, offset: int) -> None:
        self.name = record.path
        self.shape = record.shape
        self.replicas = record.replicas
        self.dtype: np.dtype[Any] = record.dtype.newbyteorder("=")
        self.size = record.size
        self._record = record
        self._offset = offset
        self._opened = opened

    def read(self, start: int, stop: int) -> AnyArray:
        """Local. Read the elements [start, stop) of the flattened array into a new one-dimensional array.

        Raises:
            IndexError: Outside the array.
            CheckpointError: The file was truncated after it was opened.
            OSError: It cannot be read.
        """
        if not 0 <= start <= stop <= self.size:
            raise IndexError(f"{self.name!r}: expected a range within [0, {self.size}), got [{start}, {stop})")
        step = self._record.dtype.itemsize
        data = read_at(self._opened.descriptor, (stop - start) * step, self._offset + start * step)
        array: AnyArray = np.frombuffer(data, self._record.dtype).astype(self.dtype, copy=False)
        return array

    def reader(self) -> Read:
        """Local. Open for reading what another checkpoint stores, as `BaseVariable.reader`."""
        return self.read

    def read_for(self, variable: BaseVariable) -> Read:
        """Local. Make the function that `variable.load` takes: it reads the value, or this rank's component.

        Where n replicas saved and m restore, replica r gets component r % n. If m is n, each gets its own. If m is
        less, the first m are kept. If m is more, the later replicas begin with copies: do not restore the state of a
        random generator that way.

        Raises:
            CheckpointError: One value was saved for all replicas.
        """
        if not variable.is_per_replica:
            return self.read
        if not self.replicas:
            raise CheckpointError(f"{self.name!r}: expected components, got one value of shape {self.shape} for all")
        first = variable.group.rank % self.replicas * variable.size
        return lambda start, stop: self.read(first + start, first + stop)

    def numpy(self) -> AnyArray:
        """Local. Read the whole array into a new one; a text becomes a string array without dimensions."""
        array = self.read(0, self.size).reshape(self.shape)
        return np.array(array.item().decode()) if self.dtype.kind == "S" else array

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> AnyArray:
        return np.asarray(self.numpy(), dtype)

    def __int__(self) -> int:
        return int(self.numpy())

    def __float__(self) -> float:
        return float(self.numpy())

    def __str__(self) -> str:
        return str(self.numpy())

    def __repr__(self) -> str:
        return f"<SavedArray {self.name!r} shape={self.shape} dtype={self.dtype}>"


def arrays_in(saved: Saved) -> Iterator[SavedArray]:
    """Local. Iterate over all arrays of what `SavedFile.find` returned."""
    if isinstance(saved, dict):
        for child in saved.values():
            yield from arrays_in(child)
    else:
        yield saved
