"""Direct copies: the ranks of a node combine large arrays by reading and writing each other's memory.

A call takes two or three barriers, whatever the size of the array, and no core writes cache lines that another core
still holds. Shared blocks take a barrier for each block, and each block is written by one core and read by another.
With two ranks and 64 MB, shared blocks took 33 to 40 ms on cores in different complexes of an EPYC and 8 ms on cores
that share a cache. Direct copies took 6.3 to 9 ms on any cores.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpidist.arrays import AnyArray
from mpidist.comm.arithmetic.combination import Combination
from mpidist.comm.arithmetic.combine import FUNCTIONS, is_half, open_quiet
from mpidist.comm.arithmetic.slices import own_slice, slices_of
from mpidist.comm.backends.lane import Lane
from mpidist.comm.group.communicator import Communicator
from mpidist.comm.memory.node_memory import CACHE_LINE_BYTES
from mpidist.comm.memory.peer_memory import PeerMemory
from mpidist.options import ReduceOp

# The size of all ranks' pieces together. They should stay in a core's own cache while they are combined.
PIECES_BYTES = 1 << 21
# A piece is not smaller: each costs a system call, of 0.3 us, or about 3 us in some virtual machines.
LEAST_PIECE_BYTES = 1 << 14
# The number of sizes of arrays for which this rank's slice is kept.
_KEPT = 256


class DirectCopies:
    """The operations of a node on contiguous flat arrays, for the node backend.

    Args:
        communicator: All ranks.
        peers: The memory of this node's ranks.
        combination: The combination of the pieces of the node's ranks.
        lane: The lane, which combines results across nodes; None where there is one node.
        piece_bytes: The size of a rank's piece; see the function `piece_bytes`. The same on all nodes.
        limit: Arrays below this size in bytes are not copied directly. The same on every rank.
        across_bytes: The least number of bytes that are combined across nodes at once; the same on every rank.
    """

    def __init__(
        self, communicator: Communicator, peers: PeerMemory, combination: Combination, lane: Lane | None,
        piece_bytes: int, *, limit: int, across_bytes: int,
    ) -> None:
        self._limit = limit
        self._communicator = communicator
        self._peers = peers
        self._rank = rank = communicator.node.rank
        size = communicator.node.size
        self._others = [(rank + step) % size for step in range(1, size)]
        self._barrier = peers.barrier
        self._piece_bytes = piece_bytes
        self._combination, self._lane = combination, lane
        self._is_pair, self._quietly = size == 2, open_quiet()
        # So many ranks of each node may have a slice, and this rank's is kept by the size of the array.
        self._slice_count = min(communicator.node_sizes)
        self._slices: dict[tuple[int, int], slice] = {}
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
        # All nodes must use the same algorithm: across nodes, pieces of one size must meet.
        return not self._communicator.all_reduce_max(int(not is_reached))

    def all_reduce(self, source: AnyArray, total: AnyArray, op: ReduceOp) -> None:
        """Collective. Each rank combines its slice of all ranks' arrays, and writes the result to all of them.

        Args:
            source: This rank's array.
            total: The array for the result; it may be `source`.
            op: The operation.
        """
        own = self._slices.get((source.size, source.itemsize))
        if own is None:
            own = self._own_slice(source.size, source.itemsize)
        itemsize = source.itemsize
        length = max(1, self._piece_bytes // itemsize)
        # Several pieces that are side by side go across nodes at once.
        span = length * self._span_pieces
        for low in range(own.start, own.stop, span):
            high = min(low + span, own.stop)
            for begin in range(low, high, length):
                self._combine_here(source, total, op, begin, min(begin + length, high))
            result = total[low:high]
            if self._lane is not None:
                self._lane.all_reduce(result, op)
            # No other rank reads this slice of the arrays, so in place the result may go over their sources.
            for other in self._others:
                self._peers.write(other, low * itemsize, result)
        # Until here other ranks write to `total`, and read `source`.
        self._barrier()

    def reduce_scatter(self, source: AnyArray, mine: AnyArray, counts: Sequence[int], op: ReduceOp) -> None:
        """Collective. Each rank combines its slice of all ranks' arrays."""
        own = slices_of(counts)[self._rank]
        length = max(1, self._piece_bytes // source.itemsize)
        for begin in range(own.start, own.stop, length):
            end = min(begin + length, own.stop)
            sources = self._gathered(source, begin, end)
            self._combination.combine(sources, mine[begin - own.start : end - own.start], op)
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

    def _combine_here(self, source: AnyArray, total: AnyArray, op: ReduceOp, begin: int, end: int) -> None:
        """Combine the elements from `begin` to `end` of the arrays of the node's ranks into those of `total`."""
        mine = total[begin:end]
        sources = self._gathered(source, begin, end)
        if self._is_pair and not (source.itemsize == 2 and is_half(source.dtype)):
            # The same as `combine`, without its overhead for each piece.
            self._quietly(FUNCTIONS[op], sources[0], sources[1], out=mine)
            return
        # In place, `mine` is this rank's source. `combine` may write its result over the first two sources, not over a
        # later one, which it has yet to read.
        result = sources[0] if self._rank > 1 and total is source else mine
        self._combination.combine(sources, result, op)
        if result is not mine:
            mine[...] = result

    def _gathered(self, source: AnyArray, begin: int, end: int) -> list[AnyArray]:
        """The pieces of all ranks, in their order. This rank's is a copy, too, if combining changes its sources."""
        own = source[begin:end]
        # This rank's own slice takes the place of those that are read below.
        rows = [own] * len(self._rows)
        for other in self._others:
            rows[other] = row = self._rows[other][: own.nbytes].view(own.dtype)
            self._peers.read(other, begin * own.itemsize, row)
        if self._combination.changes_sources:
            rows[self._rank] = copy = self._rows[self._rank][: own.nbytes].view(own.dtype)
            copy[...] = own
        return rows

    def _own_slice(self, count: int, itemsize: int) -> slice:
        """This rank's slice of an array of `count` elements; empty where the rank has none."""
        if len(self._slices) == _KEPT:
            self._slices.clear()
        mine = self._slices[count, itemsize] = own_slice(count, itemsize, self._rank, self._slice_count)
        return mine


def piece_bytes(rank_count: int, asked: int) -> int:
    """Local. The number of bytes of each rank that are combined at once.

    Args:
        rank_count: Number of ranks of the largest node.
        asked: The user's `bytes_per_pack`, or 0.
    """
    wanted = asked or max(LEAST_PIECE_BYTES, PIECES_BYTES // rank_count)
    # Whole cache lines, so that a piece is a whole number of elements of any dtype (the largest has 32 bytes).
    return -(-wanted // CACHE_LINE_BYTES) * CACHE_LINE_BYTES
