"""A pipeline: which items come in which order, and how an item is read; the two stay apart until something is read.

So a rank of a distributed dataset follows the whole stream, which costs integers, and reads its own rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from mpidist import tree
from mpidist.data import element as elements
from mpidist.data.batching import Batch, Rebatch
from mpidist.data.element import ArraySpec
from mpidist.data.sharding import even_slice
from mpidist.data.source import ElementSource, Source
from mpidist.data.stream import Epoch, Items, Seed, Stream


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
    """

    source: Source
    stream: Stream
    functions: tuple[Callable[..., Any], ...] = ()
    grouping: Batch | None = None
    is_loaded: bool = False
    batch_functions: tuple[Callable[..., Any], ...] = ()
    prefetch: int = 0

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

    def map(self, function: Callable[..., Any]) -> Pipeline:
        """Local. The function over its elements."""
        if self.is_batched:
            return replace(self, batch_functions=(*self.batch_functions, function))
        return replace(self, functions=(*self.functions, function))

    def batch(self, batch_size: int, drop_remainder: bool) -> Pipeline:
        """Local. Groups of its elements."""
        if self.is_batched:
            whole = Pipeline(ElementSource(lambda item: item, self.sample), _Read(self, by_rows=False))
            return replace(whole, prefetch=self.prefetch).batch(batch_size, drop_remainder)
        grouping = Batch(self.stream, batch_size, drop_remainder)
        return replace(self, stream=grouping, grouping=grouping)

    def rebatch(self, sizes: tuple[int, ...], drop_remainder: bool) -> Pipeline:
        """Local. Batches of other sizes, used in turn, over the examples in its batches."""
        if self.grouping is not None and not self.batch_functions:
            return replace(self, stream=Rebatch(self.stream, sizes, drop_remainder))
        source = ElementSource(lambda item: item, lambda: next(elements.split(self.sample())))
        groups = _Read(self, by_rows=True)
        grouping = Batch(groups, sum(sizes), drop_remainder)
        return Pipeline(source, Rebatch(groups, sizes, drop_remainder), grouping=grouping)

    def read(self, item: Any) -> Any:
        """Local. The element of an item."""
        if not self.is_batched:
            return self._map(self.source.row(item))
        if self.is_loaded:
            batch = self.source.row(item)
        elif len(item) == 0:
            return elements.cut(self.sample(), slice(0, 0))
        else:
            batch = self._rows(item)
        for function in self.batch_functions:
            batch = elements.call(function, batch)
        return batch

    def read_piece(self, item: Any, parts: int, index: int) -> Any:
        """Local. Piece `index` of a batch that `parts` readers share evenly; reads that piece only where it can.

        It cannot where a function was mapped after batch: that is called with the whole batch, as in tf.data.
        """
        if self.is_loaded or self.batch_functions:
            batch = self.read(item)
            return elements.cut(batch, even_slice(elements.first_dimension(batch), parts, index))
        piece = item[even_slice(len(item), parts, index)]
        # An empty piece keeps dtypes and other dimensions: those of a row that is there.
        return self.read(piece) if len(piece) else elements.cut(self.read(item[:1]), slice(0, 0))

    def iterate(self, epoch: Epoch, start: int, read: Callable[[Any], Any]) -> Iterator[Any]:
        """Local. What `read` makes of its items, from number `start` on."""
        for block in self.stream.blocks(epoch, start):
            for item in block:
                yield read(item)

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
            element = elements.stack([element] * (self.grouping.batch_size if in_full else 1))
        for function in self.batch_functions:
            element = elements.call(function, element)
        return element

    def spec(self, *, is_whole: bool) -> Any:
        """Local. `ArraySpec`s of its elements, or, unless `is_whole`, of pieces of them.

        The first dimension is None where batches, or pieces, differ in size.
        """
        spec = elements.spec_of(self.sample())
        if not self.is_batched or (is_whole and self.has_fixed_batches):
            return spec
        return tree.map_leaves(lambda leaf: ArraySpec((None, *leaf.shape[1:])[: len(leaf.shape)], leaf.dtype), spec)

    def _map(self, element: Any) -> Any:
        for function in self.functions:
            element = elements.call(function, element)
        return element

    def _rows(self, items: Items) -> Any:
        if not self.functions:
            return self.source.rows(items)
        return elements.stack([self._map(element) for element in self.source.each(items)])


@dataclass(frozen=True)
class _Read:
    """The elements of a pipeline as items: read, because what follows needs them whole.

    Attributes:
        pipeline: What is read.
        by_rows: One group per batch, of its examples; else one item per element.
    """

    pipeline: Pipeline
    by_rows: bool

    @property
    def cardinality(self) -> int:
        """Local. The pipeline's."""
        return self.pipeline.stream.cardinality

    def blocks(self, epoch: Epoch, start: int) -> Iterator[Items]:
        """Local. Seeks as the pipeline's stream does."""
        for element in self.pipeline.iterate(epoch, start, self.pipeline.read):
            yield [list(elements.split(element))] if self.by_rows else [element]

    def seeds(self) -> list[Seed]:
        """Local. Those of the pipeline's stream."""
        return self.pipeline.stream.seeds()
