"""`zip` and `enumerate`: an item is a tuple of unread items, so that a batch is one read per dataset."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from mpidist import tree
from mpidist.arguments import described, named
from mpidist.data.dataset_base import BaseDataset, D, check_count
from mpidist.data.items.sharding import even_slice
from mpidist.data.items.stream import INFINITE, UNKNOWN, Epoch, Items, Seed
from mpidist.data.options import options_of_all
from mpidist.data.pipeline.pipeline import Pipeline
from mpidist.data.pipeline.places import as_items
from mpidist.data.reading import element as elements

# The length of the numbers in `enumerate`: longer than any dataset, yet the numbers fit into int64.
_MANY = 2**62


@dataclass(frozen=True)
class Zip:
    """Tuples of the items of several pipelines, until the shortest of them ends."""

    pipelines: tuple[Pipeline, ...]

    def cardinality(self) -> int:
        """Local. The smallest cardinality."""
        counts = [pipeline.stream.cardinality() for pipeline in self.pipelines]
        if UNKNOWN in counts:
            return UNKNOWN
        return min((count for count in counts if count != INFINITE), default=INFINITE)

    def blocks(self, epoch: Epoch, start: int) -> Iterator[Items]:
        """Local. Tuples from number `start` on; seeks as the pipelines' streams do."""
        streams = [pipeline.stream.blocks(epoch, start) for pipeline in self.pipelines]
        held: list[Items] = [()] * len(streams)
        while True:
            for number, stream in enumerate(streams):
                while len(held[number]) == 0:
                    following = next(stream, None)
                    if following is None:
                        return
                    held[number] = following
            count = min(map(len, held))
            yield list(zip(*(items[:count] for items in held), strict=True))
            held = [items[count:] for items in held]

    def seeds(self) -> list[Seed]:
        """Local. The seeds of the pipelines, in their order."""
        return [seed for pipeline in self.pipelines for seed in pipeline.stream.seeds()]


@dataclass(frozen=True)
class ZipSource:
    """Reads structures with one element of each pipeline.

    Attributes:
        pipelines: The pipelines that read the elements.
        rebuild: A function that makes a structure of one element of each.
    """

    pipelines: tuple[Pipeline, ...]
    rebuild: Callable[[list[Any]], Any]

    @property
    def in_memory(self) -> bool:
        """Local. Whether all pipelines only copy."""
        return all(pipeline.is_cheap for pipeline in self.pipelines)

    def row(self, item: Any) -> Any:
        """Local. Read one structure."""
        return self._read([pipeline.read for pipeline in self.pipelines], item)

    def rows(self, items: Items) -> Any:
        """Local. Read a batch of structures, with one read per pipeline of examples."""
        columns = [
            elements.stack([pipeline.read(one) for one in column])
            if pipeline.is_batched
            else pipeline.read_rows(as_items(list(column)))
            for pipeline, column in zip(self.pipelines, zip(*items, strict=True), strict=True)
        ]
        return self.rebuild(columns)

    def each(self, items: Items) -> Iterator[Any]:
        """Local. Read structures one by one."""
        return map(self.row, items)

    def sample(self) -> Any:
        """Local. A structure of samples, one of each pipeline."""
        return self.rebuild([pipeline.sample() for pipeline in self.pipelines])

    def piece_reader(self, readers: int, reader: int) -> Callable[[Any], Any]:
        """Local. See `PieceSource.piece_reader`. Elements neither batched nor assumed to be are for every reader."""
        reads = [
            pipeline.piece_reader(readers, reader) if pipeline.is_batched
            else partial(_piece, pipeline, readers, reader) if pipeline.is_assumed
            else pipeline.read
            for pipeline in self.pipelines
        ]
        return partial(self._read, reads)

    def _read(self, reads: list[Callable[[Any], Any]], item: Any) -> Any:
        return self.rebuild([read(one) for read, one in zip(reads, item, strict=True)])


