"""Sources: where the items of a stream are read from, one or many at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from mpidist import tree
from mpidist.data.items.stream import Items
from mpidist.data.reading import element as elements


class Source(Protocol):
    """Reads items."""

    @property
    def in_memory(self) -> bool:
        """Local. Whether reading is no more than a copy in memory."""
        ...

    def row(self, item: Any) -> Any:
        """Local. One element."""
        ...

    def rows(self, items: Items) -> Any:
        """Local. The elements of the items, at least one, as one batch, which nobody else holds."""
        ...

    def each(self, items: Items) -> Iterable[Any]:
        """Local. The elements of the items, one by one."""
        ...

    def sample(self) -> Any:
        """Local. An element, for its shapes and dtypes.

        Raises:
            ValueError: There is none.
        """
        ...


class ArraySource:
    """Rows of a nested structure of arrays.

    Args:
        arrays: NumPy arrays, or what has `shape`, `dtype` and `__getitem__`, such as an h5py dataset: that is read
            only when, and as far as, rows are asked for.

    Raises:
        ValueError: The first dimensions differ, or there is no array.
    """

    def __init__(self, arrays: Any) -> None:
        self.count = elements.first_dimension(arrays)
        self.arrays = arrays
        self._leaves, self._spec = tree.flatten(arrays)
        self._is_numpy = all(isinstance(leaf, np.ndarray) for leaf in self._leaves)
        # The usual pair of arrays is put together again faster than any structure.
        is_plain = type(arrays) is tuple and len(arrays) == len(self._leaves)
        is_plain = is_plain and all(part is leaf for part, leaf in zip(arrays, self._leaves, strict=True))
        self._rebuild: Callable[[list[Any]], Any] = tuple if is_plain else partial(tree.unflatten, self._spec)

    @property
    def in_memory(self) -> bool:
        """Local. Whether all arrays are NumPy's and in memory."""
        return all(isinstance(leaf, np.ndarray) and not isinstance(leaf, np.memmap) for leaf in self._leaves)

    def row(self, item: Any) -> Any:
        """Local. One element: a copy, since what the user does to it must not reach the data."""
        return tree.unflatten(self._spec, [_read_row(leaf, item) for leaf in self._leaves])

    def rows(self, items: Items) -> Any:
        """Local. One read per array."""
        indices = items if isinstance(items, np.ndarray) else np.asarray(items)
        first, last = indices.item(0), indices.item(-1)
        # The cheap half of the test turns away nearly every shuffled batch.
        if last - first == len(indices) - 1 and bool((indices[1:] > indices[:-1]).all()):
            leaves = [_read_run(leaf, first, last + 1) for leaf in self._leaves]
        elif self._is_numpy:
            leaves = [leaf.take(indices, 0) for leaf in self._leaves]
        else:
            leaves = [_read_rows(leaf, indices) for leaf in self._leaves]
        return self._rebuild(leaves)

    def each(self, items: Items) -> Iterator[Any]:
        """Local. One read per array, then views of it."""
        return elements.split(self.rows(items))

    def sample(self) -> Any:
        """Local. The first element; zeros where there are no rows."""
        if self.count == 0:
            leaves = [np.zeros(leaf.shape[1:], leaf.dtype)[()] for leaf in self._leaves]
            return tree.unflatten(self._spec, leaves)
        return self.row(0)


@dataclass(frozen=True)
class IndexableSource:
    """What `items[number]` gives: elements that somebody else makes, one at a time.

    Attributes:
        items: Has `__getitem__` for the numbers from 0 on, and `__len__`.
    """

    items: Any

    @property
    def in_memory(self) -> bool:
        """Local. False: what the object does is unknown."""
        return False

    def row(self, item: Any) -> Any:
        """Local. One element."""
        return elements.convert_loaded(self.items[int(item)])

    def rows(self, items: Items) -> Any:
        """Local. Stacks elements."""
        return elements.stack([self.row(item) for item in items])

    def each(self, items: Items) -> Iterator[Any]:
        """Local. The elements, one by one."""
        return map(self.row, items)

    def sample(self) -> Any:
        """Local. The first element."""
        if len(self.items) == 0:
            raise ValueError("the source is empty and gives no element")
        return self.row(0)


@dataclass(frozen=True)
class RangeSource:
    """The numbers `start + step * i`, computed, not stored."""

    numbers: range
    dtype: np.dtype[Any]

    @property
    def in_memory(self) -> bool:
        """Local. True: cheaper than memory."""
        return True

    def row(self, item: Any) -> Any:
        """Local. A NumPy scalar."""
        return self.dtype.type(self.numbers[int(item)])

    def rows(self, items: Items) -> npt.NDArray[Any]:
        """Local. A vector."""
        return (self.numbers.start + np.asarray(items) * self.numbers.step).astype(self.dtype)

    def each(self, items: Items) -> Iterator[Any]:
        """Local. NumPy scalars."""
        return iter(self.rows(items))

    def sample(self) -> Any:
        """Local. A zero: an empty range has a dtype too."""
        return self.dtype.type(0)


@dataclass(frozen=True)
class ElementSource:
    """Items that are elements already.

    Attributes:
        convert: Makes one of what the iterable gave.
        first: Gives a first element, for its shapes and dtypes.
    """

    convert: Callable[[Any], Any]
    first: Callable[[], Any]

    @property
    def in_memory(self) -> bool:
        """Local. False: what an iterable does to give its next element is unknown."""
        return False

    def row(self, item: Any) -> Any:
        """Local. The item, with its leaves as arrays."""
        return self.convert(item)

    def rows(self, items: Items) -> Any:
        """Local. Stacks the items."""
        return elements.stack([self.convert(item) for item in items])

    def each(self, items: Items) -> Iterator[Any]:
        """Local. The items themselves."""
        return (self.convert(item) for item in items)

    def sample(self) -> Any:
        """Local. Reads the first element."""
        return self.convert(self.first())


def _read_row(leaf: Any, item: Any) -> Any:
    row = leaf[item]
    return row.copy() if isinstance(leaf, np.ndarray) else row


def _read_run(leaf: Any, begin: int, end: int) -> Any:
    """Rows that lie one behind another, in memory of their own."""
    return np.array(leaf[begin:end]) if isinstance(leaf, np.ndarray) else leaf[begin:end]


def _read_rows(leaf: Any, indices: npt.NDArray[np.int64]) -> Any:
    """Some rows, at least one, in the order asked for, in memory of their own."""
    if isinstance(leaf, np.ndarray):
        return leaf.take(indices, axis=0)
    # HDF5 wants increasing, distinct row numbers.
    increasing, places = np.unique(indices, return_inverse=True)
    return leaf[increasing][places]
