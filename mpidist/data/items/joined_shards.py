"""JoinedShards: the global batches that another number of readers would make, each reading data of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mpidist.data.items.stream import INFINITE, UNKNOWN, Epoch, Items, Seed, Stream, join


@dataclass(frozen=True)
class JoinedShards:
    """Groups that join the groups of several readers, step by step, until none has one left.

    A pass that began on some ranks, each with its files, is so finished by any number of ranks: they share the batches
    that the old ranks would have had together.

    Attributes:
        streams: One per reader; reader k shuffles as rank k would.
    """

    streams: tuple[Stream, ...]

    def cardinality(self) -> int:
        """Local. The largest."""
        counts = [stream.cardinality() for stream in self.streams]
        if UNKNOWN in counts:
            return UNKNOWN
        return INFINITE if INFINITE in counts else max(counts)

    def blocks(self, epoch: Epoch, start: int) -> Iterator[Items]:
        """Local. Seeks as its streams do; one group a block."""
        lanes = [
            (group for block in stream.blocks(epoch._replace(salt=salt), start) for group in block)
            for salt, stream in enumerate(self.streams)
        ]
        while True:
            groups = [group for group in (next(lane, None) for lane in lanes) if group is not None]
            if not groups:
                return
            yield [join([group for group in groups if len(group)] or groups[:1])]

    def seeds(self) -> list[Seed]:
        """Local. Those of a reader: all have the same."""
        return self.streams[0].seeds()
