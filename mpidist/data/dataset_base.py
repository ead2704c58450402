"""What a dataset begins with and how it is read: sources, options, iteration."""

from __future__ import annotations

import copy
import operator
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from mpidist import tree
from mpidist.data.items.shuffle import Shuffle, ShuffleSeed
from mpidist.data.items.stream import INFINITE, Elements, Rows, Stream
from mpidist.data.options import Options
from mpidist.data.pipeline.files import file_rows, resolve
from mpidist.data.pipeline.iterator import DatasetIterator
from mpidist.data.pipeline.pipeline import Pipeline
from mpidist.data.pipeline.places import Interleave, PlaceSource
from mpidist.data.reading import element as elements
from mpidist.data.reading.readers import counter_of
from mpidist.data.reading.source import ArraySource, ElementSource, IndexableSource, RangeSource

D = TypeVar("D", bound="BaseDataset")
# Of a list of files that is shuffled without a seed.
_SEED_OF_FILES = 0
FileNames: TypeAlias = "str | os.PathLike[str] | Iterable[str | os.PathLike[str]]"


class BaseDataset:
    """A pipeline and options; `Dataset` adds the transformations."""

    def __init__(self, pipeline: Pipeline, options: Options) -> None:
        self._pipeline = pipeline
        self._options = options
        self._iterations = 0

    @classmethod
    def from_tensor_slices(cls: type[D], tensors: Any) -> D:
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
        return cls._of(source, Rows(source.count))

    @classmethod
    def from_tensors(cls: type[D], tensors: Any) -> D:
        """Local. A dataset of one element: `tensors` whole."""
        whole = tree.map_leaves(lambda leaf: np.asarray(leaf)[np.newaxis], elements.convert(tensors))
        return cls._of(ArraySource(whole), Rows(1))

    @classmethod
    def range(cls: type[D], *args: int, output_type: npt.DTypeLike = np.int64) -> D:
        """Local. Numbers, with the arguments of Python's `range`.

        Returns:
            Elements are NumPy scalars of `output_type`.
        """
        numbers = range(*args)
        return cls._of(RangeSource(numbers, np.dtype(output_type)), Rows(len(numbers)))

    @classmethod
    def from_iterable(
        cls: type[D], iterable: Iterable[Any] | Callable[[], Iterable[Any]], *, batched: bool = False
    ) -> D:
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
        return cls(Pipeline(source, Elements(opened), is_loaded=batched), Options())

    @classmethod
    def from_indexable(cls: type[D], items: Any) -> D:
        """Local. A dataset of `items[0]` to `items[len(items) - 1]`, each made only where it is needed.

        For a PyTorch `Dataset`, a Grain `MapDataset`, or any sequence: it is shuffled and shared out by number, and a
        rank calls for its own elements only.

        Raises:
            TypeError: `items` has no length, or cannot be indexed.
        """
        if not (hasattr(items, "__getitem__") and hasattr(items, "__len__")):
            raise TypeError(
                f"from_indexable: expected an object with __len__ and __getitem__, got {items!r}. What can only be "
                "iterated is for from_iterable"
            )
        return cls._of(IndexableSource(items), Rows(len(items)))

    @classmethod
    def list_files(
        cls: type[D], file_pattern: FileNames, shuffle: bool | None = None, seed: int | None = None
    ) -> D:
        """Local. A dataset of file names.

        Args:
            file_pattern: A name, a pattern (with *, ?, [ and, over folders, **), or a list of them. The matches of a
                pattern are sorted; a list keeps its order.
            shuffle: None and True: in random order, another one in each pass. False: in the order of `file_pattern`.
            seed: Of the shuffle. None is 0, not a seed that is drawn: all ranks have the same order, also where each
                takes a `shard` of the list by itself; and it is the same in every run.

        Raises:
            FileNotFoundError: Nothing matches.
        """
        names = resolve(file_pattern)
        stream = file_rows(names)
        if shuffle is None or shuffle:
            drawn = ShuffleSeed(_SEED_OF_FILES if seed is None else operator.index(seed))
            return cls._of(ArraySource(np.array(names)), Shuffle(stream, len(names), drawn, True))
        return cls._of(ArraySource(np.array(names)), stream)

    @classmethod
    def from_files(
        cls: type[D],
        files: FileNames,
        reader: Callable[[str], Any],
        *,
        cycle_length: int = 1,
        block_length: int = 1,
    ) -> D:
        """Local. The examples of files, one file behind another, in the order of `files`.

        Under the policies AUTO and FILE a rank reads the files number i with i mod n = its rank.

        Args:
            files: As for `list_files`.
            reader: Called with a name; gives a dataset, an array or a tuple or dictionary of arrays (its rows are the
                examples), or an iterable of examples. `mpidist.data.read_npy`, `read_npz` and `hdf5_reader(...)` are
                such readers. The number of examples is known, and ranks exchange nothing while they iterate, with
                `read_npy`, `hdf5_reader(...)`, and a reader with a method `count_examples(name)`: that is asked when
                the dataset is distributed, once for each file that the rank reads.
            cycle_length: How many files are open at a time.
            block_length: How many examples one of them gives at its turn.
        """
        names = cls.list_files(files, shuffle=False)
        opened = partial(_opened, reader)
        return names._with(interleaved(names.pipeline, opened, cycle_length, block_length, counter_of(reader)))

    def with_options(self: D, options: Options) -> D:
        """Local. The dataset with other options; later changes to `options` do not reach it."""
        if not isinstance(options, Options):
            raise TypeError(f"with_options: expected mpidist.data.Options, got {options!r}")
        return type(self)(self._pipeline, copy.deepcopy(options))

    def options(self) -> Options:
        """Local. A copy of its options."""
        return copy.deepcopy(self._options)

    def cardinality(self) -> int:
        """Local. The number of elements, or `INFINITE` (-1), or `UNKNOWN` (-2)."""
        return self._pipeline.stream.cardinality()

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

    def _with(self: D, pipeline: Pipeline) -> D:
        return type(self)(pipeline, self._options)

    def _select(self: D, stream: Stream) -> D:
        return self._with(replace(self._pipeline, stream=stream))

    @classmethod
    def _of(cls: type[D], source: ArraySource | RangeSource | IndexableSource, stream: Stream) -> D:
        return cls(Pipeline(source, stream), Options())


