"""Shared blocks: the ranks of a node combine arrays block by block in memory that they share.

The blocks stay in a cache, and only the arrays are in main memory. A call takes a barrier for each block.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpidist.arrays import AnyArray
from mpidist.comm.arithmetic.combination import Combination
from mpidist.comm.arithmetic.slices import cut_by_length, own_slice, slices_of
from mpidist.comm.backends.lane import Lane
from mpidist.comm.group.communicator import Communicator
from mpidist.comm.memory.node_memory import CACHE_LINE_BYTES, NodeMemory
from mpidist.comm.memory.show_calls import open_node_barrier
from mpidist.errors import UnavailableError
from mpidist.options import ReduceOp

# The size of a rank's block. It should stay in the rank's own cache, and take much longer than a barrier.
BLOCK_BYTES = 1 << 19
# The largest size of all blocks of a node together: many ranks have smaller blocks.
ALL_BLOCKS_BYTES = 1 << 26


class SharedBlocks:
    """Collective. Combines contiguous flat arrays within a node, for the node backend; the methods of `DirectCopies`.

    There are two sets of blocks, used in turns: a rank may fill its block of the next turn while other ranks still read
    those of this turn. One barrier for each turn is therefore enough. A rank fills a block of this turn again only
    after the barrier of the next turn, which every other rank enters after it has read the block.

    Args:
        communicator: All ranks.
        combination: The combination of the blocks of the node's ranks.
        lane: The lane, which combines results across nodes; None where there is one node.
        bytes_per_pack: The size of a block; 0 takes the usual one.

    Attributes:
        blocks: For each of the two turns the blocks of all ranks of the node, as bytes.
        turn: The turn whose block this rank fills next, 0 or 1.
        block_bytes: The size of a block.
        barrier: The barrier of the node.
        places, addresses: Tables of int64 in the same memory, of shape (ranks of the node,) and (ranks of the node, 3).
            They are not used here: by them the node backend and `PeerMemory` show other ranks the places of arrays.

    Raises:
        UnavailableError: There is no memory that ranks share; on every rank.
    """

    def __init__(
        self, communicator: Communicator, combination: Combination, lane: Lane | None, bytes_per_pack: int
    ) -> None:
        self._rank, size = communicator.node.rank, communicator.node.size
        self._combination, self._lane = combination, lane
        # So many ranks of each node may have a slice.
        self._slice_count = min(communicator.node_sizes)
        # Each rank of the node has a block, and there is one block for results.
        largest = max(communicator.node_sizes)
        asked = bytes_per_pack or min(BLOCK_BYTES, ALL_BLOCKS_BYTES // (2 * (largest + 1)))
        self.block_bytes = -(-asked // CACHE_LINE_BYTES) * CACHE_LINE_BYTES
        blocks_bytes, tables_bytes = 2 * (largest + 1) * self.block_bytes, (largest + 1) * CACHE_LINE_BYTES
        try:
            memory = NodeMemory(communicator, blocks_bytes + tables_bytes).bytes
        except OSError as error:
            raise UnavailableError(f"the backend NODE needs memory that ranks share: {error}") from error
        blocks = memory[:blocks_bytes].reshape(2, largest + 1, self.block_bytes)
        self.blocks = [[blocks[turn, rank] for rank in range(size)] for turn in range(2)]
        self.turn = 0
        self._results = [blocks[turn, largest] for turn in range(2)]
        tables = memory[blocks_bytes : blocks_bytes + 32 * size].view(np.int64)
        self.places, self.addresses = tables[:size], tables[size:].reshape(-1, 3)
        self.barrier = open_node_barrier(communicator)

    def drop(self) -> None:
        """Local. Release the memory, which is freed with the last view of it."""
        self.blocks, self._results = [[], []], []
        self.places, self.addresses = np.empty(0, np.int64), np.empty((0, 3), np.int64)

    def pieces(self, array: AnyArray) -> list[slice]:
        """Local. The slices of an array that pass through the blocks one after another."""
        return cut_by_length(array.size, max(1, self.block_bytes // array.itemsize))

    def all_reduce(self, source: AnyArray, total: AnyArray, op: ReduceOp) -> None:
        """Collective. Each rank combines its slice of all ranks' blocks, and every rank reads the result."""
        # Behind a barrier the results of one block are there, and so are all ranks' next blocks.
        pieces = self.pieces(source)
        self._fill(source, pieces, 0)
        self.barrier()
        for number, piece in enumerate(pieces):
            turn, count = self.turn, piece.stop - piece.start
            result = self._results[turn][: count * source.itemsize].view(source.dtype)
            mine = own_slice(count, source.itemsize, self._rank, self._slice_count)
            if mine.start < mine.stop:
                blocks = [block[: count * source.itemsize].view(source.dtype)[mine] for block in self.blocks[turn]]
                self._combination.combine(blocks, result[mine], op)
                if self._lane is not None:
                    self._lane.all_reduce(result[mine], op)
            self.turn = 1 - turn
            self._fill(source, pieces, number + 1)
            self.barrier()
            total[piece] = result

    def reduce_scatter(self, source: AnyArray, mine: AnyArray, counts: Sequence[int], op: ReduceOp) -> None:
        """Collective. Each rank combines its slice of all ranks' arrays."""
        # The whole array passes through the blocks. Of each piece a rank combines what belongs to its slice.
        own = slices_of(counts)[self._rank]
        pieces = self.pieces(source)
        self._fill(source, pieces, 0)
        self.barrier()
        for number, piece in enumerate(pieces):
            low, high = max(piece.start, own.start), min(piece.stop, own.stop)
            if low < high:
                count = piece.stop - piece.start
                blocks = [block[: count * source.itemsize].view(source.dtype) for block in self.blocks[self.turn]]
                self._combination.combine(
                    [block[low - piece.start : high - piece.start] for block in blocks],
                    mine[low - own.start : high - own.start], op,
                )
            self.turn = 1 - self.turn
            self._fill(source, pieces, number + 1)
            self.barrier()

    def broadcast(self, data: AnyArray, root: int) -> None:
        """Collective. The root fills its blocks with its array of bytes, and every other rank reads them."""
        for piece in self.pieces(data):
            turn, mine = self.turn, data[piece]
            block = self.blocks[turn][root][: mine.nbytes]
            if self._rank == root:
                block[...] = mine
            self._meet()
            if self._rank != root:
                mine[...] = block

    def all_gather(self, mine: AnyArray, gathered: AnyArray, counts: Sequence[int]) -> None:
        """Collective. Every rank fills its blocks with its array of bytes, and reads all ranks' blocks."""
        slices = slices_of(counts)
        for begin in range(0, max(counts), self.block_bytes):
            turn = self.turn
            piece = mine[begin : begin + self.block_bytes]
            self.blocks[turn][self._rank][: piece.size] = piece
            self._meet()
            for one, block in zip(slices, self.blocks[turn], strict=True):
                target = gathered[one][begin : begin + self.block_bytes]
                target[...] = block[: target.size]

    def _meet(self) -> None:
        """Collective over the node. End a turn."""
        self.barrier()
        # Not before: ranks that meet in different calls raise an error there, and their turns stay the same.
        self.turn = 1 - self.turn

    def _fill(self, source: AnyArray, pieces: Sequence[slice], number: int) -> None:
        if number < len(pieces):
            mine = source[pieces[number]]
            self.blocks[self.turn][self._rank][: mine.nbytes].view(source.dtype)[...] = mine
