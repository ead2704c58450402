"""The cut of a global batch into micro-batches, one per logical replica, and of these over the ranks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from mpidist.comm.arithmetic.slices import cut_evenly, slices_of


@dataclass(frozen=True)
class MicroBatches:
    """The rows of each micro-batch, and the rank that computes it. Pure, and the same on every rank.

    Attributes:
        rows: The number of rows of each rank. In the order of the ranks they are the global batch.
        logical_replicas: The number of micro-batches. Their sizes differ by at most one, as in `numpy.array_split`.
    """

    rows: tuple[int, ...]
    logical_replicas: int

    @cached_property
    def count(self) -> int:
        """Local. The number of micro-batches with rows; the last ones may have none, and are left out."""
        return min(self.logical_replicas, sum(self.rows))

    @cached_property
    def micro_batches(self) -> list[slice]:
        """Local. The rows of the global batch in each micro-batch that has rows."""
        return cut_evenly(sum(self.rows), self.logical_replicas)[: self.count]

    @cached_property
    def owned(self) -> list[slice]:
        """Local. The numbers of the micro-batches that each rank computes."""
        return cut_evenly(self.count, len(self.rows))

    def wanted(self, rank: int) -> slice:
        """Local. The rows of the global batch that a rank computes with."""
        numbers = self.owned[rank]
        if numbers.start == numbers.stop:
            return slice(0, 0)
        return slice(self.micro_batches[numbers.start].start, self.micro_batches[numbers.stop - 1].stop)

    @cached_property
    def coincides(self) -> bool:
        """Local. Whether each rank has exactly the rows that it computes with, so that none have to be sent."""
        have = slices_of(self.rows)
        return all(
            (one.start, one.stop) == (want.start, want.stop) or one.stop - one.start == want.stop - want.start == 0
            for one, want in zip(have, (self.wanted(rank) for rank in range(len(self.rows))), strict=True)
        )

    def sent(self, rank: int) -> list[slice]:
        """Local. The rows that a rank sends to each rank, itself included, as slices of its own rows."""
        have = slices_of(self.rows)[rank]
        result: list[slice] = []
        for other in range(len(self.rows)):
            want = self.wanted(other)
            low, high = max(have.start, want.start), min(have.stop, want.stop)
            result.append(slice(low - have.start, high - have.start) if low < high else slice(0, 0))
        return result
