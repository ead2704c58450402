"""Exchanges over a circulant graph: what a ring sends, in a logarithm of its rounds, for any number of ranks.

Each of n ranks sends (n - 1)/n of its array in ⌈log2 n⌉ rounds to reduce and scatter, and as much to gather. In a round
it sends the blocks between ⌈n/2⌉ and n, then between ⌈n/4⌉ and ⌈n/2⌉, and so on, counted from its own one, to the
rank that is that far to its right (J. L. Träff: Optimal, non-pipelined reduce-scatter and allreduce algorithms,
arXiv:2410.14234, 2024). Halving and doubling needs a power of two for that.
"""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import override

from mpidist.arrays import AnyArray
from mpidist.comm.arithmetic.combine import FUNCTIONS
from mpidist.comm.backend import Backend
from mpidist.comm.backends.ring import RingBackend
from mpidist.comm.group.communicator import Communicator
from mpidist.options import CommunicationOptions, ReduceOp


class CirculantBackend(RingBackend):
    """The ring's operations in fewer rounds, for large arrays between nodes; broadcasts are MPI's, which has a tree.

    Args:
        communicator: An `MpiCommunicator`.
        options: The options, of which `bytes_per_pack` is the size of a message.
        mpi: The MPI backend over the same ranks, which broadcasts. It is not closed with this one.
    """

    def __init__(self, communicator: Communicator, options: CommunicationOptions, mpi: Backend) -> None:
        super().__init__(communicator, options)
        self._mpi = mpi
        self._rounds = rounds(communicator.size)

    @override
    def broadcast(self, data: AnyArray, root: int) -> None:
        """Collective. See `Backend.broadcast`."""
        self._mpi.broadcast(data, root)

    @override
    def _reduce_around(self, total: AnyArray, slices: Sequence[slice], op: ReduceOp, first: int) -> None:
        own = first + 1
        for low, high in self._rounds:
            # The blocks that this rank keeps are partial sums of all that it has heard of; those beyond go to the rank
            # that counts from `low` ranks further, whose first blocks they are.
            self._exchange(
                _blocks(total, slices, own + low, high - low), (self._rank + low) % self._size,
                _blocks(total, slices, own, high - low), (self._rank - low) % self._size, FUNCTIONS[op],
            )

    @override
    def _gather_around(self, data: AnyArray, slices: Sequence[slice], first: int) -> None:
        for low, high in reversed(self._rounds):
            self._exchange(
                _blocks(data, slices, first, high - low), (self._rank - low) % self._size,
                _blocks(data, slices, first + low, high - low), (self._rank + low) % self._size, None,
            )


def rounds(size: int) -> list[tuple[int, int]]:
    """Local. For each round of reducing the first block that is sent, and the one behind the last.

    Args:
        size: Number of ranks, 1 or more.
    """
    found, high = [], size
    while high > 1:
        low = (high + 1) // 2
        found.append((low, high))
        high = low
    return found


def _blocks(data: AnyArray, slices: Sequence[slice], first: int, count: int) -> list[AnyArray]:
    """The blocks from `first` on, around the end: one array or two. Sender and receiver cut at the same block."""
    begin = first % len(slices)
    end = min(begin + count, len(slices))
    runs = [(begin, end), (0, count - (end - begin))]
    return [data[slices[low].start : slices[high - 1].stop] for low, high in runs if low < high]
