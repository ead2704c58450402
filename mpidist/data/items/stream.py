"""Streams of items: the order of examples, from any position on, before anything is read.

An item identifies an example. Over arrays it is a row number, so that a whole pipeline of selections costs only
integers. Over an iterable it is the element itself. Items travel in blocks, so that row numbers stay in NumPy arrays.

A stream must be a function of the epoch and the seeds alone. All ranks follow the same stream and each reads its own
rows of it; a stream that asked for the time, the rank or a global random state would give ranks different batches.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeAlias, cast

import numpy as np
import numpy.typing as npt

INFINITE = -1
UNKNOWN = -2

# Rows in a block: enough of them that the cost per block is small, few enough to stay in the processor's cache.
BLOCK_ROWS = 8192

Items: TypeAlias = "Sequence[Any] | npt.NDArray[np.int64]"


class Epoch(NamedTuple):
    """One pass over the data. An order depends on the epoch and on seeds, and on nothing else.

    Attributes:
        path: Number of the iteration, then the number of the repetition inside each `repeat`, outermost first.
        salt: Distinguishes ranks that read data of their own; 0 where all ranks must agree on the order.
        inner: Inside a dataset that `interleave` opened: the values that its drawn seeds have there. A seed drawn while
            a dataset is opened would differ between ranks, and after a resume.
    """

    path: tuple[int, ...] = (0,)
    salt: int = 0
    inner: Mapping[Seed, int] = MappingProxyType({})

    def repetition(self, number: int) -> Epoch:
        """Local. The pass number `number` of a `repeat` inside this pass."""
        return self._replace(path=(*self.path, number))


class Seed(Protocol):
    """The seed of one shuffle, or of the shuffles in all datasets that one `interleave` opens.

    Attributes:
        value: The seed. A drawn seed is replaced by that of rank 0, so that all ranks share it.
        drawn: Whether the seed was drawn, because the user gave none.
        name: The beginning of its name in a saved position.
        use: Further facts on which the order depends.
    """

    value: int
    drawn: bool
    name: str
    use: str


class Stream(Protocol):
    """Items in an order that depends on the epoch.

    A stream is immutable; each call of `blocks` begins a pass of its own.
    """

    def cardinality(self) -> int:
        """Local. The number of items, or INFINITE, or UNKNOWN. It may open files to count."""
        ...

    def blocks(self, epoch: Epoch, start: int) -> Iterator[Items]:
        """Local. The items from number `start` on. Blocks may have any length, also 0."""
        ...

    def seeds(self) -> list[Seed]:
        """Local. Its seeds, in their order from the source on.

        A saved position holds the drawn ones by their name and number in this list, so the order must not change.
        """
        ...


def join(blocks: list[Items]) -> Items:
    """Local. Join blocks, at least one, into one block."""
    if len(blocks) == 1:
        return blocks[0]
    if isinstance(blocks[0], np.ndarray):
        return cast("npt.NDArray[np.int64]", np.concatenate(cast("list[npt.NDArray[np.int64]]", blocks)))
    return [item for block in blocks for item in block]


def drop_items(blocks: Iterator[Items], count: int) -> Iterator[Items]:
    """Local. The blocks without their first `count` items: to seek where nothing is known beforehand."""
    for block in blocks:
        if count < len(block):
            yield block[count:] if count else block
        count = max(0, count - len(block))


@dataclass(frozen=True)
class RowNumbers:
    """The row numbers 0 to `count` - 1."""

    count: int

    def cardinality(self) -> int:
        """Local. `count`."""
        return self.count

    def blocks(self, epoch: Epoch, start: int) -> Iterator[Items]:
        """Local. Row numbers from `start` on; seeks at no cost."""
        del epoch  # the order is the same in every pass
        for begin in range(start, self.count, BLOCK_ROWS):
            yield np.arange(begin, min(begin + BLOCK_ROWS, self.count))

    def seeds(self) -> list[Seed]:
        """Local. An empty list."""
        return []


@dataclass(frozen=True)
class Elements:
    """The elements of an iterable, one at a time. It is opened again for every pass."""

    open: Callable[[], Iterable[Any]]

    def cardinality(self) -> int:
        """Local. UNKNOWN: only reading to the end would give it."""
        return UNKNOWN

    def blocks(self, epoch: Epoch, start: int) -> Iterator[Items]:
        """Local. Elements from number `start` on; seeks by reading and dropping."""
        del epoch  # the order of an iterable is its own
        for element in itertools.islice(self.open(), start, None):
            yield [element]

    def seeds(self) -> list[Seed]:
        """Local. An empty list: an iterable's own seeds are not known here."""
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
        """Local. Items from number `start` on; seeks as the parent does."""
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
        """Local. The parent's seeds."""
        return self.parent.seeds()


