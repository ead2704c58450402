"""`Dataset`: a deterministic, seekable pipeline over arrays, files or iterables, with tf.data's names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from mpidist.arguments import flag
from mpidist.data.dataset_base import BaseDataset, check_count
from mpidist.data.items.files import SHARD_HINT, HintedShard
from mpidist.data.items.shuffle import Shuffle, ShuffleSeed
from mpidist.data.items.stream import Repeat, Shard, Skip, Take
from mpidist.data.options import options_of_all
from mpidist.data.pipeline.caching import CachedSource, FirstPass, Kept
from mpidist.data.pipeline.pipeline import Pipeline
from mpidist.data.pipeline.places import Concatenate, PlaceSource
from mpidist.data.reading.padding import Padding
from mpidist.data.reading.shared_memory import current_communicator, shared_source
from mpidist.data.reading.source import ArraySource, IndexableSource, RangeSource
from mpidist.data.transformations import (
    coupled,
    generated,
    opened,
    random_numbers,
    rebatched,
    replayed,
    sampled,
    whole,
    windows,
    zipped,
)
from mpidist.data.transformations.calls import AUTOTUNE, workers_of

# The number of elements that prefetch(AUTOTUNE) reads ahead.
_AUTOMATIC_PREFETCH = 2


class Dataset(BaseDataset):
    """A pipeline of elements. Every transformation returns a new dataset.

    An element is an array, or a tuple or dictionary of elements. Over arrays (`from_tensor_slices`, `from_tensors`,
    `range`) the steps `shuffle`, `repeat`, `take`, `skip`, `shard` and `batch` move only row numbers. So a batch is one
    read per array, and a rank of a distributed dataset reads only its own rows. A function mapped before `batch` is
    called for the rank's own rows. A function mapped after `batch` is called with the whole global batch, as in
    tf.data, so every rank reads the whole batch.

    Iterating gives NumPy arrays. Each iteration starts from the beginning, in a new order where a shuffle asks for it.
    """

    # Most transformations are functions of a dataset, each in a module of its own.
    apply = whole.apply
    enumerate = zipped.enumerate_elements
    filter = replayed.filter_elements
    flat_map = opened.flat_map
    from_generator: classmethod[Any, ..., Dataset] = classmethod(generated.from_generator)
    from_ranks: classmethod[Any, ..., Dataset] = classmethod(coupled.from_ranks)
    interleave = opened.interleave
    random: classmethod[Any, ..., Dataset] = classmethod(random_numbers.random)
    rebatch = rebatched.rebatch
    reduce = whole.reduce
    sample_from_datasets: Callable[..., Dataset] = staticmethod(sampled.sample_from_datasets)
    scan = replayed.scan
    take_while = replayed.take_while
    unique = replayed.unique
    window = windows.window
    zip: Callable[..., Dataset] = staticmethod(zipped.zip_datasets)

    def map(
        self, map_func: Callable[..., Any], num_parallel_calls: int | None = None, deterministic: bool | None = None
    ) -> Dataset:
        """Local. Apply a function to each element.

        Args:
            map_func: A function that returns an element. It gets the components of a tuple as several arguments, and
                after `batch` a whole global batch. Its result must not depend on the number or the order of its calls:
                ranks call it for different elements, and a thread may call it ahead of the program.
            num_parallel_calls: Number of threads that call the function at the same time; AUTOTUNE chooses. Elements
                keep their order, and an error is raised in its place. The last number given before `batch` holds for
                all functions before `batch`, and likewise after it. Threads help where `map_func` lets other threads
                run: NumPy on large arrays, reading files.
            deterministic: Kept for code written for tf.data. The order is always the same.

        Raises:
            TypeError: `map_func` is not a function, or another argument has a wrong type.
            ValueError: `num_parallel_calls` is out of range.
        """
        if not callable(map_func):
            raise TypeError(f"map: expected a function, got {map_func!r}")
        workers = workers_of("map", num_parallel_calls, deterministic)
        return self.with_pipeline(self._pipeline.map(map_func, workers))

    def shuffle(
        self, buffer_size: int, seed: int | None = None, reshuffle_each_iteration: bool | None = True
    ) -> Dataset:
        """Local. Put the elements in random order, drawn from a buffer.

        Args:
            buffer_size: Number of elements (over arrays: of row numbers) in the buffer. A buffer that holds the whole
                dataset gives a uniform permutation.
            seed: The seed of the order, which depends on it and on the number of the iteration, never on the number of
                ranks. None draws a seed; a distributed dataset uses that of rank 0 on all ranks. Inside the function of
                `interleave` and the reader of `from_files` the seed follows from one that the outer dataset has drawn.
            reshuffle_each_iteration: Whether each iteration, and each repetition of `repeat`, has another order.

        Raises:
            TypeError, ValueError: An argument has a wrong type, or is out of range.
        """
        size = check_count("shuffle: `buffer_size`", buffer_size, 1)
        value = None if seed is None else check_count("shuffle: `seed`", seed)
        is_anew = True if reshuffle_each_iteration is None else reshuffle_each_iteration
        reshuffle = flag("reshuffle_each_iteration", is_anew, owner="shuffle: ")
        drawn = ShuffleSeed(value, use=f"buffer of {size}, {'each' if reshuffle else 'first'} iteration")
        return self._select(Shuffle(self._pipeline.stream, size, drawn, reshuffle))

    def batch(
        self,
        batch_size: int,
        drop_remainder: bool = False,
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
    ) -> Dataset:
        """Local. Stack elements along a new first dimension.

        Args:
            batch_size: Number of elements in a batch; under a strategy the global batch size.
            drop_remainder: Whether to leave out a last batch that is smaller.
            num_parallel_calls: Kept for code written for tf.data; it changes nothing.
            deterministic: Kept for code written for tf.data. The order is always the same.
        """
        workers_of("batch", num_parallel_calls, deterministic)
        size = check_count("batch: `batch_size`", batch_size, 1)
        is_full = flag("drop_remainder", drop_remainder, owner="batch: ")
        return self.with_pipeline(self._pipeline.batch((size,), is_full))

    def repeat(self, count: int | None = None) -> Dataset:
        """Local. Repeat the dataset `count` times; None and -1 repeat it without end."""
        times = -1 if count is None else check_count("repeat: `count`", count, -1)
        return self._select(Repeat(self._pipeline.stream, None if times == -1 else times))

    def prefetch(self, buffer_size: int) -> Dataset:
        """Local. Read up to `buffer_size` elements ahead in a thread; AUTOTUNE chooses, 0 turns it off."""
        size = check_count("prefetch: `buffer_size`", buffer_size, AUTOTUNE)
        return self.with_pipeline(replace(self._pipeline, prefetch=_AUTOMATIC_PREFETCH if size == AUTOTUNE else size))

    def take(self, count: int) -> Dataset:
        """Local. Keep the first `count` elements; -1 keeps all."""
        return self._select(Take(self._pipeline.stream, check_count("take: `count`", count, -1)))

    def skip(self, count: int) -> Dataset:
        """Local. Leave out the first `count` elements; -1 leaves out all."""
        return self._select(Skip(self._pipeline.stream, check_count("skip: `count`", count, -1)))

    def shard(self, num_shards: int, index: int) -> Dataset:
        """Local. Keep every `num_shards`-th element, beginning with number `index`.

        `shard(SHARD_HINT, SHARD_HINT)` is a hint: the policy HINT replaces it by the shard of the rank, and other
        policies ignore it. Without a hint the policy HINT does what OFF does.

        Raises:
            TypeError: A number is not an integer.
            ValueError: `num_shards` is less than 1, or `index` is not from 0 to `num_shards` - 1.
        """
        if num_shards == SHARD_HINT and index == SHARD_HINT:
            return self._select(HintedShard(self._pipeline.stream))
        shards = check_count("shard: `num_shards`", num_shards, 1)
        number = check_count("shard: `index`", index)
        if not 0 <= number < shards:
            raise ValueError(f"shard: `index` must be one of 0 to {shards - 1}, got {index!r}")
        return self._select(Shard(self._pipeline.stream, shards, number))

    def padded_batch(
        self, batch_size: int, padded_shapes: Any = None, padding_values: Any = None, drop_remainder: bool = False
    ) -> Dataset:
        """Local. Stack elements that differ in size; each array is padded at its end.

        Args:
            batch_size: See `batch`.
            padded_shapes: The shape of an element's array, or a structure of shapes like that of the element; an int is
                the shape of a vector. A size of None or -1 means the largest size in the global batch. None means that
                for all sizes. A rank of a distributed dataset reads only its own rows where all sizes are given, else
                the whole batch.
            padding_values: One value, or one per array; None pads with zeros.
            drop_remainder: See `batch`.

        Raises:
            TypeError, ValueError: An argument has a wrong type, or is out of range.
        """
        size = check_count("padded_batch: `batch_size`", batch_size, 1)
        padding = Padding(padded_shapes, padding_values)
        is_full = flag("drop_remainder", drop_remainder, owner="padded_batch: ")
        return self.with_pipeline(self._pipeline.batch((size,), is_full, padding))

    def unbatch(self) -> Dataset:
        """Local. Split elements into their rows, along the first dimension of all their arrays: batches into examples.

        Over arrays the rows of batches are row numbers. Elsewhere every rank reads all elements.

        Raises:
            ValueError: An array has no dimension, or another number of rows than others. It is raised while reading,
                unless elements are rows of arrays in memory.
        """
        return self.with_pipeline(rebatched.rows_of("unbatch", self._pipeline))

    def cache(self) -> Dataset:
        """Local. Keep elements in memory once they are read; each rank keeps those that it reads itself.

        Earlier steps happen once: a `shuffle` before `cache` keeps the order of its first pass.
        """
        pipeline = self._pipeline
        is_by_row = isinstance(pipeline.source, (ArraySource, RangeSource, IndexableSource))
        if is_by_row and not pipeline.is_batched:
            return self.with_pipeline(
                Pipeline(CachedSource(pipeline), FirstPass(pipeline.stream), prefetch=pipeline.prefetch)
            )
        return self.with_pipeline(replace(pipeline.in_whole(), stream=Kept(pipeline), is_loaded=pipeline.is_batched))

    def concatenate(self, dataset: Dataset) -> Dataset:
        """Local. Append the elements of another dataset.

        Raises:
            TypeError: `dataset` is not a `Dataset`.
            ValueError: One dataset has batches and the other has not, or their auto-shard policies differ.
        """
        if not isinstance(dataset, Dataset):
            raise TypeError(f"concatenate: expected a dataset, got {dataset!r}")
        first, second = self._pipeline, dataset.pipeline
        if first.is_batched != second.is_batched:
            raise ValueError(
                "concatenate: expected two datasets with batches, or two without, but one has batches and the other "
                "has not. Call `batch` after concatenate"
            )
        options = options_of_all("concatenate", [self._options, dataset.options()])
        source = PlaceSource(lambda: (first, second))
        is_assumed = first.is_assumed and second.is_assumed
        stream = Concatenate((first, second))
        return Dataset(Pipeline(source, stream, is_loaded=first.is_batched, is_assumed=is_assumed), options)

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
        source = shared_source(self._pipeline.source, current_communicator())
        return self.with_pipeline(replace(self._pipeline, source=source))
