"""Lists of files as streams, and the marks by which a policy shards them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

from mpidist.data.items.stream import Epoch, Items, RowNumbers, Seed, Shard, Stream

# The value of both arguments of `Dataset.shard` that makes a `HintedShard`.
SHARD_HINT = -1


@dataclass(frozen=True)
class FileRows(RowNumbers):
    """The row numbers of a list of files.

    Attributes:
        digest: A hash of the names; ranks compare it to make sure that they have the same list.
    """

    digest: str = ""


@dataclass(frozen=True)
class FileShard(Shard):
    """The files of one reader, taken from an order that is the same on all ranks."""

    def blocks(self, epoch: Epoch, start: int) -> Iterator[Items]:
        """Local. Items from number `start` on; seeks as the parent does."""
        # Without the salt, which makes ranks shuffle differently: with it some files would be read twice, others never.
        return super().blocks(epoch._replace(salt=0), start)


@dataclass(frozen=True)
class HintedShard:
    """A mark: the policy HINT replaces it by a shard of the rank. Under other policies it changes nothing."""

    parent: Stream

    def cardinality(self) -> int:
        """Local. The parent's cardinality."""
        return self.parent.cardinality()

    def blocks(self, epoch: Epoch, start: int) -> Iterator[Items]:
        """Local. The parent's blocks."""
        return self.parent.blocks(epoch, start)

    def seeds(self) -> list[Seed]:
        """Local. The parent's seeds."""
        return self.parent.seeds()


def file_rows(names: list[str]) -> FileRows:
    """Local. The stream of a list of files."""
    return FileRows(len(names), hashlib.sha256("\0".join(names).encode(errors="surrogateescape")).hexdigest()[:16])
