"""The backend of one rank: every operation copies its input."""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import override

from mpidist.arrays import AnyArray
from mpidist.comm.backend import Backend
from mpidist.comm.group.communicator import Communicator
from mpidist.options import ReduceOp


class SoloBackend(Backend):
    """One rank, with arrays of any kind.

    Args:
        communicator: A communicator of one rank.
    """

    combines_halves = True
    takes_device_arrays = True

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator

    @override
    def all_reduce(self, source: AnyArray, total: AnyArray, op: ReduceOp) -> None:
        """Collective. See `Backend.all_reduce`."""
        if total is not source:
            total[...] = source

    @override
    def reduce(self, source: AnyArray, total: AnyArray, op: ReduceOp, root: int) -> None:
        """Collective. See `Backend.reduce`."""
        total[...] = source

    @override
    def reduce_scatter(self, source: AnyArray, mine: AnyArray, counts: Sequence[int], op: ReduceOp) -> None:
        """Collective. See `Backend.reduce_scatter`."""
        mine[...] = source

    def broadcast(self, data: AnyArray, root: int) -> None:
        """Collective. See `Backend.broadcast`."""

    @override
    def all_gather(self, mine: AnyArray, gathered: AnyArray, counts: Sequence[int]) -> None:
        """Collective. See `Backend.all_gather`."""
        gathered[...] = mine

    @override
    def all_to_all(
        self, sent: AnyArray, sent_counts: Sequence[int], got: AnyArray, got_counts: Sequence[int]
    ) -> None:
        """Collective. See `Backend.all_to_all`."""
        got[...] = sent
