"""`cache`: examples are read once and kept in memory, each rank keeping those that it reads itself."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from mpidist import tree
from mpidist.data.items.stream import UNKNOWN, Epoch, Items, Seed, Stream
from mpidist.data.pipeline.pipeline import Pipeline
from mpidist.data.reading import element as elements


@dataclass(frozen=True)
class CachedSource:
    """The examples of a pipeline over row numbers, each read at most once.

    Attributes:
        pipeline: Reads them.
    """

    pipeline: Pipeline
    _kept: dict[int, Any] = field(default_factory=dict, init=False, repr=False)

    @property
    def in_memory(self) -> bool:
        """Local. False: the first pass reads."""
        return False

    def row(self, item: Any) -> Any:
        """Local. One element: a copy, since what the user does to it must not reach the next pass."""
        return _copied(self._read(item))

    def rows(self, items: Items) -> Any:
        """Local. Stacks the examples."""
        return elements.stack(self._read_all(items))

    def each(self, items: Items) -> Iterator[Any]:
        """Local. Copies of the examples, one by one."""
        return map(_copied, self._read_all(items))

    def sample(self) -> Any:
        """Local. An element."""
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
                # A copy: a view would keep the whole batch.
                self._kept[int(item)] = _copied(element)
        return [self._kept[int(item)] for item in items]


@dataclass(frozen=True)
class FirstPass:
    """The items of a stream in the order of its first pass, in every pass: a shuffle before `cache` is made once."""

    parent: Stream

    def cardinality(self) -> int:
        """Local. The parent's."""
        return self.parent.cardinality()

    def blocks(self, epoch: Epoch, start: int) -> Iterator[Items]:
        """Local. Seeks as its parent does."""
        return self.parent.blocks(Epoch(salt=epoch.salt), start)

    def seeds(self) -> list[Seed]:
        """Local. Those of its parent."""
        return self.parent.seeds()


class _Memory:
    """Elements as far as they were read; a later pass goes on where an earlier one left off."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.elements: dict[int, list[Any]] = {}
        self.readers: dict[int, Iterator[Any]] = {}

    def get(self, pipeline: Pipeline, salt: int, number: int) -> list[Any]:
        """The element with this number, or nothing at the end."""
        with self.lock:
            kept = self.elements.setdefault(salt, [])
            if number >= len(kept):
                if salt not in self.readers:
                    self.readers[salt] = pipeline.iterate(Epoch(salt=salt), 0, pipeline.read)
                while number >= len(kept):
                    try:
                        kept.append(next(self.readers[salt]))
                    except StopIteration:
                        return []
                    except Exception:
                        # The next try reads anew instead of taking the broken iterator's end for the data's.
                        del self.readers[salt], self.elements[salt]
                        raise
            return [_copied(kept[number])]


@dataclass(frozen=True)
class Kept:
    """The elements of a pipeline, read in order, once, and kept."""

    pipeline: Pipeline
    _memory: _Memory = field(default_factory=_Memory, init=False, repr=False)

    def cardinality(self) -> int:
        """Local. The pipeline's."""
        return self.pipeline.stream.cardinality()

    def blocks(self, epoch: Epoch, start: int) -> Iterator[Items]:
        """Local. Seeks at no cost in what was read before."""
        known = self.cardinality()
        while known < 0 or start < known:
            found = self._memory.get(self.pipeline, epoch.salt, start)
            if not found:
                return
            yield found
            start += 1

    def seeds(self) -> list[Seed]:
        """Local. Those of the pipeline's stream."""
        return self.pipeline.stream.seeds()


@dataclass(frozen=True)
class Filter:
    """The elements of a pipeline for which a predicate holds; all have to be read to know."""

    pipeline: Pipeline
    predicate: Callable[..., Any]

    def cardinality(self) -> int:
        """Local. Only reading to the end would tell; 0 where there is nothing."""
        return 0 if self.pipeline.stream.cardinality() == 0 else UNKNOWN

    def blocks(self, epoch: Epoch, start: int) -> Iterator[Items]:
        """Local. Seeks by reading and dropping."""
        for element in self.pipeline.iterate(epoch, 0, self.pipeline.read):
            if bool(elements.call(self.predicate, element)):
                if start == 0:
                    yield [element]
                start = max(0, start - 1)

    def seeds(self) -> list[Seed]:
        """Local. Those of the pipeline's stream."""
        return self.pipeline.stream.seeds()


def _copied(element: Any) -> Any:
    return tree.map_leaves(lambda leaf: leaf.copy(), element)
