"""JoinedShards: the global batches that several readers, each with data of its own, make together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mpidist.data.items.stream import INFINITE, UNKNOWN, Epoch, Items, Seed, Stream, join


@dataclass(frozen=True)
class JoinedShards:
    """Joins the readers' groups of each step into one group, until no reader has a group left.

    It lets any number of ranks finish a pass that other ranks have begun, each over its own shard of the data: the new
    ranks share the global batches that the old ones would have made together.

    Attributes:
        shards: One stream of groups per reader. Reader k shuffles as rank k would.
    """

    shards: tuple[Stream, ...]

    def cardinality(self) -> int:
        """Local. The largest cardinality of a shard."""
        counts = [shard.cardinality() for shard in self.shards]
        if UNKNOWN in counts:
            return UNKNOWN
        return INFINITE if INFINITE in counts else max(counts)

    def blocks(self, epoch: Epoch, start: int) -> Iterator[Items]:
        """Local. One group per block; seeks as the shards do."""
        groups_by_shard = [
            (group for block in shard.blocks(epoch._replace(salt=salt), start) for group in block)
            for salt, shard in enumerate(self.shards)
        ]
        while True:
            groups = [group for group in (next(one, None) for one in groups_by_shard) if group is not None]
            if not groups:
                return
            # Empty groups are left out of the join, except where all are empty: the step takes place all the same.
            yield [join([group for group in groups if len(group)] or groups[:1])]

    def seeds(self) -> list[Seed]:
        """Local. The seeds of one shard: all have the same ones."""
        return self.shards[0].seeds()
