"""Direct copies: what the ranks of a node do with large arrays where each reads and writes the others' memory.

Two or three barriers a call, however large the array, and no line of memory that one core writes while it lies in
another's cache. Through shared blocks there is a barrier for each block, and each is written by one core and read by
another: 64 MB with two ranks took 33 to 40 ms so while the cores stood in different complexes of an EPYC, 8 ms while
they shared a cache; copied directly 6.3 to 9 ms, wherever they stood.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np

from mpidist.arrays import AnyArray
from mpidist.comm.arithmetic.slices import cut_evenly, slices_of
from mpidist.comm.communicator import Communicator
from mpidist.comm.memory.peer_memory import PeerMemory
from mpidist.options import ReduceOp

logger = logging.getLogger("mpidist")

# What all ranks' pieces take together while they are combined: they should stay in a core's own cache. A piece is not
# below 16 KB: a call of the kernel takes 0.3 us, under a virtual machine's some 3.
PIECES_BYTES = 1 << 21
LEAST_PIECE_BYTES = 1 << 14
# Every dtype fits (of 32 bytes, too).
_LINE = 64

# Where direct copies of an array of the first size take less than that part of the time of blocks, they are taken from
# the second size on; else the next size is tried. While the cores share a cache they are faster from 1 to 4 MB on, else
# from far below. The cores may soon stand elsewhere; then small arrays can take twice as long by direct copies, and
# large ones five times as long by blocks.
TRIALS = ((1 << 18, 1 << 17, 0.75), (1 << 20, 1 << 19, 0.9), (1 << 22, 1 << 21, 1.1))
LEAST_BYTES = TRIALS[0][1]
ALWAYS_FROM = 1 << 24
_ROUNDS, _CALLS = 3, 2
# After so many bytes it is tried again: the system moves ranks that are not bound to cores. It takes some 2 % of the
# time that these take.
TRIED_AGAIN_BYTES = 1 << 33

# Larger than any array.
NEVER = 1 << 62

Combine = Callable[[Sequence[AnyArray], AnyArray, ReduceOp], None]


class DirectCopies:
    """The operations of a node on contiguous flat arrays, which stand for those of `ArrayCollective`.

    Args:
        communicator: All ranks.
        peers: The memory of this node's.
        barrier: Of the node.
        piece_bytes: See `piece_bytes`; the same on all nodes.
        changes_parts: What combines pieces changes them.

    Attributes:
        least: Smaller arrays are not for it, in bytes.
        limit: Nor are those below, for now; the same on every rank.
    """

    def __init__(
        self,
        communicator: Communicator,
        peers: PeerMemory,
        barrier: Callable[[], None],
        piece_bytes: int,
        *,
        changes_parts: bool,
    ) -> None:
        self.least, self.limit = LEAST_BYTES, ALWAYS_FROM
        self._communicator = communicator
        self._all_reduce: Callable[[AnyArray, AnyArray, ReduceOp], None] | None = None
        self._moved = 0
        self._peers = peers
        self._rank = rank = communicator.node.rank
        size = communicator.node.size
        self._others = [(rank + step) % size for step in range(1, size)]
        self._barrier = barrier
        self._piece_bytes = piece_bytes
        self._changes_parts = changes_parts
        self._rows = np.empty((size, piece_bytes), np.uint8)

    def compare_with_blocks(self, all_reduce: Callable[[AnyArray, AnyArray, ReduceOp], None]) -> None:
        """Local. See by a trial from which size on they are faster: at the first large array, and again now and then.

        Only a trial tells whether the ranks' cores share a cache. Both ways give the same bits.

        Args:
            all_reduce: Goes either way, by the limit.
        """
        self._all_reduce, self._moved = all_reduce, TRIED_AGAIN_BYTES

    def _try(self, all_reduce: Callable[[AnyArray, AnyArray, ReduceOp], None]) -> None:
        """Collective. In 6 to 32 ms with 2 ranks on 2 cores, in 70 to 110 with 4."""
        # Not before its end: it moves bytes itself.
        self._moved = -NEVER
        before = self.limit
        limits = (limit for byte_count, limit, part in TRIALS if self._time_ratio(all_reduce, byte_count) < part)
        self.limit, self._moved = next(limits, ALWAYS_FROM), 0
        if self.limit != before and self._communicator.rank == 0:
            logger.info("collective NODE: arrays from %d bytes on are copied directly, by a trial", self.limit)

    def _time_ratio(self, all_reduce: Callable[[AnyArray, AnyArray, ReduceOp], None], byte_count: int) -> float:
        """Collective. The time of direct copies over that of blocks for arrays of this size; alike on all ranks."""
        array = np.zeros(byte_count, np.uint8)
        taken: dict[int, list[int]] = {NEVER: [], 0: []}
        for _ in range(_ROUNDS):
            for self.limit, times in taken.items():
                all_reduce(array, array, ReduceOp.MAX)
                nanoseconds = 0
                for _ in range(_CALLS):
                    # As gradients come: just written, by the rank itself.
                    array.fill(0)
                    self._barrier()
                    begin = time.perf_counter_ns()
                    all_reduce(array, array, ReduceOp.MAX)
                    nanoseconds += time.perf_counter_ns() - begin
                # The slowest rank counts, each time: where ranks share a core, the quickest knows nothing.
                times.append(self._communicator.all_reduce_max(nanoseconds))
        blocks, copies = (statistics.median(times) for times in taken.values())
        return copies / blocks

    def takes(self, source: AnyArray, target: AnyArray, byte_count: int) -> bool:
        """Collective. Whether these arrays are copied directly; it shows them to the node, and one operation follows.

        Args:
            source: Read by other ranks.
            target: Written by other ranks.
            byte_count: What is compared with the limit, the same on every rank.
        """
        if byte_count < self.least:
            return False
        self._moved += byte_count
        if self._moved > TRIED_AGAIN_BYTES and self._all_reduce is not None:
            self._try(self._all_reduce)
        if byte_count < self.limit:
            return False
        is_reached = self._peers.show(source, target, byte_count)
        if len(self._communicator.node_sizes) == 1:
            return is_reached
        # Nodes that take different ways would meet between nodes with different pieces.
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
    return -(-wanted // _LINE) * _LINE
