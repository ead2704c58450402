"""The saved arrays of a checkpoint file, which are read when an object asks for them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from mpidist.arrays import AnyArray
from mpidist.checkpoint.file.checked import CheckedFile
from mpidist.checkpoint.file.choice import EVERYTHING, Choice
from mpidist.checkpoint.file.hdf5 import Contents
from mpidist.checkpoint.file.layout import BYTES, METADATA, NONE, PIECE_BYTES, TEXT, Record, resolve, split
from mpidist.checkpoint.file.positional import read_at
from mpidist.errors import CheckpointError
from mpidist.variables.variable import BaseVariable, Read

# A nested dictionary, or a single array.
Saved = Any


class SavedFile:
    """An open checkpoint file; it stays readable after its name is deleted.

    Local. It is closed with the last array that was taken from it.

    Args:
        contents: Its datasets and their places.
        choice: The part of it that is taken.

    Attributes:
        contents: The constructor's argument.
        choice: The constructor's argument.
        opened: The open file.
        arrays: Every array that is taken, by its path in the file.
        metadata: The text of the program's notes; None where it has written none.

    Raises:
        OSError: This rank cannot open the file.
        CheckpointError: This rank reads another file than rank 0, or the choice does not fit the file.
        TypeError: The choice has arguments of wrong types.
    """

    def __init__(self, contents: Contents, choice: Choice = EVERYTHING) -> None:
        choice.require_possible()
        self.contents = contents
        self.choice = choice
        self.opened = CheckedFile(contents)
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
        self._numbers = {record.path: number for number, record in enumerate(contents.records)}
        self.arrays = {
            path: SavedArray(self.opened, number, casts=choice.cast) for path, number in self._numbers.items()
        }
        self.metadata = self.arrays.pop(METADATA, None)
        self._shared = contents.shared
        self._places: dict[str, str] | None = None
        if choice.rename is not None or choice.only is not None:
            self._choose()
        self._tree = self._build_tree()

    def find(self, path: str) -> Saved | None:
        """Local. Look up a path.

        Args:
            path: A path in the program, escaped, see `layout`; it may lead through shared objects.

        Returns:
            The array stored there, or everything stored below as nested dictionaries; None where nothing is stored.
        """
        node: Any = self._tree
        for part in split(resolve(path, self._shared)):
            if not isinstance(node, dict) or part not in node:
                return None
            node = node[part]
        return node

    def hold(self, names: Iterable[str]) -> None:
        """Local. Check arrays, as far as they are small, and keep them in memory until `release`.

        Args:
            names: Their paths in the file.

        Raises:
            DamagedCheckpointError, CheckpointError, OSError: See `CheckedFile.hold`.
        """
        self.opened.hold([self._numbers[name] for name in names if name in self._numbers])

    def release(self) -> None:
        """Local. Forget what is held in memory."""
        self.opened.release()

    def _choose(self) -> None:
        shared = self.contents.shared
        places = self.choice.places(self.arrays, shared)
        self._shared = {places[alias]: places[path] for alias, path in shared.items() if {alias, path} <= places.keys()}
        self._places = places
        self.arrays = {
            path: array for path, array in self.arrays.items()
            if path in places and any(
                place is not None and self.choice.takes(place) for place in map(self.choice.place_of, self._names(path))
            )
        }

    def _names(self, path: str) -> Iterator[str]:
        """The path of an array in the file, and the other ones that lead to it."""
        yield path
        for alias, first in self.contents.shared.items():
            if f"{path}/".startswith(f"{first}/"):
                yield alias + path[len(first) :]

    def _build_tree(self) -> dict[str, Saved]:
        tree: dict[str, Saved] = {}
        places = self._places
        leaves = dict(self.arrays) if places is None else {places[path]: one for path, one in self.arrays.items()}
        # A variable that belongs to two objects is stored once; both must find it.
        leaves.update({alias: leaves[path] for alias, path in self._shared.items() if path in leaves})
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
        kind: See `Record`.
        casts: Whether variables of other dtypes take it, converted.
    """

    def __init__(self, opened: CheckedFile, number: int, *, casts: bool = False) -> None:
        record: Record = opened.contents.records[number]
        self.name = record.path
        self.shape = record.shape
        self.replicas = record.replicas
        self.dtype: np.dtype[Any] = record.dtype.newbyteorder("=")
        self.size = record.size
        self.kind = record.kind
        self.casts = casts
        self._record = record
        self._number = number
        self._opened = opened

    def read(self, start: int, stop: int) -> AnyArray:
        """Local. Read the elements [start, stop) of the flattened array into a new one-dimensional array.

        They are compared with their checksums.

        Raises:
            IndexError: The range is outside the array.
            DamagedCheckpointError: They are damaged.
            CheckpointError: The file was truncated after it was opened.
            OSError: It cannot be read.
        """
        if not 0 <= start <= stop <= self.size:
            raise IndexError(f"{self.name!r}: expected a range within [0, {self.size}), got [{start}, {stop})")
        step = self._record.dtype.itemsize
        data = self._opened.read(self._number, start * step, stop * step)
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
            return self.read_as(variable.saved_dtype)
        if not self.replicas:
            raise CheckpointError(f"{self.name!r}: expected components, got one value of shape {self.shape} for all")
        first = variable.group.rank % self.replicas * variable.size
        read = self.read_as(variable.saved_dtype)
        return lambda start, stop: read(first + start, first + stop)

    def read_as(self, dtype: np.dtype[Any]) -> Read:
        """Local. `read`, or where it `casts` to another dtype, a function that reads and converts."""
        if not self.casts or dtype.newbyteorder("=") == self.dtype:
            return self.read

        def read(start: int, stop: int) -> AnyArray:
            # A number beyond the range of a smaller floating dtype becomes infinite, as `astype` has it.
            with np.errstate(over="ignore", invalid="ignore"):
                return self.read(start, stop).astype(dtype)

        return read

    def require_range(self, dtype: np.dtype[Any]) -> None:
        """Local. Raise unless integers fit a smaller integer dtype; this reads them all.

        Raises:
            CheckpointError: Some integers do not fit.
        """
        if not self.casts or self.dtype.kind not in "iu" or dtype.kind not in "iu" or np.can_cast(self.dtype, dtype):
            return
        limits = np.iinfo(dtype)
        for start in range(0, self.size, PIECE_BYTES):
            part = self.read(start, min(start + PIECE_BYTES, self.size))
            if int(part.min()) < limits.min or int(part.max()) > limits.max:
                raise CheckpointError(
                    f"{self.name!r}: {self.dtype} was saved, and some of it is out of the range of {dtype}"
                )

    def numpy(self) -> AnyArray:
        """Local. Read the whole array into a new one; texts become an array of strings, bytes one of uint8."""
        array = self.read(0, self.size).reshape(self.shape)
        if self.kind == TEXT:
            # A string array would drop a NUL at its end.
            return np.array(array.tobytes().decode("utf-8", "surrogatepass"), object)
        if self.dtype.kind != "S" or self.kind == BYTES:
            return array
        # Loading `np.char` takes as long as restoring some dozen MB, and most texts are alone.
        if array.ndim:
            return np.char.decode(array, "utf-8", "surrogatepass")
        return np.array(array.item().decode("utf-8", "surrogatepass"))

    def value(self) -> Any:
        """Local. Read what was saved: an array, a NumPy number, a string, bytes or None."""
        if self.kind == NONE:
            return None
        array = self.numpy()
        if self.kind == BYTES and self.dtype.kind != "S":
            return array.tobytes()
        return array if self.shape and self.kind != TEXT else array.item() if array.dtype.kind in "UO" else array[()]

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> AnyArray:
        return np.asarray(self.numpy(), dtype)

    def __int__(self) -> int:
        return int(self.numpy())

    def __float__(self) -> float:
        return float(self.numpy())

    def __str__(self) -> str:
        return str(self.numpy())

    def __bytes__(self) -> bytes:
        return self.read(0, self.size).tobytes()

    @property
    def type_name(self) -> str:
        """Local. The name of its dtype for people, or "text", "bytes" or "none"."""
        return self._record.type_name

    def __repr__(self) -> str:
        return f"<SavedArray {self.name!r} shape={self.shape} dtype={self.type_name}>"


def arrays_in(saved: Saved) -> Iterator[SavedArray]:
    """Local. Iterate over all arrays of what `SavedFile.find` returned."""
    if isinstance(saved, dict):
        for child in saved.values():
            yield from arrays_in(child)
    else:
        yield saved
