"""`Dataset`: a deterministic, seekable pipeline over arrays, files or iterables, with tf.data's names."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from mpidist.data.dataset_base import BaseDataset, check_count, interleaved, pipeline_of
from mpidist.data.items.shuffle import Shuffle, ShuffleSeed
from mpidist.data.items.stream import Repeat, Shard, Skip, Take
from mpidist.data.pipeline.caching import CachedSource, Filter, FirstPass, Kept
from mpidist.data.pipeline.files import SHARD_HINT, HintedShard
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

# What AUTOTUNE stands for.
_AUTOMATIC_PREFETCH = 2
# More elements than anybody enumerates.
_MANY = 2**62


class Dataset(BaseDataset):
    """A pipeline of elements; every transformation gives a new dataset.

    An element is an array, or a tuple or dictionary of elements. Over arrays (`from_tensor_slices`, `from_tensors`,
    `range`) `shuffle`, `repeat`, `take`, `skip`, `shard` and `batch` move row numbers only: a batch is one read per
    array, and a rank of a distributed dataset reads its own rows only. A function mapped before `batch` is called for
    the rank's own rows; one mapped after `batch` sees the whole global batch, as in tf.data, so every rank reads that.

    Iterating gives NumPy arrays, and starts from the beginning each time, in a new order where a shuffle says so.
    """

    def map(self, function: Callable[..., Any], num_parallel_calls: int | None = None) -> Dataset:
        """Local. `function` of each element.

        Args:
            function: Gets the parts of a tuple as several arguments; gives an element. It may not depend on how often
                or in which order it is called. After `batch` it is called with the global batch.
            num_parallel_calls: So many threads call it side by side; elements keep their order, and an error comes
                where it happened. AUTOTUNE chooses. The last such number before (after) `batch` holds for all that
                is mapped there. Worth while where `function` lets other threads run: NumPy on large arrays, files.
        """
        if not callable(function):
            raise TypeError(f"map: expected a function, got {function!r}")
        return self._with(self._pipeline.map(function, _workers(num_parallel_calls)))

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
        size = check_count("shuffle: `buffer_size`", buffer_size, 1)
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
        size = check_count("batch: `batch_size`", batch_size, 1)
        return self._with(self._pipeline.batch(size, bool(drop_remainder)))

    def repeat(self, count: int | None = None) -> Dataset:
        """Local. The dataset `count` times; None or -1 never ends."""
        times = None if count is None or operator.index(count) < 0 else operator.index(count)
        return self._select(Repeat(self._pipeline.stream, times))

    def prefetch(self, buffer_size: int) -> Dataset:
        """Local. Elements are read ahead in a thread, so many at most; AUTOTUNE chooses, 0 turns it off."""
        size = check_count("prefetch: `buffer_size`", buffer_size, AUTOTUNE)
        return self._with(replace(self._pipeline, prefetch=_AUTOMATIC_PREFETCH if size == AUTOTUNE else size))

    def take(self, count: int) -> Dataset:
        """Local. The first `count` elements; -1 takes all."""
        return self._select(Take(self._pipeline.stream, max(-1, operator.index(count))))

    def skip(self, count: int) -> Dataset:
        """Local. All but the first `count` elements; -1 skips all."""
        return self._select(Skip(self._pipeline.stream, max(-1, operator.index(count))))

    def shard(self, num_shards: int, index: int) -> Dataset:
        """Local. The elements whose number i has i mod `num_shards` = `index`.

        `shard(SHARD_HINT, SHARD_HINT)` marks where the policy HINT shards, and does nothing under the others; without
        the mark HINT does what OFF does.
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
        """Local. Elements that differ in size, stacked: each array is padded at its end.

        Args:
            batch_size: As for `batch`.
            padded_shapes: The shape of an element's array, or a tuple or dictionary of them as the element has; None
                and -1 in it take the longest of the (global) batch. None: that in all dimensions. Where all sizes
                are given, a rank of a distributed dataset reads its own rows only, else the whole batch.
            padding_values: One value, or one per array; None pads with zeros.
            drop_remainder: As for `batch`.
        """
        size = check_count("padded_batch: `batch_size`", batch_size, 1)
        padding = Padding(padded_shapes, padding_values)
        return self._with(self._pipeline.batch(size, bool(drop_remainder), padding))

    def unbatch(self) -> Dataset:
        """Local. The rows of batches as elements.

        Raises:
            ValueError: The dataset has no batches that it knows of.
        """
        if not self._pipeline.is_batched:
            raise ValueError("unbatch: expected a dataset with batches, made by `batch`. Use interleave to split rows")
        return self._with(self._pipeline.unbatch())

    def filter(self, predicate: Callable[..., Any]) -> Dataset:
        """Local. The elements for which `predicate` is true, of unknown number; every rank reads all to know."""
        if not callable(predicate):
            raise TypeError(f"filter: expected a function, got {predicate!r}")
        pipeline = self._pipeline
        stream = Filter(pipeline, predicate)
        return self._with(replace(pipeline.in_whole(), stream=stream, is_loaded=pipeline.is_batched))

    def enumerate(self, start: int = 0) -> Dataset:
        """Local. `(number, element)`, numbers as int64 from `start` on."""
        return self._with(Dataset.zip(Dataset.range(operator.index(start), _MANY), self).pipeline)

    def cache(self) -> Dataset:
        """Local. Elements are kept in memory once read, by each rank those that it reads itself.

        What stands before happens once: an earlier `shuffle` keeps the order of its first pass.
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
        """Local. Tuples of elements of several datasets, as long as the shortest.

        Args:
            datasets: Datasets, or one tuple of them. All of them have batches, or none.

        Raises:
            TypeError: Not datasets.
            ValueError: Some have batches and some not.
        """
        parts = tuple(datasets[0]) if len(datasets) == 1 and isinstance(datasets[0], (tuple, list)) else datasets
        if not parts or not all(isinstance(part, Dataset) for part in parts):
            raise TypeError(f"zip: expected datasets, or one tuple of them, got {datasets!r}")
        pipelines = tuple(part.pipeline for part in parts)
        are_batched = {pipeline.is_batched for pipeline in pipelines}
        if len(are_batched) > 1:
            raise ValueError("zip: some of the datasets have batches and some have not. Call `batch` after zip")
        merged = Pipeline(ZipSource(pipelines), Zip(pipelines), is_loaded=are_batched == {True})
        return Dataset(merged, parts[0].options())

    def concatenate(self, dataset: Dataset) -> Dataset:
        """Local. The elements of this dataset, then those of another.

        Raises:
            TypeError: No dataset.
            ValueError: One has batches and the other not.
        """
        if not isinstance(dataset, Dataset):
            raise TypeError(f"concatenate: expected a dataset, got {dataset!r}")
        first, second = self._pipeline, dataset.pipeline
        if first.is_batched != second.is_batched:
            raise ValueError("concatenate: one dataset has batches and the other has not")
        source = PlaceSource(lambda: first)
        return self._with(Pipeline(source, Concatenate((first, second)), is_loaded=first.is_batched))

    def interleave(
        self, map_func: Callable[..., Any], cycle_length: int = 1, block_length: int = 1
    ) -> Dataset:
        """Local. The examples of datasets that `map_func` makes of the elements, by turns.

        Over files it is the reader: under the policies AUTO and FILE a rank gets the elements number i with i mod n =
        its rank. What is opened is seeked where it is over arrays; a batch is then read by its own rows only.

        Args:
            map_func: Gives a dataset without batches, an array or structure of arrays (their rows), or an iterable.
                The cardinality is known with `mpidist.data.read_npy`, `hdf5_reader(...)`, and what has a method
                `count_examples(element)`.
            cycle_length: How many are open at a time; 1: one behind another.
            block_length: How many examples one gives at its turn.
        """
        if not callable(map_func):
            raise TypeError(f"interleave: expected a function, got {map_func!r}")
        opened = partial(_opened_by, map_func)
        return self._with(interleaved(self._pipeline, opened, cycle_length, block_length, counter_of(map_func)))

    def shared(self) -> Dataset:
        """Collective. The dataset with its arrays in memory that the ranks of a node share: one copy per node.

        Every rank of the current strategy (outside a scope: of the job) calls it with the same arrays. Lazy ones
        (HDF5, memory maps) are read, each row by one rank of a node, so no rank ever holds them all; those in memory
        are copied, and a rank's own copy is freed once the program drops it. Where memory cannot be shared, each
        rank has its own, and rank 0 warns.

        Raises:
            ValueError: The dataset is not one of arrays.
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
            "interleave: the function gave a dataset with batches, and interleave mixes examples. Call `unbatch` "
            "there, or `batch` after interleave"
        )
    return opened
