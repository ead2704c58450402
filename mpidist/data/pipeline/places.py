"""Datasets made of datasets, in sequence or by turns: an item says where an example is, and nothing is read."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np

from mpidist.data.items.position import INNER_SEED
from mpidist.data.items.shuffle import ShuffleSeed, is_steady
from mpidist.data.items.stream import INFINITE, UNKNOWN, Epoch, Items, Seed, drop_items
from mpidist.data.pipeline.pipeline import Pipeline
from mpidist.data.reading import element as elements
from mpidist.data.reading.source import NoElementError


class ExamplePlace(NamedTuple):
    """The place of an example.

    Attributes:
        pipeline: The pipeline that reads the example.
        item: The example's item in that pipeline.
    """

    pipeline: Pipeline
    item: Any


@dataclass(frozen=True)
class PlaceSource:
    """Reads examples of several pipelines.

    Attributes:
        pipelines: A function that returns the pipelines; the first that has an example shows shapes and dtypes.
    """

    pipelines: Callable[[], Iterable[Pipeline]]

    @property
    def in_memory(self) -> bool:
        """Local. False: pipelines that are opened later may read from anywhere."""
        return False

    def row(self, item: Any) -> Any:
        """Local. Read one element in its pipeline."""
        return item.pipeline.read(item.item)

    def rows(self, items: Items) -> Any:
        """Local. Read the items with one read per pipeline, and put the rows back in order."""
        numbers: dict[int, list[int]] = {}
        for number, item in enumerate(items):
            numbers.setdefault(id(item.pipeline), []).append(number)
        if len(numbers) > len(items) // 2 or items[0].pipeline.is_batched:
            return elements.stack([self.row(item) for item in items])
        batches = [
            items[chosen[0]].pipeline.read_rows(as_items([items[number].item for number in chosen]))
            for chosen in numbers.values()
        ]
        if len(batches) == 1:
            return batches[0]
        # The rows are in the order of the pipelines; `order` puts each row where its item was.
        order = np.argsort(np.concatenate(list(numbers.values())))
        return elements.concatenate(batches, order)

    def each(self, items: Items) -> Iterator[Any]:
        """Local. Read the elements one by one."""
        return map(self.row, items)

    def sample(self) -> Any:
        """Local. An element of the first pipeline that has one; of batches the first, since only it shows the size."""
        for pipeline in self.pipelines():
            with contextlib.suppress(NoElementError):
                for batch in pipeline.iterate(Epoch(), 0, pipeline.read) if pipeline.is_batched else ():
                    return batch
                return pipeline.sample()
        raise NoElementError(
            "expected at least one example, which shows shapes and dtypes, got none. Check the list of files, or the "
            "datasets of interleave and concatenate"
        )


@dataclass(frozen=True)
class Interleave:
    """The examples of many pipelines, each made from an element; some are open at a time and take turns.

    Attributes:
        pipeline: The pipeline whose elements say what to open, for example file names.
        opened: A function that makes a pipeline from an element.
        cycle_length: Number of pipelines that are open at a time.
        block_length: Number of examples that a pipeline gives at its turn.
        count: A function that returns the number of examples of an element without opening it as a pipeline; None:
            unknown.
        seed: The seed from which the seeds of opened pipelines follow, unless the user gave them.
    """

    pipeline: Pipeline
    opened: Callable[[Any], Pipeline]
    cycle_length: int
    block_length: int
    count: Callable[[Any], int] | None = None
    seed: ShuffleSeed = field(default_factory=partial(ShuffleSeed, None, INNER_SEED))

    def cardinality(self) -> int:
        """Local. The number of examples; the first call counts those of every file.

        Returns:
            0 where there is nothing to open, INFINITE where there are endlessly many elements to open. Else the sum of
            `count` over the elements, if there is a `count` and each pass opens the same elements. Else UNKNOWN.
        """
        known = self.pipeline.stream.cardinality()
        return known if known in (0, INFINITE) else self._total

    @cached_property
    def _total(self) -> int:
        if self.count is None or not is_steady(self.pipeline.stream):
            return UNKNOWN
        # An error on one rank must not be raised here, where the other ranks do not look for it. The same file fails
        # again when it is read, and reading reports it on all ranks.
        with contextlib.suppress(Exception):
            return sum(map(self.count, self.pipeline.iterate(Epoch(), 0, self.pipeline.read)))
        return UNKNOWN

    def blocks(self, epoch: Epoch, start: int) -> Iterator[Items]:
        """Local. Items from number `start` on; seeks by counting items, and reads only where a pipeline is an iterable.

        With a cycle of one, it skips a pipeline of known length without following its stream.
        """
        found = self._in_sequence(epoch, start) if self.cycle_length == 1 else self._by_turns(epoch, start)
        for pipeline, items in found:
            if len(items):
                yield [ExamplePlace(pipeline, item) for item in items]

    def seeds(self) -> list[Seed]:
        """Local. The seeds of the pipeline that says what to open, then that for the opened pipelines."""
        return [*self.pipeline.stream.seeds(), self.seed]

    def pipelines(self) -> Iterator[Pipeline]:
        """Local. The pipelines of the first pass, each opened when it is asked for."""
        return map(self.opened, self.pipeline.iterate(Epoch(), 0, self.pipeline.read))

    def _inputs(self, epoch: Epoch) -> Iterator[tuple[Epoch, Pipeline]]:
        for number, element in enumerate(self.pipeline.iterate(epoch, 0, self.pipeline.read)):
            opened = self.opened(element)
            yield self.seed.opened(epoch, number, opened.stream.seeds()), opened

    def _in_sequence(self, epoch: Epoch, skip: int) -> Iterator[tuple[Pipeline, Items]]:
        """The items of one pipeline after another, without the first `skip` items."""
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

    def _by_turns(self, epoch: Epoch, skip: int) -> Iterator[tuple[Pipeline, Items]]:
        """The items of `cycle_length` pipelines that take turns, without the first `skip` items."""
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
    """A pipeline that takes part in the turns.

    Attributes:
        pipeline: The pipeline.
        blocks: Its items that were not requested yet.
        rest: The rest of the last block.
        is_ended: Whether all items were taken.
    """

    pipeline: Pipeline
    blocks: Iterator[Items]
    rest: Items = ()
    is_ended: bool = False

    def take(self, count: int) -> Iterator[Items]:
        """The next `count` items, in one or several blocks; fewer at the end."""
        while count > 0:
            if len(self.rest) == 0:
                following = next(self.blocks, None)
                if following is None:
                    self.is_ended = True
                    return
                self.rest = following
                continue
            block = self.rest[:count]
            self.rest = self.rest[count:]
            count -= len(block)
            yield block


@dataclass(frozen=True)
class Concatenate:
    """The items of one pipeline, then those of another pipeline."""

    pipelines: tuple[Pipeline, Pipeline]

    def cardinality(self) -> int:
        """Local. The sum of both cardinalities."""
        counts = [pipeline.stream.cardinality() for pipeline in self.pipelines]
        if INFINITE in counts:
            return INFINITE
        return UNKNOWN if UNKNOWN in counts else sum(counts)

    def blocks(self, epoch: Epoch, start: int) -> Iterator[Items]:
        """Local. Items from number `start` on; seeks as the pipelines' streams do.

        Over a first pipeline of unknown length it seeks by reading and dropping.
        """
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
                yield [ExamplePlace(pipeline, item) for item in items]

    def seeds(self) -> list[Seed]:
        """Local. The seeds of the first pipeline, then those of the second."""
        return [seed for pipeline in self.pipelines for seed in pipeline.stream.seeds()]


def as_items(items: list[Any]) -> Items:
    """Local. A block of items; row numbers become an array again, as they are in their stream."""
    return np.array(items, np.int64) if isinstance(items[0], (int, np.integer)) else items
