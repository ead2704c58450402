"""Sources: they read the items of a stream, one or many at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from mpidist import tree
from mpidist.data.items.stream import Items
from mpidist.data.reading import element as elements


class NoElementError(ValueError):
    """There is no element that could show shapes and dtypes."""


class Source(Protocol):
    """Reads items.

    A program may write to the arrays that it gets, and the next pass must find the data unchanged. So a source that
    keeps its data (arrays, a cache) returns copies from `row` and `rows`, never views of the data.
    """

    @property
    def in_memory(self) -> bool:
        """Local. Whether reading is only a copy in memory."""
        ...

    def row(self, item: Any) -> Any:
        """Local. Read one element."""
        ...

    def rows(self, items: Items) -> Any:
        """Local. Read the elements of at least one item as one batch."""
        ...

    def each(self, items: Items) -> Iterable[Any]:
        """Local. Read the elements of the items one by one."""
        ...

    def sample(self) -> Any:
        """Local. An element, for its shapes and dtypes.

        Raises:
            NoElementError: There is no element.
        """
        ...


@runtime_checkable
class PieceSource(Protocol):
    """A source of batches that can read a piece of a batch without the rest of it."""

    def piece_reader(self, readers: int, reader: int) -> Callable[[Any], Any]:
        """Local. A function that reads one reader's piece of a batch that `readers` share evenly."""
        ...


class ArraySource:
    """Reads rows of a nested structure of arrays.

    Args:
        arrays: NumPy arrays, or objects with `shape`, `dtype` and `__getitem__` such as h5py datasets. The latter are
            read lazily: only the rows that are asked for.

    Raises:
        ValueError: The first dimensions differ, or there is no array.
    """

    def __init__(self, arrays: Any) -> None:
        self.count = elements.first_dimension(arrays)
        self.arrays = arrays
        self._leaves, self._spec = tree.flatten(arrays)
        self._is_numpy = all(isinstance(leaf, np.ndarray) for leaf in self._leaves)
        # A plain tuple of arrays, the usual case, is rebuilt faster by `tuple` than by optree.
        is_plain = type(arrays) is tuple and len(arrays) == len(self._leaves)
        is_plain = is_plain and all(one is leaf for one, leaf in zip(arrays, self._leaves, strict=True))
        self._rebuild: Callable[[list[Any]], Any] = tuple if is_plain else partial(tree.unflatten, self._spec)

    @property
    def in_memory(self) -> bool:
        """Local. Whether all arrays are NumPy arrays in memory; a memory map may read a file."""
        return all(isinstance(leaf, np.ndarray) and not isinstance(leaf, np.memmap) for leaf in self._leaves)

    def row(self, item: Any) -> Any:
        """Local. Read one row of each array."""
        return tree.unflatten(self._spec, [_read_row(leaf, item) for leaf in self._leaves])

    def rows(self, items: Items) -> Any:
        """Local. Read some rows, with one read per array."""
        indices = items if isinstance(items, np.ndarray) else np.asarray(items)
        first, last = indices.item(0), indices.item(-1)
        # Consecutive rows are read as a slice. The first comparison is cheap and rules out almost all shuffled batches.
        if last - first == len(indices) - 1 and bool((indices[1:] > indices[:-1]).all()):
            leaves = [_read_run(leaf, first, last + 1) for leaf in self._leaves]
        elif self._is_numpy:
            leaves = [leaf.take(indices, 0) for leaf in self._leaves]
        else:
            leaves = [_read_rows(leaf, indices) for leaf in self._leaves]
        return self._rebuild(leaves)

    def each(self, items: Items) -> Iterator[Any]:
        """Local. Rows one by one: one read per array, then views of it."""
        return elements.split(self.rows(items))

    def sample(self) -> Any:
        """Local. The first row; zeros where there are no rows."""
        if self.count == 0:
            leaves = [np.zeros(leaf.shape[1:], leaf.dtype)[()] for leaf in self._leaves]
            return tree.unflatten(self._spec, leaves)
        return self.row(0)


