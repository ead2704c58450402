"""Direct copies: what the ranks of a node do with large arrays where each reads and writes the others' memory.

Two or three barriers a call, however large the array, and no line of memory that one core writes while it lies in
another's cache. Through shared blocks there is a barrier for each block, and each is written by one core and read by
another: 64 MB with two ranks took 33 to 40 ms so while the cores stood in different complexes of an EPYC, 8 ms while
they shared a cache; copied directly 6.3 to 9 ms, wherever they stood.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from mpidist.arrays import AnyArray
from mpidist.comm.arithmetic.slices import cut_evenly, slices_of
from mpidist.comm.communicator import Communicator
from mpidist.comm.memory.node_memory import CACHE_LINE_BYTES
from mpidist.comm.memory.peer_memory import PeerMemory
from mpidist.options import ReduceOp

# What all ranks' pieces take together while they are combined: they should stay in a core's own cache. A piece is not
# below 16 KB: a call of the kernel takes 0.3 us, under a virtual machine's some 3.
PIECES_BYTES = 1 << 21
LEAST_PIECE_BYTES = 1 << 14
# Direct copies are faster than shared blocks from here on, in bytes: 0.28 against 0.33 ms at 1 MB, 0.9 against 1.3 to
# 1.4 at 4 MB, 21 against 26 at 64 MB (two ranks whose cores share a cache), and four times as fast where the cores
# share none. `MPIDIST_TUNE=1` measures it for the machine at hand.
DIRECT_FROM = 1 << 20

Combine = Callable[[Sequence[AnyArray], AnyArray, ReduceOp], None]


class DirectCopies:
    """The operations of a node on contiguous flat arrays, for the node backend.

    Args:
        communicator: All ranks.
        peers: The memory of this node's ranks.
        barrier: Of the node.
        piece_bytes: See `piece_bytes`; the same on all nodes.
        limit: Smaller arrays are not copied directly, in bytes; the same on every rank.
        changes_parts: The function that combines pieces changes them.
    """

    def __init__(
        self,
        communicator: Communicator,
        peers: PeerMemory,
        barrier: Callable[[], None],
        piece_bytes: int,
        *,
        limit: int = DIRECT_FROM,
        changes_parts: bool,
    ) -> None:
        self._limit = limit
        self._communicator = communicator
        self._peers = peers
        self._rank = rank = communicator.node.rank
        size = communicator.node.size
        self._others = [(rank + step) % size for step in range(1, size)]
        self._barrier = barrier
        self._piece_bytes = piece_bytes
        self._changes_parts = changes_parts
        self._rows = np.empty((size, piece_bytes), np.uint8)

    def takes(self, source: AnyArray, target: AnyArray, byte_count: int) -> bool:
        """Collective. Whether these arrays are copied directly; if so, the node sees them, and one operation follows.

        Args:
            source: Read by other ranks.
            target: Written by other ranks.
            byte_count: Compared with the limit; the same on every rank.
        """
        if byte_count < self._limit:
            return False
        is_reached = self._peers.show(source, target, byte_count)
        if len(self._communicator.node_sizes) == 1:
            return is_reached
        # Nodes that took different ways would meet between nodes with different pieces.
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
        """Collective. Each rank combines its slice of all ranks' arrays, and writes it to all of them.

        Args:
            source: This rank's.
            total: For the result; may be `source`.
            op: The operation.
            slice_count: How many ranks of the node have a slice.
            combine: Combines pieces in the order of the ranks.
            across_nodes: Combines what has been combined here with what has been at the same place of other nodes.
        """
        if self._rank < slice_count:
            for piece in self._pieces(cut_evenly(source.size, slice_count)[self._rank], source.itemsize):
                mine = total[piece]
                parts = self._gathered(source, piece)
                # What combines must not write to a part that it has yet to read.
                result = parts[0] if self._rank > 1 and total is source else mine
                combine(parts, result, op)
                across_nodes(result, op)
                if result is not mine:
                    mine[...] = result
                for other in self._others:
                    self._peers.write(other, piece.start * source.itemsize, result)
        self._barrier()

    def reduce_scatter(
        self, source: AnyArray, mine: AnyArray, counts: Sequence[int], op: ReduceOp, combine: Combine
    ) -> None:
        """Collective. Each rank combines its part of all ranks' arrays."""
        part = slices_of(counts)[self._rank]
        for piece in self._pieces(part, source.itemsize):
            combine(self._gathered(source, piece), mine[piece.start - part.start : piece.stop - part.start], op)
        self._barrier()

    def broadcast(self, data: AnyArray, root: int) -> None:
        """Collective. Every rank reads the root's array."""
        if self._rank != root:
            self._peers.read(root, 0, data)
        self._barrier()

    def all_gather(self, mine: AnyArray, gathered: AnyArray, counts: Sequence[int]) -> None:
        """Collective. Every rank reads every rank's array; bytes."""
        parts = slices_of(counts)
        gathered[parts[self._rank]] = mine
        for other in self._others:
            self._peers.read(other, 0, gathered[parts[other]])
        self._barrier()

    def _gathered(self, source: AnyArray, piece: slice) -> list[AnyArray]:
        """All ranks' pieces, in their order; this rank's, too, is a copy where combining changes the parts."""
        byte_count = (piece.stop - piece.start) * source.itemsize
        rows = [row[:byte_count].view(source.dtype) for row in self._rows]
        for other in self._others:
            self._peers.read(other, piece.start * source.itemsize, rows[other])
        if self._changes_parts:
            rows[self._rank][...] = source[piece]
        else:
            rows[self._rank] = source[piece]
        return rows

    def _pieces(self, part: slice, itemsize: int) -> list[slice]:
        length = max(1, self._piece_bytes // itemsize)
        return [slice(begin, min(begin + length, part.stop)) for begin in range(part.start, part.stop, length)]


def piece_bytes(rank_count: int, asked: int | None) -> int:
    """Local. How many bytes of each rank are combined at once.

    Args:
        rank_count: Ranks of the largest node.
        asked: `bytes_per_pack`, if the user gave it.
    """
    wanted = asked or max(LEAST_PIECE_BYTES, PIECES_BYTES // rank_count)
    # A multiple of a cache line, so that every dtype fits (of 32 bytes, too).
    return -(-wanted // CACHE_LINE_BYTES) * CACHE_LINE_BYTES
