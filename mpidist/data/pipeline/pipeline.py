"""A pipeline: which items come in which order, and how an item is read; the two stay apart until something is read.

So a rank of a distributed dataset follows the whole stream, which costs integers, and reads its own rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from mpidist import tree
from mpidist.data.items.batching import Batch, Rebatch
from mpidist.data.items.sharding import even_slice
from mpidist.data.items.stream import UNKNOWN, Epoch, Items, Seed, Stream, drop_items
from mpidist.data.reading import element as elements
from mpidist.data.reading.element import ArraySpec
from mpidist.data.reading.padding import Padding, stack_with
from mpidist.data.reading.source import ElementSource, Source
from mpidist.data.reading.workers import Workers


@dataclass(frozen=True)
class Pipeline:
    """What a dataset does.

    Attributes:
        source: Reads items.
        stream: The items: of one example each, or groups of them once `grouping` is set.
        functions: Mapped over examples.
        grouping: The batch that made groups of the items; None before.
        is_loaded: The source itself gives batches; an item is one.
        batch_functions: Mapped over batches.
        prefetch: How many elements a plain iteration prepares ahead.
        padding: How the examples of a batch are made equally large; None: they are.
        workers: Call the functions over examples; None calls them one after the other.
        batch_workers: Call the functions over batches.
    """

    source: Source
    stream: Stream
    functions: tuple[Callable[..., Any], ...] = ()
    grouping: Batch | None = None
    is_loaded: bool = False
    batch_functions: tuple[Callable[..., Any], ...] = ()
    prefetch: int = 0
    padding: Padding | None = None
    workers: Workers | None = None
    batch_workers: Workers | None = None

    @property
    def is_batched(self) -> bool:
        """Local. Whether its elements are batches."""
        return self.grouping is not None or self.is_loaded

    @property
    def is_cheap(self) -> bool:
        """Local. Whether reading is no more than a copy in memory, so that a thread would cost more than it saves."""
        return self.source.in_memory and not self.functions and not self.batch_functions

    @property
    def has_fixed_batches(self) -> bool:
        """Local. Whether all its batches have the same size."""
        return self.grouping is not None and self.grouping.drop_remainder

    def map(self, function: Callable[..., Any], workers: Workers | None = None) -> Pipeline:
        """Local. The function over its elements; `workers` call all that is mapped at this level."""
        if self.is_batched:
            functions = (*self.batch_functions, function)
            return replace(self, batch_functions=functions, batch_workers=workers or self.batch_workers)
        return replace(self, functions=(*self.functions, function), workers=workers or self.workers)

    def batch(self, batch_size: int, drop_remainder: bool, padding: Padding | None = None) -> Pipeline:
        """Local. Groups of its elements."""
        if self.is_batched:
            return self.in_whole().batch(batch_size, drop_remainder, padding)
        grouping = Batch(self.stream, batch_size, drop_remainder)
        return replace(self, stream=grouping, grouping=grouping, padding=padding)

    def in_whole(self) -> Pipeline:
        """Local. Its elements as examples, read before anything further is done with them."""
        source = ElementSource(lambda item: item, self.sample)
        return Pipeline(source, Read(self, by_rows=False), prefetch=self.prefetch)

    def unbatch(self) -> Pipeline:
        """Local. The examples of its batches."""
        if self.grouping is not None and not self.batch_functions and self.padding is None:
            return replace(self, stream=Ungroup(self.stream), grouping=None)
        source = ElementSource(lambda item: item, lambda: next(elements.split(self.sample())))
        return Pipeline(source, Ungroup(Read(self, by_rows=True)), prefetch=self.prefetch)

    def rebatch(self, sizes: tuple[int, ...], drop_remainder: bool) -> Pipeline:
        """Local. Batches of other sizes, used in turn, over the examples in its batches."""
        if self.grouping is not None and not self.batch_functions:
            return replace(self, stream=Rebatch(self.stream, sizes, drop_remainder))
        source = ElementSource(lambda item: item, lambda: next(elements.split(self.sample())))
        groups = Read(self, by_rows=True)
        grouping = Batch(groups, sum(sizes), drop_remainder)
        return Pipeline(source, Rebatch(groups, sizes, drop_remainder), grouping=grouping)

    def read(self, item: Any) -> Any:
        """Local. The element of an item."""
        if not self.is_batched:
            return self._map(self._load(item))
        if self.is_loaded:
            batch = self._load(item)
        elif len(item) == 0:
            return elements.cut(self.sample(), slice(0, 0))
        else:
            batch = self.read_rows(item)
        for function in self.batch_functions:
            batch = elements.call(function, batch)
        return batch

    def piece_reader(self, parts: int, index: int) -> Callable[[Any], Any]:
        """Local. What reads piece `index` of batches that `parts` readers share evenly; that piece only where it can.

        It cannot where a function was mapped after batch: that is called with the whole batch, as in tf.data; nor
        where the longest example of a batch decides how long the others get.
        """

        def cut_piece(item: Any) -> Any:
            batch = self.read(item)
            return elements.cut(batch, even_slice(elements.first_dimension(batch), parts, index))

        def read_piece(item: Any) -> Any:
            if len(item) == whole:
                return rows(item[usual])
            piece = item[even_slice(len(item), parts, index)]
            # An empty piece keeps dtypes and other dimensions: those of a row that is there.
            return rows(piece) if len(piece) else elements.cut(self.read(item[:1]), slice(0, 0))

        if self.is_loaded or self.batch_functions or (self.padding is not None and self.padding.is_open):
            return cut_piece
        # Where rows are only copied, each call less shows: a batch may take no longer than ten of them.
        whole = self.grouping.batch_size if self.grouping is not None else 0
        usual = even_slice(whole, parts, index)
        if usual.start == usual.stop:
            whole = -1
        rows = self.read_rows if self.functions or self.padding is not None else self.source.rows
        return read_piece

    def iterate(self, epoch: Epoch, start: int, read: Callable[[Any], Any]) -> Iterator[Any]:
        """Local. What `read` makes of its items, from number `start` on."""
        items = itertools.chain.from_iterable(self.stream.blocks(epoch, start))
        if self.batch_functions and self.batch_workers is not None:
            return self.batch_workers.ordered(read, items)
        if self.workers is not None and not self.is_batched:
            return self.workers.ordered(read, items)
        return map(read, items)

    def sample(self) -> Any:
        """Local. An element, for its shapes and dtypes; reads an example, and calls what is mapped over it.

        Raises:
            ValueError: There is no example.
        """
        element = self.source.sample()
        if not self.is_loaded:
            element = self._map(element)
        if self.grouping is not None:
            # A function over batches may count on their size.
            in_full = self.batch_functions or self.has_fixed_batches
            element = stack_with(self.padding, [element] * (self.grouping.batch_size if in_full else 1))
        for function in self.batch_functions:
            element = elements.call(function, element)
        return element

    def spec(self, *, is_whole: bool) -> Any:
        """Local. `ArraySpec`s of its elements, or, unless `is_whole`, of pieces of them.

        The first dimension is None where batches, or pieces, differ in size.
        """
        spec = elements.spec_of(self.sample())
        if self.padding is not None and not self.batch_functions:
            spec = self.padding.spec(spec)
        if not self.is_batched or (is_whole and self.has_fixed_batches):
            return spec
        return tree.map_leaves(lambda leaf: ArraySpec((None, *leaf.shape[1:])[: len(leaf.shape)], leaf.dtype), spec)

    def read_rows(self, items: Items) -> Any:
        """Local. The batch of some items of one example each, at least one.

        Where batches are read side by side, the source is still read by one thread at a time.
        """
        if self.batch_workers is None:
            return self._stacked(items)
        with self.batch_workers.lock:
            return self._stacked(items)

    def _map(self, element: Any) -> Any:
        for function in self.functions:
            element = elements.call(function, element)
        return element

    def _load(self, item: Any) -> Any:
        workers = self.batch_workers if self.is_batched else self.workers
        if workers is None:
            return self.source.row(item)
        with workers.lock:
            return self.source.row(item)

    def _stacked(self, items: Items) -> Any:
        if not self.functions and self.padding is None:
            return self.source.rows(items)
        examples = self.source.each(items)
        if self.workers is not None and self.functions:
            return stack_with(self.padding, list(self.workers.ordered(self._map, examples)))
        return stack_with(self.padding, [self._map(element) for element in examples])


@dataclass(frozen=True)
class Read:
    """The elements of a pipeline as items: read, because what follows needs them whole.

    Attributes:
        pipeline: What is read.
        by_rows: One group per batch, of its examples; else one item per element.
    """

    pipeline: Pipeline
    by_rows: bool

    def cardinality(self) -> int:
        """Local. The pipeline's."""
        return self.pipeline.stream.cardinality()

    def blocks(self, epoch: Epoch, start: int) -> Iterator[Items]:
        """Local. Seeks as the pipeline's stream does."""
        for element in self.pipeline.iterate(epoch, start, self.pipeline.read):
            yield [list(elements.split(element))] if self.by_rows else [element]

    def seeds(self) -> list[Seed]:
        """Local. Those of the pipeline's stream."""
        return self.pipeline.stream.seeds()


@dataclass(frozen=True)
class Ungroup:
    """The items of a stream of groups, one by one."""

    parent: Stream

    def cardinality(self) -> int:
        """Local. Known where the parent is a `Batch` of a known number of items, else INFINITE or UNKNOWN."""
        if not isinstance(self.parent, Batch) or self.parent.parent.cardinality() < 0:
            return UNKNOWN if self.parent.cardinality() >= 0 else self.parent.cardinality()
        total = self.parent.parent.cardinality()
        return total - total % self.parent.batch_size if self.parent.drop_remainder else total

    def blocks(self, epoch: Epoch, start: int) -> Iterator[Items]:
        """Local. Seeks to the batch where the parent's batches have one size, else by going over its groups."""
        if isinstance(self.parent, Batch):
            first, start = divmod(start, self.parent.batch_size)
        else:
            first = 0
        groups = (group for block in self.parent.blocks(epoch, first) for group in block)
        return drop_items(groups, start)

    def seeds(self) -> list[Seed]:
        """Local. Those of its parent."""
        return self.parent.seeds()
