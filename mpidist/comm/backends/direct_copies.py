"""Direct copies: the ranks of a node combine large arrays by reading and writing each other's memory.

A call takes two or three barriers, whatever the size of the array, and no core writes cache lines that another core
still holds. Shared blocks take a barrier for each block, and each block is written by one core and read by another.
With two ranks and 64 MB, shared blocks took 33 to 40 ms on cores in different complexes of an EPYC and 8 ms on cores
that share a cache. Direct copies took 6.3 to 9 ms on any cores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from mpidist.arrays import AnyArray
from mpidist.comm.arithmetic.combine import Combine
from mpidist.comm.arithmetic.slices import cut_by_length, cut_evenly, slices_of
from mpidist.comm.group.communicator import Communicator
from mpidist.comm.memory.node_memory import CACHE_LINE_BYTES
from mpidist.comm.memory.peer_memory import PeerMemory
from mpidist.options import ReduceOp

# The size of all ranks' pieces together. They should stay in a core's own cache while they are combined.
PIECES_BYTES = 1 << 21
# A piece is not smaller: each costs a system call, of 0.3 us, or about 3 us in some virtual machines.
LEAST_PIECE_BYTES = 1 << 14


class DirectCopies:
    """The operations of a node on contiguous flat arrays, for the node backend.

    Args:
        communicator: All ranks.
        peers: The memory of this node's ranks.
        barrier: The barrier of the node.
        piece_bytes: The size of a rank's piece; see the function `piece_bytes`. The same on all nodes.
        limit: Arrays below this size in bytes are not copied directly. The same on every rank.
        changes_sources: Whether the function that combines pieces changes them.
        across_bytes: The least number of bytes that are combined across nodes at once; the same on every rank.
    """

    def __init__(
        self,
        communicator: Communicator,
        peers: PeerMemory,
        barrier: Callable[[], None],
        piece_bytes: int,
        *,
        limit: int,
        changes_sources: bool,
        across_bytes: int = 0,
    ) -> None:
        self._limit = limit
        self._communicator = communicator
        self._peers = peers
        self._rank = rank = communicator.node.rank
        size = communicator.node.size
        self._others = [(rank + step) % size for step in range(1, size)]
        self._barrier = barrier
        self._piece_bytes = piece_bytes
        self._changes_sources = changes_sources
        self._span_pieces = max(1, across_bytes // piece_bytes)
        self._rows = np.empty((size, piece_bytes), np.uint8)

    def takes(self, source: AnyArray, target: AnyArray, byte_count: int) -> bool:
        """Collective. Whether these arrays are copied directly. If so, one operation on them must follow.

        Args:
            source: The array that other ranks will read.
            target: The array that other ranks will write to.
            byte_count: The size that is compared with the limit; the same on every rank.
        """
        if byte_count < self._limit:
            return False
        is_reached = self._peers.show(source, target, byte_count)
        if len(self._communicator.node_sizes) == 1:
            return is_reached
        # All nodes must take the same way: across nodes, pieces of one size must meet.
        return not self._communicator.all_reduce_max(int(not is_reached))

    def all_reduce(
        self,
        source: AnyArray,
        total: AnyArray,
        op: ReduceOp,
        slice_count: int,
        combine: Combine,
        across_nodes: Callable[[AnyArray, ReduceOp], None],
    ) -> None:
        """Collective. Each rank combines its slice of all ranks' arrays, and writes the result to all of them.

        Args:
            source: This rank's array.
            total: Takes the result; may be `source`.
            op: The operation.
            slice_count: The number of ranks of the node that have a slice.
            combine: Combines pieces in the order of the ranks.
            across_nodes: Combines a piece, or several that are side by side, with the same of the other nodes.
        """
        if self._rank < slice_count:
            pieces = self._pieces(cut_evenly(source.size, slice_count)[self._rank], source.itemsize)
            for first in range(0, len(pieces), self._span_pieces):
                span = pieces[first : first + self._span_pieces]
                for piece in span:
                    self._combine_here(source, total, op, piece, combine)
                result = total[span[0].start : span[-1].stop]
                across_nodes(result, op)
                # No other rank reads this slice of the arrays, so in place the result may go over their sources.
                for other in self._others:
                    self._peers.write(other, span[0].start * source.itemsize, result)
        # Until here other ranks write to `total`, and read `source`.
        self._barrier()

    def reduce_scatter(
        self, source: AnyArray, mine: AnyArray, counts: Sequence[int], op: ReduceOp, combine: Combine
    ) -> None:
        """Collective. Each rank combines its slice of all ranks' arrays."""
        own = slices_of(counts)[self._rank]
        for piece in self._pieces(own, source.itemsize):
            combine(self._gathered(source, piece), mine[piece.start - own.start : piece.stop - own.start], op)
        # Until here other ranks read `source`.
        self._barrier()

    def broadcast(self, data: AnyArray, root: int) -> None:
        """Collective. Every rank reads the root's array."""
        if self._rank != root:
            self._peers.read(root, 0, data)
        self._barrier()

    def all_gather(self, mine: AnyArray, gathered: AnyArray, counts: Sequence[int]) -> None:
        """Collective. Every rank reads every rank's array of bytes."""
        slices = slices_of(counts)
        gathered[slices[self._rank]] = mine
        for other in self._others:
            self._peers.read(other, 0, gathered[slices[other]])
        self._barrier()

    def _combine_here(self, source: AnyArray, total: AnyArray, op: ReduceOp, piece: slice, combine: Combine) -> None:
        """Combine a piece of the arrays of the node's ranks into the same piece of `total`."""
        mine = total[piece]
        sources = self._gathered(source, piece)
        # In place, `mine` is this rank's source. `combine` may write its result over the first two sources, not over a
        # later one, which it has yet to read.
        result = sources[0] if self._rank > 1 and total is source else mine
        combine(sources, result, op)
        if result is not mine:
            mine[...] = result

    def _gathered(self, source: AnyArray, piece: slice) -> list[AnyArray]:
        """The pieces of all ranks, in their order. This rank's is a copy, too, if combining changes its sources."""
        byte_count = (piece.stop - piece.start) * source.itemsize
        rows = [row[:byte_count].view(source.dtype) for row in self._rows]
        for other in self._others:
            self._peers.read(other, piece.start * source.itemsize, rows[other])
        if self._changes_sources:
            rows[self._rank][...] = source[piece]
        else:
            rows[self._rank] = source[piece]
        return rows

    def _pieces(self, own: slice, itemsize: int) -> list[slice]:
        pieces = cut_by_length(own.stop - own.start, max(1, self._piece_bytes // itemsize))
        return [slice(own.start + piece.start, own.start + piece.stop) for piece in pieces]


def piece_bytes(rank_count: int, asked: int) -> int:
    """Local. The number of bytes of each rank that are combined at once.

    Args:
        rank_count: Number of ranks of the largest node.
        asked: The user's `bytes_per_pack`, or 0.
    """
    wanted = asked or max(LEAST_PIECE_BYTES, PIECES_BYTES // rank_count)
    # Whole cache lines, so that a piece is a whole number of elements of any dtype (the largest has 32 bytes).
    return -(-wanted // CACHE_LINE_BYTES) * CACHE_LINE_BYTES
