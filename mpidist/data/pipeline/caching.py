"""`cache`: examples are read once and kept in memory; each rank keeps those that it reads itself."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from mpidist import tree
from mpidist.data.items.stream import Epoch, Items, Seed, Stream
from mpidist.data.pipeline.pipeline import Pipeline
from mpidist.data.reading import element as elements


@dataclass(frozen=True)
class CachedSource:
    """Reads the examples of a pipeline over row numbers, each at most once.

    Attributes:
        pipeline: The pipeline that reads the examples.
    """

    pipeline: Pipeline
    _kept: dict[int, Any] = field(default_factory=dict, init=False, repr=False)

    @property
    def in_memory(self) -> bool:
        """Local. False: the first pass reads."""
        return False

    def row(self, item: Any) -> Any:
        """Local. A copy of one example: the next pass must find the kept one unchanged."""
        return _copied(self._read(item))

    def rows(self, items: Items) -> Any:
        """Local. Stack examples, which copies them."""
        return elements.stack(self._read_all(items))

    def each(self, items: Items) -> Iterator[Any]:
        """Local. Copies of examples, one by one."""
        return map(_copied, self._read_all(items))

    def sample(self) -> Any:
        """Local. A sample of the pipeline."""
        return self.pipeline.sample()

    def _read(self, item: Any) -> Any:
        number = int(item)
        if number not in self._kept:
            self._kept[number] = self.pipeline.read(item)
        return self._kept[number]

    def _read_all(self, items: Items) -> list[Any]:
        missing = items if not self._kept else [item for item in items if int(item) not in self._kept]
        if len(missing):
            for item, element in zip(missing, elements.split(self.pipeline.read_rows(missing)), strict=True):
                # A copy: a view of one row would keep the memory of the whole batch.
                self._kept[int(item)] = _copied(element)
        return [self._kept[int(item)] for item in items]


@dataclass(frozen=True)
class FirstPass:
    """The items of a stream, in every pass in the order of the first pass: a shuffle before `cache` happens once."""

    parent: Stream

    def cardinality(self) -> int:
        """Local. The parent's cardinality."""
        return self.parent.cardinality()

    def blocks(self, epoch: Epoch, start: int) -> Iterator[Items]:
        """Local. Items from number `start` on; seeks as the parent does."""
        return self.parent.blocks(_first(epoch), start)

    def seeds(self) -> list[Seed]:
        """Local. The parent's seeds."""
        return self.parent.seeds()


class _ReadElements:
    """The elements that were read so far; a later pass continues reading where an earlier one stopped.

    Several passes may run at a time, each in a thread of its own; hence the lock.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.elements: dict[tuple[int | None, ...], list[Any]] = {}
        self.readers: dict[tuple[int | None, ...], Iterator[Any]] = {}

    def get(self, pipeline: Pipeline, epoch: Epoch, key: tuple[int | None, ...], number: int) -> list[Any]:
        """A copy of the element with this number, as a list of one; an empty list at the end."""
        with self.lock:
            kept = self.elements.setdefault(key, [])
            if number >= len(kept):
                if key not in self.readers:
                    self.readers[key] = pipeline.iterate(_first(epoch), 0, pipeline.read)
                while number >= len(kept):
                    try:
                        kept.append(next(self.readers[key]))
                    except StopIteration:
                        return []
                    except BaseException:
                        # Interrupts, too. A generator that raised is finished. Without this, the next try would take
                        # the end of the broken generator for the end of the data.
                        del self.readers[key], self.elements[key]
                        raise
            return [_copied(kept[number])]


@dataclass(frozen=True)
class Kept:
    """The elements of a pipeline, read once, in order, and kept."""

    pipeline: Pipeline
    _elements: _ReadElements = field(default_factory=_ReadElements, init=False, repr=False)

    def cardinality(self) -> int:
        """Local. The pipeline's cardinality."""
        return self.pipeline.stream.cardinality()

    def blocks(self, epoch: Epoch, start: int) -> Iterator[Items]:
        """Local. Elements from number `start` on; seeks at no cost among those that were read before."""
        known = self.cardinality()
        # All that determines the order of the first pass.
        key = (epoch.salt, *(epoch.inner.get(seed) for seed in self.seeds()))
        while known < 0 or start < known:
            found = self._elements.get(self.pipeline, epoch, key, start)
            if not found:
                return
            yield found
            start += 1

    def seeds(self) -> list[Seed]:
        """Local. The seeds of the pipeline's stream."""
        return self.pipeline.stream.seeds()


def _first(epoch: Epoch) -> Epoch:
    return epoch._replace(path=(0,))


def _copied(element: Any) -> Any:
    return tree.map_leaves(copy.copy, element)
