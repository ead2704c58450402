"""The collective of one rank: every operation is a copy of its input, checked as the others would."""

from __future__ import annotations

from collections.abc import Sequence

from mpidist.arrays import AnyArray
from mpidist.comm.front.front import ArrayCollective
from mpidist.options import ReduceOp


class SoloCollective(ArrayCollective):
    """One rank, with arrays of any kind."""

    combines_halves = True
    takes_device_arrays = True

    def _all_reduce(self, source: AnyArray, total: AnyArray, op: ReduceOp) -> None:
        if total is not source:
            total[...] = source

    def _reduce(self, source: AnyArray, total: AnyArray, op: ReduceOp, root: int) -> None:
        total[...] = source

    def _reduce_scatter(self, source: AnyArray, mine: AnyArray, counts: Sequence[int], op: ReduceOp) -> None:
        mine[...] = source

    def _broadcast(self, data: AnyArray, root: int) -> None:
        pass

    def _all_gather(self, mine: AnyArray, gathered: AnyArray, counts: Sequence[int]) -> None:
        gathered[...] = mine

    def _all_to_all(
        self, sent: AnyArray, sent_counts: Sequence[int], got: AnyArray, got_counts: Sequence[int]
    ) -> None:
        got[...] = sent