def interleaved(
    pipeline: Pipeline,
    opened: Callable[[Any], Pipeline],
    cycle_length: int,
    block_length: int,
    count: Callable[[Any], int] | None = None,
) -> Pipeline:
    """Local. The examples of pipelines that `opened` makes of the elements of `pipeline`."""
    cycle = check_count("interleave: `cycle_length`", cycle_length, 1)
    stream = Interleave(pipeline, opened, cycle, check_count("interleave: `block_length`", block_length, 1), count)
    return Pipeline(PlaceSource(stream.first), stream)


def pipeline_of(value: Any) -> Pipeline:
    """Local. The pipeline of a dataset, of arrays by their rows, or of an iterable that is read once."""
    if isinstance(value, BaseDataset):
        return value.pipeline
    if elements.is_array(value) or isinstance(value, (tuple, dict)):
        return BaseDataset.from_tensor_slices(value).pipeline
    if isinstance(value, Iterator):
        return BaseDataset.from_iterable(lambda: value).pipeline
    return BaseDataset.from_iterable(value).pipeline


def check_count(subject: str, value: int, least: int) -> int:
    """Local. The value as an int.

    Raises:
        TypeError: It is none.
        ValueError: It is less than `least`.
    """
    try:
        count = operator.index(value)
    except TypeError:
        raise TypeError(f"{subject} must be an int, got {value!r} of type {type(value).__name__}") from None
    if count < least:
        raise ValueError(f"{subject} must be at least {least}, got {value!r}")
    return count


def _opened(reader: Callable[[str], Any], name: Any) -> Pipeline:
    return pipeline_of(reader(str(name)))


def _first(opened: Callable[[], Iterable[Any]]) -> Any:
    for element in opened():
        return element
    raise ValueError("the iterable gives no element")
