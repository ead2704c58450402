"""The beginning and the end of a dataset: its sources, its options, and iteration."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from mpidist import tree
from mpidist.arguments import described, flag, named, whole
from mpidist.attributes import FixedAttributes
from mpidist.data.items.files import file_rows
from mpidist.data.items.shuffle import Shuffle, ShuffleSeed
from mpidist.data.items.stream import INFINITE, Elements, RowNumbers, Stream
from mpidist.data.options import Options
from mpidist.data.pipeline.iterator import DatasetIterator
from mpidist.data.pipeline.pipeline import Pipeline
from mpidist.data.pipeline.places import Interleave, PlaceSource
from mpidist.data.reading import element as elements
from mpidist.data.reading.file_names import resolve_file_names
from mpidist.data.reading.readers import counter_of
from mpidist.data.reading.source import ArraySource, ElementSource, IndexableSource, NoElementError, RangeSource

D = TypeVar("D", bound="BaseDataset")
# The seed of `list_files` where the user gives none. Not a drawn seed: each rank would draw another one, and ranks that
# take shards of differently shuffled lists would read some files twice and others never.
_SEED_OF_FILES = 0
FileNames: TypeAlias = "str | os.PathLike[str] | Iterable[str | os.PathLike[str]]"


class BaseDataset(FixedAttributes):
    """A pipeline and options; `Dataset` adds the transformations."""

    _is_settled = True

    def __init__(self, pipeline: Pipeline, options: Options) -> None:
        self._pipeline = pipeline
        self._options = options
        self._iterations = 0

    @classmethod
    def from_tensor_slices(cls: type[D], tensors: Any) -> D:
        """Local. A dataset of the rows of arrays.

        Args:
            tensors: An array, or tuples and dictionaries of arrays with the same first dimension. Objects with `shape`,
                `dtype` and `__getitem__`, such as h5py datasets, are read lazily. Lists become arrays with the dtypes
                of tf.data.

        Returns:
            One element per row.

        Raises:
            ValueError: The first dimensions differ, or an array has no dimension.
        """
        with named("from_tensor_slices"):
            source = ArraySource(elements.convert(tensors))
        return cls._of(source, RowNumbers(source.count))

    @classmethod
    def from_tensors(cls: type[D], tensors: Any) -> D:
        """Local. A dataset of one element, which is the whole of `tensors`."""
        with named("from_tensors"):
            rows = tree.map_leaves(lambda leaf: np.asarray(leaf)[np.newaxis], elements.convert(tensors))
            return cls._of(ArraySource(rows), RowNumbers(1))

    @classmethod
    def range(cls: type[D], *args: int, output_type: npt.DTypeLike = np.int64) -> D:
        """Local. A dataset of numbers, with the arguments of Python's `range`.

        Returns:
            A dataset whose elements are NumPy scalars of `output_type`.

        Raises:
            TypeError: An argument is not an integer, or `output_type` is no dtype.
            ValueError: `output_type` cannot hold all numbers.
        """
        with named("range"):
            source = RangeSource(range(*args), np.dtype(output_type))
        return cls._of(source, RowNumbers(len(source.numbers)))

    @classmethod
    def from_iterable(
        cls: type[D], iterable: Iterable[Any] | Callable[[], Iterable[Any]], *, batched: bool | None = None
    ) -> D:
        """Local. A dataset of the elements of an iterable; its length is unknown.

        To seek, such a dataset reads elements and drops them, and every rank reads all elements. A function mapped over
        it is called for the rank's own examples only.

        Args:
            iterable: An object that can be iterated many times (a PyTorch `DataLoader`, a list), or a function that
                returns an iterable each time (a generator function). It must give the same elements in the same order
                on every rank.
            batched: Whether each element is a global batch already. None: `experimental_distribute_dataset` takes
                elements for global batches, as TF does, where their arrays all have the same first dimension.

        Raises:
            TypeError: `iterable` has another type, or is an iterator, which can be read only once.
        """
        is_assumed = batched is None
        is_loaded = not is_assumed and flag("batched", batched, owner="from_iterable: ")
        if isinstance(iterable, BaseDataset):
            # Not by iterating: its order would depend on how often it was begun, on each rank and after a resume.
            pipeline = replace(iterable.pipeline.in_whole(), is_loaded=is_loaded, is_assumed=is_assumed)
            return cls(pipeline, iterable.options())
        if not isinstance(iterable, Iterable):
            if not callable(iterable):
                raise TypeError(
                    "from_iterable: expected an iterable, or a function that returns one, got "
                    f"{described(iterable)}"
                )
            opened = partial(_called, iterable)
        elif isinstance(iterable, Iterator):
            raise TypeError(
                "from_iterable: expected an iterable that can be read in every epoch, got an iterator, which can be "
                f"read only once: {described(iterable)}. Pass the function that makes it, without calling it"
            )
        else:
            opened = partial(iter, iterable)
        source = ElementSource(elements.convert_loaded, partial(_first, opened))
        return cls(Pipeline(source, Elements(opened), is_loaded=is_loaded, is_assumed=is_assumed), Options())

    @classmethod
    def from_indexable(cls: type[D], items: Any) -> D:
        """Local. A dataset of `items[0]` to `items[len(items) - 1]`, each indexed only where it is needed.

        For a PyTorch `Dataset`, a Grain `MapDataset`, or any sequence. Ranks shuffle and share the numbers of elements,
        so a rank asks for its own elements only.

        Raises:
            TypeError: `items` has no length, or cannot be indexed.
        """
        if not (hasattr(items, "__getitem__") and hasattr(items, "__len__")):
            raise TypeError(
                f"from_indexable: expected an object with __len__ and __getitem__, got {described(items)}. Use "
                "from_iterable for an object that can only be iterated"
            )
        return cls._of(IndexableSource(items), RowNumbers(len(items)))

    @classmethod
    def list_files(
        cls: type[D], file_pattern: FileNames, shuffle: bool | None = None, seed: int | None = None
    ) -> D:
        """Local. A dataset of file names.

        Args:
            file_pattern: A name, a pattern (with *, ?, [, and ** over folders), or a list of them. The matches of a
                pattern are sorted; a list keeps its order.
            shuffle: None and True give a random order, another one in each pass. False keeps the order of
                `file_pattern`.
            seed: Seed of the shuffle. None means 0, not a drawn seed: then all ranks and all runs have the same order,
                even where each rank takes a `shard` of the list itself.

        Raises:
            FileNotFoundError: No file matches.
            TypeError: `file_pattern` is no name and no list of names.
        """
        names = resolve_file_names(file_pattern)
        stream = file_rows(names)
        if shuffle is None or shuffle:
            drawn = ShuffleSeed(_SEED_OF_FILES if seed is None else check_count("list_files: `seed`", seed))
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
        """Local. A dataset of the examples of files, one file after another, in the order of `files`.

        Under the policies AUTO and FILE rank r of n reads every n-th file, beginning with number r.

        Args:
            files: See `list_files`.
            reader: A function of a name that returns a dataset, an array or a tuple or dictionary of arrays (whose rows
                are the examples), or an iterable of examples. Ready readers are `mpidist.data.read_npy`, `read_npz` and
                `hdf5_reader(...)`. If the reader has a method `count_examples(name)`, the number of examples is known,
                and ranks exchange nothing while they iterate; `read_npy` and `hdf5_reader(...)` can count, too. The
                method is called when the dataset is distributed, once for each file that the rank reads.
            cycle_length: Number of files that are open at a time.
            block_length: Number of examples that are read from a file in its turn.

        Raises:
            TypeError: `reader` is not a function, or another argument has a wrong type.
            ValueError: A number is less than 1.
            FileNotFoundError: See `list_files`.
        """
        if not callable(reader):
            raise TypeError(f"from_files: expected a reader, a function of a file name, got {described(reader)}")
        names = cls.list_files(files, shuffle=False)
        opened = partial(_opened, reader)
        pipeline = interleaved(names.pipeline, opened, cycle_length, block_length, counter_of(reader))
        return cls(pipeline, Options())

    def with_options(self: D, options: Options) -> D:
        """Local. The dataset with the options that are set in `options`; the dataset's other options stay.

        It keeps a copy: later changes to `options` do not change it.

        Raises:
            TypeError: `options` are not `mpidist.data.Options`.
        """
        try:
            return type(self)(self._pipeline, self._options.merge(options))
        except TypeError as error:
            raise TypeError(f"with_options: {error}") from None

    def options(self) -> Options:
        """Local. A copy of the options, which cannot be changed; `with_options` gives a dataset other ones."""
        return self._options.of_a_dataset()

    def cardinality(self) -> int:
        """Local. The number of elements, `INFINITE` (-1) or `UNKNOWN` (-2). The first call may count files."""
        return self._pipeline.stream.cardinality()

    def _way_out(self, _: str) -> str:
        return "a method gives a changed dataset, `dataset = dataset.batch(32)`, and `with_options` one with options"

    @property
    def pipeline(self) -> Pipeline:
        """Local. The steps of the dataset, for code that shares it between ranks."""
        return self._pipeline

    @property
    def element_spec(self) -> Any:
        """Local. The structure of an element with an `ArraySpec` for each array.

        It reads the first example, and calls the functions mapped over it, though it is a property, as in tf.data.

        Raises:
            ValueError: There is no example.
        """
        return self._pipeline.spec(is_whole=True)

    def as_numpy_iterator(self) -> DatasetIterator:
        """Local. `iter(self)`, whose elements are NumPy arrays already."""
        return iter(self)

    def __iter__(self) -> DatasetIterator:
        """Local. Begin a pass."""
        number = self._iterations
        self._iterations += 1
        return DatasetIterator(self._pipeline, number, self._set_iterations)

    def __bool__(self) -> bool:
        # Without this `if dataset:` would call `__len__`, which raises where the length is unknown.
        return True

    def __len__(self) -> int:
        count = self.cardinality()
        if count < 0:
            kind = "infinite" if count == INFINITE else "unknown"
            raise TypeError(f"the dataset length is {kind}. Call cardinality(), which says so without an error")
        return count

    def __repr__(self) -> str:
        return f"<mpidist.data.Dataset cardinality={self.cardinality()}>"

    def _set_iterations(self, count: int) -> None:
        self._iterations = count

    def with_pipeline(self: D, pipeline: Pipeline) -> D:
        """Local. A dataset with another pipeline and the same options."""
        return type(self)(pipeline, self._options)

    def _select(self: D, stream: Stream) -> D:
        return self.with_pipeline(replace(self._pipeline, stream=stream))

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
    """Local. A pipeline of the examples of many pipelines, which `opened` makes from the elements of `pipeline`."""
    cycle = check_count("interleave: `cycle_length`", cycle_length, 1)
    stream = Interleave(pipeline, opened, cycle, check_count("interleave: `block_length`", block_length, 1), count)
    return Pipeline(PlaceSource(stream.pipelines), stream)


def pipeline_of(value: Any) -> Pipeline:
    """Local. The pipeline of a dataset, of the rows of arrays, or of an iterable that is read once."""
    if isinstance(value, BaseDataset):
        return value.pipeline
    if elements.is_array(value) or isinstance(value, (tuple, dict)):
        return BaseDataset.from_tensor_slices(value).pipeline
    if isinstance(value, Iterator):
        return BaseDataset.from_iterable(lambda: value).pipeline
    if not isinstance(value, Iterable):
        raise TypeError(
            "the function of interleave, or the reader of from_files: expected it to return a dataset, an array, a "
            f"structure of arrays or an iterable of examples, got {described(value)}"
        )
    return BaseDataset.from_iterable(value).pipeline


def check_count(subject: str, value: int, least: int | None = None) -> int:
    """Local. The value as an int; `subject` is the beginning of the error: "batch: `batch_size`".

    Raises:
        TypeError: The value is not an integer.
        ValueError: It is less than `least`.
    """
    method, _, argument = subject.partition(": ")
    return whole(argument.strip("`"), value, least=least, owner=f"{method}: ")


def _opened(reader: Callable[[str], Any], name: Any) -> Pipeline:
    return pipeline_of(elements.plain_call(reader, str(name)))


def _called(function: Callable[[], Iterable[Any]]) -> Iterator[Any]:
    made = function()
    if not isinstance(made, Iterable) or isinstance(made, BaseDataset):
        raise TypeError(
            "from_iterable: expected the function to return an iterable that is not a dataset, got "
            f"{described(made)}. A dataset is given as it is, without a function"
        )
    return iter(made)


def _first(opened: Callable[[], Iterable[Any]]) -> Any:
    for element in opened():
        return element
    raise NoElementError(
        "from_iterable: expected an iterable with at least one element, got no element. Check the source"
    )
