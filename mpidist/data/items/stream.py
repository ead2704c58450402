"""Streams of items, from any position: which examples come in which order, before anything is read.

An item stands for an example. Over arrays it is a row number, so that a whole pipeline of selections costs integers
only; over an iterable it is the element itself. Items travel in blocks, so that row numbers stay in NumPy.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias, cast

import numpy as np
import numpy.typing as npt

INFINITE = -1
UNKNOWN = -2

# Rows in a block: enough that the cost of a block does not count, few enough to stay in the cache.
BLOCK_ROWS = 8192

Items: TypeAlias = "Sequence[Any] | npt.NDArray[np.int64]"


class Epoch(NamedTuple):
    """Which pass over the data this is; all that an order may depend on beside a seed.

    Attributes:
        path: Number of the iteration, then the number of the repetition inside each `repeat`, outermost first.
        salt: Tells ranks apart that read data of their own; 0 where all ranks have to agree on the order.
    """

    path: tuple[int, ...] = (0,)
    salt: int = 0

    def repetition(self, number: int) -> Epoch:
        """Local. The pass inside this one that `repeat` makes as its `number`-th."""
        return Epoch((*self.path, number), self.salt)


class Seed(Protocol):
    """The seed of one shuffle.

    Attributes:
        value: The seed. Where the user gave none it was drawn, and ranks replace it by one they share.
        drawn: The user gave none.
    """

    value: int
    drawn: bool


class Stream(Protocol):
    """Items in an order that depends on the epoch."""

    def cardinality(self) -> int:
        """Local. How many items there are, or INFINITE, or UNKNOWN."""
        ...

    def blocks(self, epoch: Epoch, start: int) -> Iterator[Items]:
        """Local. The items from number `start` on; blocks may be of any length, empty ones included."""
        ...

    def seeds(self) -> list[Seed]:
        """Local. The seeds of its shuffles, from the source on."""
        ...


def join(parts: list[Items]) -> Items:
    """Local. One block of several, at least one."""
    if len(parts) == 1:
        return parts[0]
    if isinstance(parts[0], np.ndarray):
        return cast("npt.NDArray[np.int64]", np.concatenate(cast("list[npt.NDArray[np.int64]]", parts)))
    return [item for part in parts for item in part]


def drop_items(blocks: Iterator[Items], count: int) -> Iterator[Items]:
    """Local. The blocks without their first `count` items: seeking where only reading tells the position."""
    for block in blocks:
        if count < len(block):
            yield block[count:] if count else block
        count = max(0, count - len(block))


@dataclass(frozen=True)
class Rows:
    """The row numbers 0 to `count` - 1."""

    count: int

    def cardinality(self) -> int:
        """Local. `count`."""
        return self.count

    def blocks(self, epoch: Epoch, start: int) -> Iterator[Items]:
        """Local. Seeks at no cost."""
        for begin in range(start, self.count, BLOCK_ROWS):
            yield np.arange(begin, min(begin + BLOCK_ROWS, self.count))

    def seeds(self) -> list[Seed]:
        """Local. None."""
        return []


@dataclass(frozen=True)
class Elements:
    """The elements that an iterable gives, one at a time; it is opened anew for every pass."""

    open: Callable[[], Iterable[Any]]

    def cardinality(self) -> int:
        """Local. Only reading to the end would tell."""
        return UNKNOWN

    def blocks(self, epoch: Epoch, start: int) -> Iterator[Items]:
        """Local. Seeks by reading and dropping."""
        for element in itertools.islice(self.open(), start, None):
            yield [element]

    def seeds(self) -> list[Seed]:
        """Local. None that we know."""
        return []


@dataclass(frozen=True)
class Take:
    """The first `count` items; -1 takes all."""

    parent: Stream
    count: int

    def cardinality(self) -> int:
        """Local. The smaller of the two counts."""
        known = self.parent.cardinality()
        if self.count == -1 or known == UNKNOWN:
            return known
        return self.count if known == INFINITE else min(self.count, known)

    def blocks(self, epoch: Epoch, start: int) -> Iterator[Items]:
        """Local. Seeks as its parent does."""
        if self.count == -1:
            yield from self.parent.blocks(epoch, start)
            return
        left = self.count - start
        if left <= 0:
            return
        for block in self.parent.blocks(epoch, start):
            yield block[:left]
            left -= len(block)
            if left <= 0:
                return

    def seeds(self) -> list[Seed]:
        """Local. Those of its parent."""
        return self.parent.seeds()


@dataclass(frozen=True)
class Skip:
    """All but the first `count` items; -1 skips all."""

    parent: Stream
    count: int

    def cardinality(self) -> int:
        """Local. What is left of the parent's."""
        known = self.parent.cardinality()
        if self.count == -1:
            return 0
        return known if known < 0 else max(0, known - self.count)

    def blocks(self, epoch: Epoch, start: int) -> Iterator[Items]:
        """Local. Seeks as its parent does."""
        return iter(()) if self.count == -1 else self.parent.blocks(epoch, start + self.count)

    def seeds(self) -> list[Seed]:
        """Local. Those of its parent."""
        return self.parent.seeds()


@dataclass(frozen=True)
class Shard:
    """The items whose number i has i mod `num_shards` = `index`."""

    parent: Stream
    num_shards: int
    index: int

    def cardinality(self) -> int:
        """Local. The parent's, divided; the first shards get one more."""
        known = self.parent.cardinality()
        return known if known < 0 else len(range(self.index, known, self.num_shards))

    def blocks(self, epoch: Epoch, start: int) -> Iterator[Items]:
        """Local. Seeks as its parent does."""
        first = self.index
        for block in self.parent.blocks(epoch, start * self.num_shards):
            yield block[first :: self.num_shards]
            first = (first - len(block)) % self.num_shards

    def seeds(self) -> list[Seed]:
        """Local. Those of its parent."""
        return self.parent.seeds()


@dataclass(frozen=True)
class Repeat:
    """The parent's items again and again, each time as a pass of its own; `count` None never ends."""

    parent: Stream
    count: int | None

    def cardinality(self) -> int:
        """Local. `count` times the parent's."""
        known = self.parent.cardinality()
        if known == 0 or self.count == 0:
            return 0
        if self.count is None:
            return INFINITE
        return known if known < 0 else known * self.count

    def blocks(self, epoch: Epoch, start: int) -> Iterator[Items]:
        """Local. Seeks to the repetition; over a parent of unknown length by reading and dropping."""
        if self.parent.cardinality() == UNKNOWN and start > 0:
            yield from drop_items(self.blocks(epoch, 0), start)
            return
        length = self.parent.cardinality()
        first, start = divmod(start, length) if length > 0 else (0, start)
        for number in itertools.count(first) if self.count is None else range(first, self.count):
            is_empty = True
            for block in self.parent.blocks(epoch.repetition(number), start):
                is_empty = is_empty and len(block) == 0
                yield block
            if is_empty:
                break
            start = 0
        else:
            return
        if self.count is None and self.parent.cardinality() == UNKNOWN:
            # Others count on it going on for ever: to end quietly would leave them waiting.
            raise ValueError("repeat: the iterable gives no element, so repeating it for ever gives none either")

    def seeds(self) -> list[Seed]:
        """Local. Those of its parent."""
        return self.parent.seeds()


