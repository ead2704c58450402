"""Batches as items: groups of items that are still unread, so that a rank can read its own rows of a batch only."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from mpidist.data.items.sharding import count_groups
from mpidist.data.items.stream import INFINITE, UNKNOWN, Epoch, Items, Seed, Stream, drop_items, join

# A block may hold all rows of a dataset, after a full shuffle. To cut all of it at once would delay the first batch.
_GROUPS_AT_ONCE = 256


@dataclass(frozen=True)
class Batch:
    """Groups of items. The last group may be smaller; `drop_remainder` leaves such a group out.

    Attributes:
        parent: The items.
        sizes: Sizes of the groups, used in turn; all positive.
        drop_remainder: Whether to leave out a last group that is smaller than its size.
    """

    parent: Stream
    sizes: tuple[int, ...]
    drop_remainder: bool

    @property
    def item_count(self) -> int:
        """Local. The number of items in all groups, or INFINITE, or UNKNOWN."""
        known = self.parent.cardinality()
        return known if known < 0 or not self.drop_remainder else self._items_before(self.cardinality())

    def cardinality(self) -> int:
        """Local. The number of groups."""
        known = self.parent.cardinality()
        return known if known < 0 else count_groups(known, self.sizes, self.drop_remainder)

    def blocks(self, epoch: Epoch, start: int) -> Iterator[Items]:
        """Local. Groups from number `start` on; seeks as the parent does."""
        parent = self.parent.blocks(epoch, self._items_before(start))
        turn = start % len(self.sizes)
        return _groups(parent, (*self.sizes[turn:], *self.sizes[:turn]), self.drop_remainder)

    def _items_before(self, group: int) -> int:
        rounds, turn = divmod(group, len(self.sizes))
        return rounds * sum(self.sizes) + sum(self.sizes[:turn])

    def seeds(self) -> list[Seed]:
        """Local. The parent's seeds."""
        return self.parent.seeds()

    def groups_after(self, count: int, batch_size: int) -> int | None:
        """Local. The number of groups, all of one size, with the items of `count` groups of `batch_size` items each.

        At the end that is the number of all groups. None: no number of groups has just these items.
        """
        total = self.parent.cardinality()
        if total >= 0 and count >= count_groups(total, (batch_size,), self.drop_remainder):
            return self.cardinality()
        groups, rest = divmod(count * batch_size, self.sizes[0])
        return None if rest else groups


@dataclass(frozen=True)
class Rebatch:
    """Regroups the items of a stream of groups; the parent's group borders do not count.

    Attributes:
        parent: The stream whose items are groups.
        sizes: Sizes of the new groups, used in turn. A zero makes an empty group while items are left.
        drop_remainder: Whether to leave out a last group that is smaller than its size.
    """

    parent: Stream
    sizes: tuple[int, ...]
    drop_remainder: bool

    def cardinality(self) -> int:
        """Local. The number of new groups, known where the parent is a `Batch` of a known number of items."""
        if self.parent.cardinality() == INFINITE:
            return INFINITE
        if not isinstance(self.parent, Batch) or self.parent.item_count < 0:
            return UNKNOWN
        return count_groups(self.parent.item_count, self.sizes, self.drop_remainder)

    def blocks(self, epoch: Epoch, start: int) -> Iterator[Items]:
        """Local. Groups from number `start` on; seeks by going through the parent's groups without reading them."""
        parent = (group for block in self.parent.blocks(epoch, 0) for group in block)
        return drop_items(_groups(parent, self.sizes, self.drop_remainder), start)

    def seeds(self) -> list[Seed]:
        """Local. The parent's seeds."""
        return self.parent.seeds()


@dataclass(frozen=True)
class Ungroup:
    """The items of a stream of groups, one by one."""

    parent: Stream

    def cardinality(self) -> int:
        """Local. The number of items, where the parent is a `Batch` of a known number; else INFINITE or UNKNOWN."""
        if isinstance(self.parent, Batch):
            return self.parent.item_count
        return UNKNOWN if self.parent.cardinality() >= 0 else self.parent.cardinality()

    def blocks(self, epoch: Epoch, start: int) -> Iterator[Items]:
        """Local. Items from number `start` on; seeks to the group where sizes are known, else iterates over groups."""
        first = 0
        if isinstance(self.parent, Batch):
            rounds, start = divmod(start, sum(self.parent.sizes))
            first = rounds * len(self.parent.sizes)
        groups = (group for block in self.parent.blocks(epoch, first) for group in block)
        return drop_items(groups, start)

    def seeds(self) -> list[Seed]:
        """Local. The parent's seeds."""
        return self.parent.seeds()


def _groups(blocks: Iterable[Items], sizes: tuple[int, ...], drop_remainder: bool) -> Iterator[list[Items]]:
    """Cut the items of all blocks into groups; the sizes are used in turn."""
    held: list[Items] = []
    count = 0
    turns = itertools.cycle(sizes)
    size = next(turns)
    is_uniform = len(sizes) == 1
    for block in blocks:
        begin = 0
        while begin < len(block):
            if is_uniform and not count and begin + size <= len(block):
                # Most groups are within one block. Many of them at once cost one slice each.
                end = begin + min((len(block) - begin) // size, _GROUPS_AT_ONCE) * size
                yield [block[first : first + size] for first in range(begin, end, size)]
                begin = end
                continue
            end = min(begin + size - count, len(block))
            held.append(block[begin:end])
            count += end - begin
            begin = end
            if count == size:
                yield [join(held)]
                held, count, size = [], 0, next(turns)
    if count and not drop_remainder:
        yield [join(held)]
