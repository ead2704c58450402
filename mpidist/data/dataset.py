"""`Dataset`: a deterministic, seekable pipeline over arrays, files or iterables, with tf.data's names."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from mpidist.data.dataset_base import BaseDataset, check_count, interleaved, pipeline_of
from mpidist.data.items.files import SHARD_HINT, HintedShard
from mpidist.data.items.shuffle import Shuffle, ShuffleSeed
from mpidist.data.items.stream import Repeat, Shard, Skip, Take
from mpidist.data.pipeline.caching import CachedSource, FirstPass, Kept
from mpidist.data.pipeline.filtered import Filter
from mpidist.data.pipeline.pipeline import Pipeline
from mpidist.data.pipeline.places import Concatenate, PlaceSource
from mpidist.data.pipeline.zipped import Zip, ZipSource
from mpidist.data.reading import element as elements
from mpidist.data.reading.padding import Padding
from mpidist.data.reading.readers import counter_of
from mpidist.data.reading.shared_memory import current_communicator, shared_source
from mpidist.data.reading.source import ArraySource, IndexableSource, RangeSource
from mpidist.data.reading.workers import Workers, automatic_count

AUTOTUNE = -1

# The number of elements that prefetch(AUTOTUNE) reads ahead.
_AUTOMATIC_PREFETCH = 2
# The length of the numbers in `enumerate`: longer than any dataset, yet the numbers fit into int64.
_MANY = 2**62


class Dataset(BaseDataset):
    """A pipeline of elements. Every transformation returns a new dataset.

    An element is an array, or a tuple or dictionary of elements. Over arrays (`from_tensor_slices`, `from_tensors`,
    `range`) the steps `shuffle`, `repeat`, `take`, `skip`, `shard` and `batch` move only row numbers. So a batch is one
    read per array, and a rank of a distributed dataset reads only its own rows. A function mapped before `batch` is
    called for the rank's own rows. A function mapped after `batch` is called with the whole global batch, as in
    tf.data, so every rank reads the whole batch.

    Iterating gives NumPy arrays. Each iteration starts from the beginning, in a new order where a shuffle asks for it.
    """

    def map(self, function: Callable[..., Any], num_parallel_calls: int | None = None) -> Dataset:
        """Local. Apply a function to each element.

        Args:
            function: Returns an element. It gets the components of a tuple as several arguments, and after `batch` a
                whole global batch. Its result must not depend on the number or the order of its calls: ranks call it
                for different elements, and a thread may call it ahead of the program.
            num_parallel_calls: Number of threads that call the function at the same time; AUTOTUNE chooses. Elements
                keep their order, and an error is raised in its place. The last number given before `batch` holds for
                all functions before `batch`, and likewise after it. Threads help where `function` lets other threads
                run: NumPy on large arrays, reading files.
        """
        if not callable(function):
            raise TypeError(f"map: expected a function, got {function!r}")
        return self._with(self._pipeline.map(function, _workers(num_parallel_calls)))

    def shuffle(
        self, buffer_size: int, seed: int | None = None, reshuffle_each_iteration: bool | None = True
    ) -> Dataset:
        """Local. Put the elements in random order, drawn from a buffer.

        Args:
            buffer_size: Number of elements (over arrays: of row numbers) in the buffer. A buffer that holds the whole
                dataset gives a uniform permutation.
            seed: The order depends on it and on the number of the iteration, never on the number of ranks. None draws
                a seed; a distributed dataset uses that of rank 0 on all ranks.
            reshuffle_each_iteration: Whether each iteration, and each repetition of `repeat`, has another order.
        """
        size = check_count("shuffle: `buffer_size`", buffer_size, 1)
        drawn = ShuffleSeed(None if seed is None else operator.index(seed))
        reshuffle = True if reshuffle_each_iteration is None else bool(reshuffle_each_iteration)
        return self._select(Shuffle(self._pipeline.stream, size, drawn, reshuffle))

    def batch(self, batch_size: int, drop_remainder: bool = False, num_parallel_calls: int | None = None) -> Dataset:
        """Local. Stack elements along a new first dimension.

        Args:
            batch_size: Number of elements in a batch; under a strategy the global batch size.
            drop_remainder: Leave out a last batch that is smaller.
            num_parallel_calls: Kept for code written for tf.data; it changes nothing.
        """
        del num_parallel_calls  # an argument of tf.data
        size = check_count("batch: `batch_size`", batch_size, 1)
        return self._with(self._pipeline.batch(size, bool(drop_remainder)))

    def repeat(self, count: int | None = None) -> Dataset:
        """Local. Repeat the dataset `count` times; None and -1 repeat it without end."""
        times = None if count is None or operator.index(count) < 0 else operator.index(count)
        return self._select(Repeat(self._pipeline.stream, times))

    def prefetch(self, buffer_size: int) -> Dataset:
        """Local. Read up to `buffer_size` elements ahead in a thread; AUTOTUNE chooses, 0 turns it off."""
        size = check_count("prefetch: `buffer_size`", buffer_size, AUTOTUNE)
        return self._with(replace(self._pipeline, prefetch=_AUTOMATIC_PREFETCH if size == AUTOTUNE else size))

    def take(self, count: int) -> Dataset:
        """Local. Keep the first `count` elements; -1 keeps all."""
        return self._select(Take(self._pipeline.stream, max(-1, operator.index(count))))

    def skip(self, count: int) -> Dataset:
        """Local. Leave out the first `count` elements; -1 leaves out all."""
        return self._select(Skip(self._pipeline.stream, max(-1, operator.index(count))))

    def shard(self, num_shards: int, index: int) -> Dataset:
        """Local. Keep every `num_shards`-th element, beginning with number `index`.

        `shard(SHARD_HINT, SHARD_HINT)` is a hint: the policy HINT puts the shard of the rank in its place, and other
        policies ignore it. Without a hint the policy HINT does what OFF does.
        """
        if num_shards == SHARD_HINT and index == SHARD_HINT:
            return self._select(HintedShard(self._pipeline.stream))
        shards = check_count("shard: `num_shards`", num_shards, 1)
        if not 0 <= operator.index(index) < shards:
            raise ValueError(f"shard: `index` must be one of 0 to {shards - 1}, got {index!r}")
        return self._select(Shard(self._pipeline.stream, shards, operator.index(index)))

    def padded_batch(
        self, batch_size: int, padded_shapes: Any = None, padding_values: Any = None, drop_remainder: bool = False
    ) -> Dataset:
        """Local. Stack elements that differ in size; each array is padded at its end.

        Args:
            batch_size: As for `batch`.
            padded_shapes: The shape of an element's array, or a structure of shapes like that of the element. A size of
                None or -1 means the largest size in the global batch. None means that for all sizes. A rank of a
                distributed dataset reads only its own rows where all sizes are given, else the whole batch.
            padding_values: One value, or one per array; None pads with zeros.
            drop_remainder: As for `batch`.
        """
        size = check_count("padded_batch: `batch_size`", batch_size, 1)
        padding = Padding(padded_shapes, padding_values)
        return self._with(self._pipeline.batch(size, bool(drop_remainder), padding))

    def unbatch(self) -> Dataset:
        """Local. Split batches into their rows.

        Raises:
            ValueError: The dataset is not known to have batches.
        """
        if not self._pipeline.is_batched:
            raise ValueError(
                "unbatch: expected a dataset with batches, made by `batch`, got one without. Use interleave to split "
                "elements into rows"
            )
        return self._with(self._pipeline.unbatch())

    def filter(self, predicate: Callable[..., Any]) -> Dataset:
        """Local. Keep the elements for which `predicate` is true. Their number is unknown; every rank reads all."""
        if not callable(predicate):
            raise TypeError(f"filter: expected a function, got {predicate!r}")
        pipeline = self._pipeline
        stream = Filter(pipeline, predicate)
        return self._with(replace(pipeline.in_whole(), stream=stream, is_loaded=pipeline.is_batched))

    def enumerate(self, start: int = 0) -> Dataset:
        """Local. Pair each element with its number: `(number, element)`, numbers as int64 from `start` on."""
        return self._with(Dataset.zip(Dataset.range(operator.index(start), _MANY), self).pipeline)

    def cache(self) -> Dataset:
        """Local. Keep elements in memory once they are read; each rank keeps those that it reads itself.

        Earlier steps happen once: a `shuffle` before `cache` keeps the order of its first pass.
        """
        pipeline = self._pipeline
        is_by_row = isinstance(pipeline.source, (ArraySource, RangeSource, IndexableSource))
        if is_by_row and not pipeline.is_batched:
            return self._with(
                Pipeline(CachedSource(pipeline), FirstPass(pipeline.stream), prefetch=pipeline.prefetch)
            )
        return self._with(replace(pipeline.in_whole(), stream=Kept(pipeline), is_loaded=pipeline.is_batched))

    @staticmethod
    def zip(*datasets: Any) -> Dataset:
        """Local. Tuples of the elements of several datasets; the dataset ends with the shortest of them.

        Args:
            datasets: Datasets, or one tuple of them. Either all of them have batches, or none.

        Raises:
            TypeError: An argument is not a dataset.
            ValueError: Some datasets have batches and some have not.
        """
        given = tuple(datasets[0]) if len(datasets) == 1 and isinstance(datasets[0], (tuple, list)) else datasets
        if not given or not all(isinstance(one, Dataset) for one in given):
            raise TypeError(f"zip: expected datasets, or one tuple of them, got {datasets!r}")
        pipelines = tuple(one.pipeline for one in given)
        are_batched = {pipeline.is_batched for pipeline in pipelines}
        if len(are_batched) > 1:
            raise ValueError(
                "zip: expected datasets that all have batches, or none of them, but some have and some have not. Call "
                "`batch` after zip"
            )
        merged = Pipeline(ZipSource(pipelines), Zip(pipelines), is_loaded=are_batched == {True})
        return Dataset(merged, given[0].options())

    def concatenate(self, dataset: Dataset) -> Dataset:
        """Local. Append the elements of another dataset.

        Raises:
            TypeError: `dataset` is not a `Dataset`.
            ValueError: One dataset has batches and the other has not.
        """
        if not isinstance(dataset, Dataset):
            raise TypeError(f"concatenate: expected a dataset, got {dataset!r}")
        first, second = self._pipeline, dataset.pipeline
        if first.is_batched != second.is_batched:
            raise ValueError(
                "concatenate: expected two datasets with batches, or two without, but one has batches and the other "
                "has not. Call `batch` after concatenate"
            )
        source = PlaceSource(lambda: first)
        return self._with(Pipeline(source, Concatenate((first, second)), is_loaded=first.is_batched))

    def interleave(
        self, map_func: Callable[..., Any], cycle_length: int = 1, block_length: int = 1
    ) -> Dataset:
        """Local. Make a dataset of each element, and give the examples of these datasets by turns.

        Over file names this step reads the files: under the policies AUTO and FILE rank r of n gets every n-th element,
        beginning with number r. Where the datasets are over arrays, a rank reads only its own rows of them.

        Args:
            map_func: Returns a dataset without batches, an array or a structure of arrays (whose rows are the
                examples), or an iterable. The cardinality is known for `mpidist.data.read_npy`, `hdf5_reader(...)`, and
                a function with a method `count_examples(element)`.
            cycle_length: Number of datasets that are open at a time; with 1 they follow one another.
            block_length: Number of examples that a dataset gives at its turn.
        """
        if not callable(map_func):
            raise TypeError(f"interleave: expected a function, got {map_func!r}")
        opened = partial(_opened_by, map_func)
        return self._with(interleaved(self._pipeline, opened, cycle_length, block_length, counter_of(map_func)))

    def shared(self) -> Dataset:
        """Collective. Keep one copy of the arrays per node, in memory that its ranks share.

        Every rank of the current strategy (outside any scope: of the job) calls it with the same arrays. Lazy arrays
        (HDF5, memory maps) are read, each row by one rank of a node, so no rank ever holds all rows. Arrays in memory
        are copied; a rank's own array is freed when the program drops it. Where memory cannot be shared, each rank
        keeps an array of its own, and rank 0 warns.

        Raises:
            ValueError: The dataset does not read arrays.
            MismatchError: The ranks' arrays differ in shape or dtype.
        """
        return self._with(replace(self._pipeline, source=shared_source(self._pipeline.source, current_communicator())))


def _workers(count: int | None) -> Workers | None:
    if count is None:
        return None
    number = check_count("map: `num_parallel_calls`", count, AUTOTUNE)
    if number == 0:
        raise ValueError("map: `num_parallel_calls` must be None, AUTOTUNE or at least 1, got 0")
    chosen = automatic_count() if number == AUTOTUNE else number
    return Workers(chosen) if chosen > 1 else None


def _opened_by(map_func: Callable[..., Any], element: Any) -> Pipeline:
    opened = pipeline_of(elements.plain_call(map_func, element))
    if opened.is_batched:
        raise ValueError(
            "interleave: expected the function to return a dataset of examples, got one with batches. Call `unbatch` "
            "in the function, and `batch` after interleave"
        )
    return opened