def _piece(pipeline: Pipeline, readers: int, reader: int, item: Any) -> Any:
    """One reader's piece of an element that has rows; else the element."""
    element = pipeline.read(item)
    if not elements.have_rows(element):
        return element
    return elements.cut(element, even_slice(elements.first_dimension(element), readers, reader))


def zip_datasets(*args: Any, datasets: Any = None) -> Any:
    """Local. A dataset of structures with one element of each dataset; it ends with the shortest of them.

    Where some datasets have batches, the result has batches. Under a strategy a rank gets its piece of each batch; of
    elements of an iterable or a generator, too, if they have rows and `batched` is not False. It gets all of any other
    element.

    >>> from mpidist.data import Dataset
    >>> a, b = Dataset.range(1, 4), Dataset.range(4, 7)
    >>> [(int(x), int(y)) for x, y in Dataset.zip(a, b)]
    [(1, 4), (2, 5), (3, 6)]
    >>> [int(both["b"]) for both in Dataset.zip({"a": a, "b": b})]
    [4, 5, 6]

    Args:
        args: Datasets, or one nested structure of datasets in tuples and dictionaries. A list counts as a tuple.
        datasets: Such a nested structure, instead of `args`.

    Raises:
        TypeError: An argument is not a dataset, there is none, or both arguments are given.
        ValueError: The datasets' auto-shard policies differ.
    """
    if bool(args) == (datasets is not None):
        raise TypeError("zip: expected datasets, or `datasets=` with a structure of them, and not both")
    structure = _as_tuples(datasets if datasets is not None else args[0] if len(args) == 1 else args)
    given, spec = tree.flatten(structure)
    wrong = [(path, one) for path, one in tree.leaf_paths(structure) if not isinstance(one, BaseDataset)]
    if wrong or not given:
        got = f"{described(wrong[0][1])} at {wrong[0][0] or 'the only place'}" if wrong else described(structure)
        raise TypeError(f"zip: expected datasets, or a tuple or dictionary of them, got {got}")
    pipelines = tuple(one.pipeline for one in given)
    is_batched = any(pipeline.is_batched for pipeline in pipelines)
    options = options_of_all("zip", [one.options() for one in given])
    # A plain tuple, the usual case, is rebuilt faster by `tuple` than by optree.
    is_plain = type(structure) is tuple and all(isinstance(one, BaseDataset) for one in structure)
    rebuild: Callable[[list[Any]], Any] = tuple if is_plain else partial(tree.unflatten, spec)
    is_assumed = not is_batched and all(pipeline.is_assumed for pipeline in pipelines)
    source = ZipSource(pipelines, rebuild)
    zipped = Pipeline(source, Zip(pipelines), is_loaded=is_batched, is_assumed=is_assumed)
    return type(given[0])(zipped, options)


def enumerate_elements(dataset: D, start: int = 0) -> D:
    """Local. Pair each element with its number: `(number, element)`, numbers as int64 from `start` on.

    After `batch` the number is that of the batch; under a strategy all ranks get it, each with its piece of the batch.

    >>> from mpidist.data import Dataset
    >>> [(int(number), batch.tolist()) for number, batch in Dataset.range(5).batch(2).enumerate(start=1)]
    [(1, [0, 1]), (2, [2, 3]), (3, [4])]

    Raises:
        TypeError: `start` is not an integer.
    """
    first = check_count("enumerate: `start`", start, -_MANY)
    with named("enumerate: `start`"):
        numbered: D = zip_datasets(type(dataset).range(first, first + _MANY), dataset)
    return dataset.with_pipeline(numbered.pipeline)


def _as_tuples(structure: Any) -> Any:
    """The structure with tuples for lists: in an element a list would be an array."""
    if isinstance(structure, dict):
        return {key: _as_tuples(one) for key, one in structure.items()}
    if not isinstance(structure, (tuple, list)):
        return structure
    parts = [_as_tuples(one) for one in structure]
    return type(structure)(*parts) if hasattr(structure, "_fields") else tuple(parts)
