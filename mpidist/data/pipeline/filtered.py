"""`filter`: the elements for which a predicate holds, which are read to find out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from mpidist.data.items.stream import UNKNOWN, Epoch, Items, Seed
from mpidist.data.pipeline.pipeline import Pipeline
from mpidist.data.reading import element as elements


@dataclass(frozen=True)
class Filter:
    """The elements of a pipeline for which a predicate holds. All elements are read to find out."""

    pipeline: Pipeline
    predicate: Callable[..., Any]

    def cardinality(self) -> int:
        """Local. UNKNOWN, since only reading to the end would tell; 0 for an empty pipeline."""
        return 0 if self.pipeline.stream.cardinality() == 0 else UNKNOWN

    def blocks(self, epoch: Epoch, start: int) -> Iterator[Items]:
        """Local. Elements from number `start` on; seeks by reading and dropping."""
        for element in self.pipeline.iterate(epoch, 0, self.pipeline.read):
            if bool(elements.call(self.predicate, element)):
                if start == 0:
                    yield [element]
                start = max(0, start - 1)

    def seeds(self) -> list[Seed]:
        """Local. The seeds of the pipeline's stream."""
        return self.pipeline.stream.seeds()
