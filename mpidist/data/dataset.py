"""`Dataset`: a deterministic, seekable pipeline over arrays or iterables, with tf.data's names."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from mpidist import tree
from mpidist.data import element as elements
from mpidist.data.iterator import DatasetIterator
from mpidist.data.options import Options
from mpidist.data.pipeline import Pipeline
from mpidist.data.shuffle import Shuffle, ShuffleSeed
from mpidist.data.source import ArraySource, ElementSource, RangeSource
from mpidist.data.stream import INFINITE, Elements, Repeat, Rows, Shard, Skip, Stream, Take

AUTOTUNE = -1

# What AUTOTUNE stands for.
_AUTOMATIC_PREFETCH = 2


class Dataset:
    """A pipeline of elements; every transformation gives a new dataset.

    An element is an array, or a tuple or dictionary of elements. Over arrays (`from_tensor_slices`, `from_tensors`,
    `range`) `shuffle`, `repeat`, `take`, `skip`, `shard` and `batch` move row numbers only: a batch is one read per
    array, and a rank of a distributed dataset reads its own rows only. A function mapped before `batch` is called for
    the rank's own rows; one mapped after `batch` sees the whole global batch, as in tf.data, so every rank reads that.

    Iterating gives NumPy arrays, and starts from the beginning each time, in a new order where a shuffle says so.
    """

    def __init__(self, pipeline: Pipeline, options: Options) -> None:
        self._pipeline = pipeline
        self._options = options
        self._iterations = 0

    @staticmethod
    def from_tensor_slices(tensors: Any) -> Dataset:
        """Local. A dataset of the rows of arrays.

        Args:
            tensors: An array, or tuples and dictionaries of arrays with the same first dimension. What has `shape`,
                `dtype` and `__getitem__` (an h5py dataset) is read lazily; lists become arrays, with tf.data's dtypes.

        Returns:
            One element per row.

        Raises:
            ValueError: The first dimensions differ, or an array has no dimension.
        """
        arrays = elements.convert(tensors)
        try:
            source = ArraySource(arrays)
        except ValueError as error:
            raise ValueError(f"from_tensor_slices: {error}") from None
        return _dataset(source, Rows(source.count))

    @staticmethod
    def from_tensors(tensors: Any) -> Dataset:
        """Local. A dataset of one element: `tensors` whole."""
        whole = tree.map_leaves(lambda leaf: np.asarray(leaf)[np.newaxis], elements.convert(tensors))
        return _dataset(ArraySource(whole), Rows(1))

    @staticmethod
    def range(*args: int, output_type: npt.DTypeLike = np.int64) -> Dataset:
        """Local. Numbers, with the arguments of Python's `range`.

        Returns:
            Elements are NumPy scalars of `output_type`.
        """
        numbers = range(*args)
        return _dataset(RangeSource(numbers, np.dtype(output_type)), Rows(len(numbers)))

    @staticmethod
    def from_iterable(iterable: Iterable[Any] | Callable[[], Iterable[Any]], *, batched: bool = False) -> Dataset:
        """Local. A dataset of unknown length of what an iterable gives.

        Such a dataset seeks by reading and dropping, and every rank reads all of it; a function mapped over it is
        called for the rank's own examples only.

        Args:
            iterable: Can be iterated again and again (a PyTorch `DataLoader`, a list); or a function that gives an
                iterable each time, such as a generator function. Every rank's must give the same elements in the same
                order.
            batched: Each element is a global batch already.

        Raises:
            TypeError: Neither, or an iterator, which can be read only once.
        """
        if not isinstance(iterable, Iterable):
            if not callable(iterable):
                raise TypeError(f"from_iterable: expected an iterable or a function that gives one, got {iterable!r}")
            opened = iterable
        elif isinstance(iterable, Iterator):
            raise TypeError(
                f"from_iterable: {iterable!r} is an iterator and can be read only once, but a dataset is read anew in "
                "every epoch. Pass the function that makes it, without calling it"
            )
        else:
            opened = partial(iter, iterable)
        source = ElementSource(elements.convert_loaded, partial(_first, opened))
        return Dataset(Pipeline(source, Elements(opened), is_loaded=batched), Options())

    def map(self, function: Callable[..., Any], num_parallel_calls: int | None = None) -> Dataset:
        """Local. `function` of each element.

        Args:
            function: Gets the parts of a tuple as several arguments; gives an element. It may not depend on how often
                or in which order it is called. After `batch` it is called with the global batch.
            num_parallel_calls: Kept for code written for tf.data.
        """
        if not callable(function):
            raise TypeError(f"map: expected a function, got {function!r}")
        return self._with(self._pipeline.map(function))

    def shuffle(
        self, buffer_size: int, seed: int | None = None, reshuffle_each_iteration: bool | None = True
    ) -> Dataset:
        """Local. Elements in random order, drawn from a buffer.

        Args:
            buffer_size: As many elements (over arrays: row numbers) are held; at least the number of elements gives a
                uniform permutation.
            seed: The order depends on it and on the number of the iteration, never on the number of ranks. None draws
                one; a distributed dataset uses that of rank 0 on all ranks.
            reshuffle_each_iteration: Another order each time the dataset is iterated, and in each `repeat`.
        """
        size = _check_count("shuffle: `buffer_size`", buffer_size, 1)
        drawn = ShuffleSeed(None if seed is None else operator.index(seed))
        reshuffle = True if reshuffle_each_iteration is None else bool(reshuffle_each_iteration)
        return self._select(Shuffle(self._pipeline.stream, size, drawn, reshuffle))

    def batch(self, batch_size: int, drop_remainder: bool = False, num_parallel_calls: int | None = None) -> Dataset:
        """Local. Elements stacked along a new first dimension.

        Args:
            batch_size: How many; under a strategy the global batch size.
            drop_remainder: Leave out a last batch that is smaller.
            num_parallel_calls: Kept for code written for tf.data.
        """
        size = _check_count("batch: `batch_size`", batch_size, 1)
        return self._with(self._pipeline.batch(size, bool(drop_remainder)))

    def repeat(self, count: int | None = None) -> Dataset:
        """Local. The dataset `count` times; None or -1 never ends."""
        times = None if count is None or operator.index(count) < 0 else operator.index(count)
        return self._select(Repeat(self._pipeline.stream, times))

    def prefetch(self, buffer_size: int) -> Dataset:
        """Local. Elements are read ahead in a thread, so many at most; AUTOTUNE chooses, 0 turns it off."""
        size = _check_count("prefetch: `buffer_size`", buffer_size, AUTOTUNE)
        return self._with(replace(self._pipeline, prefetch=_AUTOMATIC_PREFETCH if size == AUTOTUNE else size))

    def take(self, count: int) -> Dataset:
        """Local. The first `count` elements; -1 takes all."""
        return self._select(Take(self._pipeline.stream, max(-1, operator.index(count))))

    def skip(self, count: int) -> Dataset:
        """Local. All but the first `count` elements; -1 skips all."""
        return self._select(Skip(self._pipeline.stream, max(-1, operator.index(count))))

    def shard(self, num_shards: int, index: int) -> Dataset:
        """Local. The elements whose number i has i mod `num_shards` = `index`."""
        shards = _check_count("shard: `num_shards`", num_shards, 1)
        if not 0 <= operator.index(index) < shards:
            raise ValueError(f"shard: `index` must be one of 0 to {shards - 1}, got {index!r}")
        return self._select(Shard(self._pipeline.stream, shards, operator.index(index)))

    def with_options(self, options: Options) -> Dataset:
        """Local. The dataset with other options; later changes to `options` do not reach it."""
        if not isinstance(options, Options):
            raise TypeError(f"with_options: expected mpidist.data.Options, got {options!r}")
        return Dataset(self._pipeline, copy.deepcopy(options))

    def options(self) -> Options:
        """Local. A copy of its options."""
        return copy.deepcopy(self._options)

    def cardinality(self) -> int:
        """Local. The number of elements, or `INFINITE` (-1), or `UNKNOWN` (-2)."""
        return self._pipeline.stream.cardinality

    @property
    def pipeline(self) -> Pipeline:
        """Local. What the dataset does, for those who read parts of it."""
        return self._pipeline

    @property
    def element_spec(self) -> Any:
        """Local. The structure of an element with an `ArraySpec` for each array.

        Reads the first example, and calls what is mapped over it.

        Raises:
            ValueError: There is no example.
        """
        return self._pipeline.spec(is_whole=True)

    def as_numpy_iterator(self) -> DatasetIterator:
        """Local. The same as `iter`: elements are NumPy's."""
        return iter(self)

    def __iter__(self) -> DatasetIterator:
        """Local. A pass from the beginning."""
        number = self._iterations
        self._iterations += 1
        return DatasetIterator(self._pipeline, number, self._set_iterations)

    def __bool__(self) -> bool:
        return True

    def __len__(self) -> int:
        count = self.cardinality()
        if count < 0:
            kind = "infinite" if count == INFINITE else "unknown"
            raise TypeError(f"the dataset length is {kind}; cardinality() tells without raising")
        return count

    def __repr__(self) -> str:
        return f"<mpidist.data.Dataset cardinality={self.cardinality()}>"

    def _set_iterations(self, count: int) -> None:
        self._iterations = count

    def _with(self, pipeline: Pipeline) -> Dataset:
        return Dataset(pipeline, self._options)

    def _select(self, stream: Stream) -> Dataset:
        return self._with(replace(self._pipeline, stream=stream))


def _dataset(source: ArraySource | RangeSource, stream: Stream) -> Dataset:
    return Dataset(Pipeline(source, stream), Options())


def _first(opened: Callable[[], Iterable[Any]]) -> Any:
    for element in opened():
        return element
    raise ValueError("the iterable gives no element")


def _check_count(subject: str, value: int, least: int) -> int:
    try:
        count = operator.index(value)
    except TypeError:
        raise TypeError(f"{subject} must be an int, got {value!r} of type {type(value).__name__}") from None
    if count < least:
        raise ValueError(f"{subject} must be at least {least}, got {value!r}")
    return count
