"""The pipeline: a stream that orders items, and a source that reads them.

The two stay apart until something is read. So a rank of a distributed dataset follows the whole stream, which costs
only integers, and reads its own rows of each batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from mpidist import tree
from mpidist.data.items.batching import Batch, Rebatch, Ungroup
from mpidist.data.items.sharding import even_slice
from mpidist.data.items.stream import Epoch, Items, Seed, Stream
from mpidist.data.reading import element as elements
from mpidist.data.reading.padding import Padding, stack_with
from mpidist.data.reading.source import ElementSource, PieceSource, Source
from mpidist.data.reading.workers import ReaderThreads

# Beginning and end of the error for elements that a strategy cannot cut.
UNBATCHED = (
    "experimental_distribute_dataset: expected a dataset with batches to share out between replicas",
    "Call the `batch` method on the dataset, with the global batch size",
)
# Those for elements that cannot be split into rows.
NO_ROWS = (
    "expected elements whose arrays all have the same first dimension, along which they are split into rows",
    "`batch` makes such elements, and `map` can leave parts out",
)


@dataclass(frozen=True)
class Pipeline:
    """The steps of a dataset, as an immutable value; each transformation makes another pipeline.

    Attributes:
        source: The source, which reads items.
        stream: The items. Each is one example, or a group of examples once `grouping` is set.
        functions: The functions that are mapped over examples.
        grouping: The `Batch` that made groups of the items; None before there is one.
        is_loaded: Whether the source itself gives batches; then an item is a batch.
        is_assumed: Whether the elements come from the program's iterable, and may be batches or not. A strategy then
            takes those that have rows for batches, as TF does.
        batch_functions: The functions that are mapped over batches.
        prefetch: Number of elements that an iteration prepares ahead; None where the program gave none.
        padding: The rule that makes the examples of a batch equally large; None where they are.
        workers: The threads that call the functions over examples; None calls them one after another.
        batch_workers: The threads that call the functions over batches.
    """

    source: Source
    stream: Stream
    functions: tuple[Callable[..., Any], ...] = ()
    grouping: Batch | None = None
    is_loaded: bool = False
    is_assumed: bool = False
    batch_functions: tuple[Callable[..., Any], ...] = ()
    prefetch: int | None = None
    padding: Padding | None = None
    workers: ReaderThreads | None = None
    batch_workers: ReaderThreads | None = None

    @property
    def is_batched(self) -> bool:
        """Local. Whether the elements are batches."""
        return self.grouping is not None or self.is_loaded

    @property
    def batch_size(self) -> int:
        """Local. The size of full batches; 0 where it is unknown or varies."""
        return self.grouping.sizes[0] if self.grouping is not None and len(self.grouping.sizes) == 1 else 0

    @property
    def is_cheap(self) -> bool:
        """Local. Whether reading is only a copy in memory, so that a thread would cost more than it saves."""
        return self.source.in_memory and not self.functions and not self.batch_functions

    @property
    def has_fixed_batches(self) -> bool:
        """Local. Whether all batches have the same size."""
        return self.grouping is not None and self.grouping.drop_remainder and len(self.grouping.sizes) == 1

    def map(self, function: Callable[..., Any], workers: ReaderThreads | None = None) -> Pipeline:
        """Local. Map a function over the elements; `workers` call all functions of examples, or all of batches."""
        if self.is_batched:
            functions = (*self.batch_functions, function)
            return replace(self, batch_functions=functions, batch_workers=workers or self.batch_workers)
        return replace(self, functions=(*self.functions, function), workers=workers or self.workers)

    def batch(self, sizes: tuple[int, ...], drop_remainder: bool, padding: Padding | None = None) -> Pipeline:
        """Local. Group the elements into batches; the sizes are used in turn."""
        if self.is_batched:
            return self.in_whole().batch(sizes, drop_remainder, padding)
        grouping = Batch(self.stream, sizes, drop_remainder)
        return replace(self, stream=grouping, grouping=grouping, padding=padding, is_assumed=False)

    def in_whole(self) -> Pipeline:
        """Local. A pipeline whose examples are the elements of this one, read before any further step."""
        source = ElementSource(lambda item: item, self.sample)
        elements_of_this = PipelineElements(self, by_rows=False)
        return Pipeline(source, elements_of_this, is_assumed=self.is_assumed, prefetch=self.prefetch)

    def as_batches(self) -> Pipeline:
        """Local. The pipeline with its elements as batches."""
        return replace(
            self, is_loaded=True, functions=(), batch_functions=self.functions, workers=None, batch_workers=self.workers
        )

    def unbatch(self) -> Pipeline:
        """Local. The rows of the elements, as elements: the examples of batches."""
        if self.grouping is not None and not self.batch_functions and self.padding is None:
            return replace(self, stream=Ungroup(self.stream), grouping=None)
        source = ElementSource(lambda item: item, self._sample_row)
        return Pipeline(source, Ungroup(PipelineElements(self, by_rows=True)), prefetch=self.prefetch)

    def rebatch(self, sizes: tuple[int, ...], drop_remainder: bool) -> Pipeline:
        """Local. The same examples in batches of other sizes, which are used in turn."""
        if self.grouping is not None and not self.batch_functions:
            return replace(self, stream=Rebatch(self.stream, sizes, drop_remainder))
        source = ElementSource(lambda item: item, self._sample_row)
        groups = PipelineElements(self, by_rows=True)
        grouping = Batch(groups, (sum(sizes),), drop_remainder)
        return Pipeline(source, Rebatch(groups, sizes, drop_remainder), grouping=grouping, prefetch=self.prefetch)

    def read(self, item: Any) -> Any:
        """Local. Read the element of an item."""
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

    def piece_reader(self, readers: int, reader: int) -> Callable[[Any], Any]:
        """Local. A function that reads one reader's piece of batches that `readers` share evenly.

        It reads only that piece, except in two cases where it must read the whole batch and cut: where a function was
        mapped after `batch` (it is called with the whole batch, as in tf.data), and where the longest example of a
        batch decides the padded size.
        """

        def cut_piece(item: Any) -> Any:
            batch = self.read(item)
            if self.is_assumed:
                elements.require_rows(batch, *UNBATCHED)
            count = elements.first_dimension(batch, with_scalars=False)
            return elements.cut(batch, even_slice(count, readers, reader))

        def read_piece(item: Any) -> Any:
            if len(item) == whole:
                return rows(item[usual])
            piece = item[even_slice(len(item), readers, reader)]
            # An empty piece must have the dtypes and other dimensions of the data: they are those of the first row.
            return rows(piece) if len(piece) else elements.cut(self.read(item[:1]), slice(0, 0))

        if (
            self.is_loaded and not self.is_assumed and not self.batch_functions and isinstance(self.source, PieceSource)
        ):
            return self.source.piece_reader(readers, reader)
        if self.is_loaded or self.batch_functions or (self.padding is not None and self.padding.is_open):
            return cut_piece
        # The slice of a full batch is computed once. A small batch that is only copied takes a few microseconds in
        # all, so even one Python call less can be measured.
        whole = self.grouping.sizes[0] if self.grouping is not None else 0
        usual = even_slice(whole, readers, reader)
        if usual.start == usual.stop:
            # This reader's piece of a full batch is empty; with -1 every batch takes the general branch.
            whole = -1
        rows = self.read_rows if self.functions or self.padding is not None else self.source.rows
        return read_piece

    def iterate(self, epoch: Epoch, start: int, read: Callable[[Any], Any]) -> Iterator[Any]:
        """Local. The results of `read` for each item, from number `start` on."""
        items = itertools.chain.from_iterable(self.stream.blocks(epoch, start))
        if self.batch_functions and self.batch_workers is not None:
            return self.batch_workers.ordered(read, items)
        if self.workers is not None and not self.is_batched:
            return self.workers.ordered(read, items)
        return map(read, items)

    def sample(self) -> Any:
        """Local. An element, for its shapes and dtypes. Reads one example and calls the functions mapped over it.

        Raises:
            ValueError: There is no example.
        """
        element = self.source.sample()
        if not self.is_loaded:
            element = self._map(element)
        if self.grouping is not None:
            # A function over batches may rely on their size, so it gets a full batch of one repeated example.
            in_full = self.batch_functions or self.has_fixed_batches
            element = stack_with(self.padding, [element] * (self.grouping.sizes[0] if in_full else 1))
        for function in self.batch_functions:
            element = elements.call(function, element)
        return element

    def spec(self, *, is_whole: bool) -> Any:
        """Local. The `ArraySpec`s of the elements.

        Args:
            is_whole: Whether the specifications are those of whole batches, and not of a rank's pieces. The first
                dimension of batches and pieces is None where their sizes may differ.
        """
        spec = elements.spec_of(self.sample())
        if self.padding is not None and not self.batch_functions:
            spec = self.padding.spec(spec)
        if not self.is_batched or (is_whole and self.has_fixed_batches):
            return spec
        return tree.map_leaves(elements.without_rows, spec)

    def may_be_empty(self, element: Any) -> bool:
        """Local. Whether an empty element can replace a missing one: `element` is a batch, or has rows."""
        return self.is_batched or (self.is_assumed and elements.have_rows(element))

    def read_rows(self, items: Items) -> Any:
        """Local. Read items of one example each, at least one, as a batch.

        Where several threads make batches, still only one at a time reads the source.
        """
        if self.batch_workers is None:
            return self._stacked(items)
        with self.batch_workers.lock:
            return self._stacked(items)

    def _sample_row(self) -> Any:
        return elements.row_of(self.sample())

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
class PipelineElements:
    """The elements of a pipeline as items. They are read here, because a following step needs them whole.

    Attributes:
        pipeline: The pipeline to read.
        by_rows: Whether each batch becomes a group of examples; else each element becomes one item.
    """

    pipeline: Pipeline
    by_rows: bool

    def cardinality(self) -> int:
        """Local. The pipeline's cardinality."""
        return self.pipeline.stream.cardinality()

    def blocks(self, epoch: Epoch, start: int) -> Iterator[Items]:
        """Local. Elements from number `start` on; seeks as the pipeline's stream does."""
        for element in self.pipeline.iterate(epoch, start, self.pipeline.read):
            if self.by_rows:
                elements.require_rows(element, f"unbatch: {NO_ROWS[0]}", NO_ROWS[1])
            yield [list(elements.split(element))] if self.by_rows else [element]

    def seeds(self) -> list[Seed]:
        """Local. The seeds of the pipeline's stream."""
        return self.pipeline.stream.seeds()
