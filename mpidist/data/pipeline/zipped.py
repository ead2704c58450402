"""Zipped datasets: an item is a tuple of unread items, so that a batch is one read per dataset."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mpidist.data.items.stream import INFINITE, UNKNOWN, Epoch, Items, Seed
from mpidist.data.pipeline.pipeline import Pipeline
from mpidist.data.pipeline.places import as_items
from mpidist.data.reading import element as elements


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
    """Reads tuples, with one element of each pipeline."""

    pipelines: tuple[Pipeline, ...]

    @property
    def in_memory(self) -> bool:
        """Local. Whether all pipelines only copy."""
        return all(pipeline.is_cheap for pipeline in self.pipelines)

    def row(self, item: Any) -> Any:
        """Local. Read one tuple."""
        return tuple(pipeline.read(one) for pipeline, one in zip(self.pipelines, item, strict=True))

    def rows(self, items: Items) -> Any:
        """Local. Read a batch of tuples, with one read per pipeline of examples."""
        return tuple(
            elements.stack([pipeline.read(one) for one in column])
            if pipeline.is_batched
            else pipeline.read_rows(as_items(list(column)))
            for pipeline, column in zip(self.pipelines, zip(*items, strict=True), strict=True)
        )

    def each(self, items: Items) -> Iterator[Any]:
        """Local. Read tuples one by one."""
        return map(self.row, items)

    def sample(self) -> Any:
        """Local. A tuple of samples, one of each pipeline."""
        return tuple(pipeline.sample() for pipeline in self.pipelines)