@dataclass(frozen=True)
class Skip:
    """All but the first `count` items; -1 skips all."""

    parent: Stream
    count: int

    def cardinality(self) -> int:
        """Local. The parent's cardinality less the items skipped."""
        known = self.parent.cardinality()
        if self.count == -1:
            return 0
        return known if known < 0 else max(0, known - self.count)

    def blocks(self, epoch: Epoch, start: int) -> Iterator[Items]:
        """Local. Items from number `start` on; seeks as the parent does."""
        return iter(()) if self.count == -1 else self.parent.blocks(epoch, start + self.count)

    def seeds(self) -> list[Seed]:
        """Local. The parent's seeds."""
        return self.parent.seeds()


@dataclass(frozen=True)
class Shard:
    """Every `num_shards`-th item, beginning with number `index`."""

    parent: Stream
    num_shards: int
    index: int

    def cardinality(self) -> int:
        """Local. The number of items in this shard; the first shards may have one more than the others."""
        known = self.parent.cardinality()
        return known if known < 0 else len(range(self.index, known, self.num_shards))

    def blocks(self, epoch: Epoch, start: int) -> Iterator[Items]:
        """Local. Items from number `start` on; seeks as the parent does."""
        first = self.index
        for block in self.parent.blocks(epoch, start * self.num_shards):
            yield block[first :: self.num_shards]
            first = (first - len(block)) % self.num_shards

    def seeds(self) -> list[Seed]:
        """Local. The parent's seeds."""
        return self.parent.seeds()


@dataclass(frozen=True)
class Repeat:
    """The parent's items again and again, each time as a pass of its own. A `count` of None never ends."""

    parent: Stream
    count: int | None

    def cardinality(self) -> int:
        """Local. `count` times the parent's cardinality."""
        known = self.parent.cardinality()
        if known == 0 or self.count == 0:
            return 0
        if self.count is None:
            return INFINITE
        return known if known < 0 else known * self.count

    def blocks(self, epoch: Epoch, start: int) -> Iterator[Items]:
        """Local. Items from number `start` on; seeks to the repetition.

        Over a parent of unknown length it seeks by reading and dropping.
        """
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
            # The next pass of a finite repetition may have items again, after a filter that gets other ones.
            if is_empty and (self.count is None or length == 0):
                break
            start = 0
        else:
            return
        if self.count is None and self.parent.cardinality() == UNKNOWN:
            # All ranks count on a stream that never ends. To end quietly here would leave the others waiting.
            raise ValueError(
                "repeat: expected an iterable with at least one element to repeat without end, got no element in a "
                "pass. Check the source, or what filters it"
            )

    def seeds(self) -> list[Seed]:
        """Local. The parent's seeds."""
        return self.parent.seeds()


def take_seeds(seeds: Iterable[Seed], values: Iterable[int]) -> None:
    """Local. Give seeds that were drawn the values of others, as far as both go."""
    for seed, value in zip(seeds, values, strict=False):
        seed.value = value
