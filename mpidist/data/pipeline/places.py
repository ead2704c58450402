"""Datasets of datasets, one behind another or by turns: an item says in which of them an example lies, unread."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from mpidist import tree
from mpidist.data.items.shuffle import is_steady
from mpidist.data.items.stream import INFINITE, UNKNOWN, Epoch, Items, Seed, drop_items
from mpidist.data.pipeline.pipeline import Pipeline
from mpidist.data.reading import element as elements


class Place(NamedTuple):
    """Where an example lies.

    Attributes:
        pipeline: The pipeline that reads it.
        item: Its item there.
    """

    pipeline: Pipeline
    item: Any


@dataclass(frozen=True)
class PlaceSource:
    """Reads examples of several pipelines.

    Attributes:
        first: Gives a pipeline, for shapes and dtypes.
    """

    first: Callable[[], Pipeline]

    @property
    def in_memory(self) -> bool:
        """Local. False: pipelines that are opened later may read anything."""
        return False

    def row(self, item: Any) -> Any:
        """Local. One element."""
        return item.pipeline.read(item.item)

    def rows(self, items: Items) -> Any:
        """Local. One read for the items of each pipeline, put back in order."""
        numbers: dict[int, list[int]] = {}
        for number, item in enumerate(items):
            numbers.setdefault(id(item.pipeline), []).append(number)
        if len(numbers) > len(items) // 2 or items[0].pipeline.is_batched:
            return elements.stack([self.row(item) for item in items])
        parts = [
            items[chosen[0]].pipeline.read_rows(as_items([items[number].item for number in chosen]))
            for chosen in numbers.values()
        ]
        if len(parts) == 1:
            return parts[0]
        # One array of rows in the order of the pipelines, then each row to its place.
        order = np.argsort(np.concatenate(list(numbers.values())))
        return tree.map_leaves(lambda *leaves: np.concatenate(leaves)[order], *parts)

    def each(self, items: Items) -> Iterator[Any]:
        """Local. The elements of the items, one by one."""
        return map(self.row, items)

    def sample(self) -> Any:
        """Local. An element of the first pipeline."""
        return self.first().sample()


@dataclass(frozen=True)
class Interleave:
    """Examples of pipelines that a function makes of elements: some are open at a time, and take turns in blocks.

    Attributes:
        pipeline: Its elements say what to open.
        opened: Makes a pipeline of one.
        cycle_length: How many are open at a time.
        block_length: How many examples one gives at its turn.
        count: Tells how many examples an element stands for, without opening it; None: that is not known.
    """

    pipeline: Pipeline
    opened: Callable[[Any], Pipeline]
    cycle_length: int
    block_length: int
    count: Callable[[Any], int] | None = None

    def cardinality(self) -> int:
        """Local. 0 where there is nothing to open, INFINITE where that never ends.

        Else the sum of what `count` says, where each pass opens the same; else UNKNOWN.
        """
        known = self.pipeline.stream.cardinality()
        return known if known in (0, INFINITE) else self._total

    @cached_property
    def _total(self) -> int:
        if self.count is None or not is_steady(self.pipeline.stream):
            return UNKNOWN
        # What fails here fails in reading, too, and there every rank gets to know.
        with contextlib.suppress(Exception):
            return sum(map(self.count, self.pipeline.iterate(Epoch(), 0, self.pipeline.read)))
        return UNKNOWN

    def blocks(self, epoch: Epoch, start: int) -> Iterator[Items]:
        """Local. Seeks by counting; what is opened is read only where it is an iterable.

        With a cycle of one it goes over a pipeline of known length without opening its stream.
        """
        turns = self._behind(epoch, start) if self.cycle_length == 1 else self._turns(epoch, start)
        for pipeline, items in turns:
            if len(items):
                yield [Place(pipeline, item) for item in items]

    def seeds(self) -> list[Seed]:
        """Local. Those of the pipeline that says what to open; what is opened is not known beforehand."""
        return self.pipeline.stream.seeds()

    def first(self) -> Pipeline:
        """Local. The first pipeline of the first pass.

        Raises:
            ValueError: There is none.
        """
        for element in self.pipeline.iterate(Epoch(), 0, self.pipeline.read):
            return self.opened(element)
        raise ValueError("interleave: there is nothing to open, so there is no example")

    def _inputs(self, epoch: Epoch) -> Iterator[tuple[Epoch, Pipeline]]:
        for number, element in enumerate(self.pipeline.iterate(epoch, 0, self.pipeline.read)):
            yield epoch.repetition(number), self.opened(element)

    def _behind(self, epoch: Epoch, skip: int) -> Iterator[tuple[Pipeline, Items]]:
        for inner, pipeline in self._inputs(epoch):
            known = pipeline.stream.cardinality()
            if 0 <= known <= skip:
                skip -= known
                continue
            if known == UNKNOWN:
                for items in pipeline.stream.blocks(inner, 0):
                    yield pipeline, items[skip:]
                    skip = max(0, skip - len(items))
                continue
            for items in pipeline.stream.blocks(inner, skip):
                yield pipeline, items
            skip = 0

    def _turns(self, epoch: Epoch, skip: int) -> Iterator[tuple[Pipeline, Items]]:
        inputs = self._inputs(epoch)
        slots: list[_Open | None] = [None] * self.cycle_length
        at = 0
        is_ended = False
        while not is_ended or any(slot is not None for slot in slots):
            slot = slots[at]
            if slot is None and not is_ended:
                following = next(inputs, None)
                is_ended = following is None
                if following is not None:
                    slots[at] = _Open(following[1], following[1].stream.blocks(following[0], 0))
                continue
            for items in () if slot is None else slot.take(self.block_length):
                if slot is not None:
                    yield slot.pipeline, items[skip:]
                skip = max(0, skip - len(items))
            if slot is not None and slot.is_ended:
                slots[at] = None
            at = (at + 1) % self.cycle_length


@dataclass
class _Open:
    """A pipeline that is being read."""

    pipeline: Pipeline
    blocks: Iterator[Items]
    rest: Items = ()
    is_ended: bool = False

    def take(self, count: int) -> Iterator[Items]:
        """The next `count` items, in parts; fewer at the end."""
        while count > 0:
            if len(self.rest) == 0:
                following = next(self.blocks, None)
                if following is None:
                    self.is_ended = True
                    return
                self.rest = following
                continue
            part = self.rest[:count]
            self.rest = self.rest[count:]
            count -= len(part)
            yield part


@dataclass(frozen=True)
class Concatenate:
    """The items of one pipeline, then those of another."""

    pipelines: tuple[Pipeline, Pipeline]

    def cardinality(self) -> int:
        """Local. The sum."""
        counts = [pipeline.stream.cardinality() for pipeline in self.pipelines]
        if INFINITE in counts:
            return INFINITE
        return UNKNOWN if UNKNOWN in counts else sum(counts)

    def blocks(self, epoch: Epoch, start: int) -> Iterator[Items]:
        """Local. Seeks as its parts do; over a first one of unknown length by reading and dropping."""
        first, _ = self.pipelines
        known = first.stream.cardinality()
        if known == UNKNOWN and start > 0:
            yield from drop_items(self.blocks(epoch, 0), start)
            return
        for number, pipeline in enumerate(self.pipelines):
            begin = start if number == 0 else max(0, start - max(0, known))
            if number == 0 and 0 <= known <= start:
                continue
            for items in pipeline.stream.blocks(epoch, begin):
                yield [Place(pipeline, item) for item in items]

    def seeds(self) -> list[Seed]:
        """Local. Those of the first, then of the second."""
        return [seed for pipeline in self.pipelines for seed in pipeline.stream.seeds()]


def as_items(items: list[Any]) -> Items:
    """Local. Items as they were in their stream: row numbers become an array again."""
    return np.array(items, np.int64) if isinstance(items[0], (int, np.integer)) else items