@dataclass(frozen=True)
class IndexableSource:
    """Reads elements of a foreign object that makes them one at a time: `items[number]`.

    Attributes:
        items: An object with `__getitem__` for the numbers from 0 on, and `__len__`.
    """

    items: Any

    @property
    def in_memory(self) -> bool:
        """Local. False: the cost of making an element is unknown."""
        return False

    def row(self, item: Any) -> Any:
        """Local. Ask the object for one element.

        Raises:
            RuntimeError: It raised StopIteration.
        """
        try:
            found = self.items[int(item)]
        except StopIteration as error:
            raise elements.stopped(f"{type(self.items).__name__}[{int(item)}]") from error
        return elements.convert_loaded(found)

    def rows(self, items: Items) -> Any:
        """Local. Ask for the elements and stack them."""
        return elements.stack([self.row(item) for item in items])

    def each(self, items: Items) -> Iterator[Any]:
        """Local. Ask for the elements one by one."""
        return map(self.row, items)

    def sample(self) -> Any:
        """Local. The first element."""
        if len(self.items) == 0:
            raise NoElementError(
                f"the source gives no element: expected at least one, got a {type(self.items).__name__} of length 0. "
                "Check the source"
            )
        return self.row(0)


@dataclass(frozen=True)
class RangeSource:
    """Computes the numbers `start + step * i`.

    Raises:
        ValueError: The dtype cannot hold all numbers.
    """

    numbers: range
    dtype: np.dtype[Any]

    def __post_init__(self) -> None:
        ends = (self.numbers[0], self.numbers[-1]) if self.numbers else ()
        # Both ends also in int64: numbers are computed in it.
        kinds: list[Any] = [np.iinfo(np.int64)]
        kinds += [(np.finfo if self.dtype.kind == "f" else np.iinfo)(self.dtype)] if self.dtype.kind in "fiu" else []
        if self.dtype.kind in "SUOMm" or not all(
            int(kind.min) <= end <= int(kind.max) for kind in kinds for end in ends
        ):
            raise ValueError(
                f"expected numbers that `output_type` can hold, got {self.numbers!r} and {self.dtype}. Choose a larger "
                "dtype of numbers, such as int64"
            )

    @property
    def in_memory(self) -> bool:
        """Local. True: nothing is read."""
        return True

    def row(self, item: Any) -> Any:
        """Local. One number, as a NumPy scalar."""
        return self.dtype.type(self.numbers[int(item)])

    def rows(self, items: Items) -> npt.NDArray[Any]:
        """Local. Some numbers, as a vector."""
        return (self.numbers.start + np.asarray(items) * self.numbers.step).astype(self.dtype)

    def each(self, items: Items) -> Iterator[Any]:
        """Local. Some numbers, as NumPy scalars."""
        return iter(self.rows(items))

    def sample(self) -> Any:
        """Local. A zero; an empty range has a dtype, too."""
        return self.dtype.type(0)


@dataclass(frozen=True)
class ElementSource:
    """Reads items that are elements already.

    Attributes:
        convert: A function that makes an element of an item.
        first: A function that returns a first item, for the shapes and dtypes of elements.
    """

    convert: Callable[[Any], Any]
    first: Callable[[], Any]

    @property
    def in_memory(self) -> bool:
        """Local. False: the iterable's cost of giving an element is unknown."""
        return False

    def row(self, item: Any) -> Any:
        """Local. Convert one item."""
        return self.convert(item)

    def rows(self, items: Items) -> Any:
        """Local. Convert and stack items."""
        return elements.stack([self.convert(item) for item in items])

    def each(self, items: Items) -> Iterator[Any]:
        """Local. Convert items one by one."""
        return (self.convert(item) for item in items)

    def sample(self) -> Any:
        """Local. Read and convert the first item."""
        return self.convert(self.first())


def _read_row(leaf: Any, item: Any) -> Any:
    row = _opened(leaf)[item]
    # A row of an array of objects may be anything.
    return row.copy() if isinstance(leaf, np.ndarray) and isinstance(row, (np.ndarray, np.generic)) else row


def _opened(leaf: Any) -> Any:
    """An array that can be read: h5py's error for a closed file has no name of the file, and no advice."""
    if not getattr(getattr(leaf, "id", None), "valid", True):
        raise ValueError(
            "the HDF5 file of a dataset was closed before its rows were read. Keep it open, or let the library open "
            "it: Dataset.from_files(path, mpidist.data.hdf5_reader(name))"
        )
    return leaf


def _read_run(leaf: Any, begin: int, end: int) -> Any:
    """Consecutive rows, in memory of their own."""
    return np.array(leaf[begin:end]) if isinstance(leaf, np.ndarray) else _opened(leaf)[begin:end]


def _read_rows(leaf: Any, indices: npt.NDArray[np.int64]) -> Any:
    """Some rows, at least one, in the order of the indices, in memory of their own."""
    if isinstance(leaf, np.ndarray):
        return leaf.take(indices, axis=0)
    # h5py accepts only increasing and distinct row numbers.
    increasing, positions = np.unique(indices, return_inverse=True)
    return _opened(leaf)[increasing][positions]
