"""The node collective: ranks of a node combine arrays in memory that they share, each its slice.

A small array goes through node memory block by block, so that the blocks stay in a cache and the memory sees only the
array itself; a large one is read and written where it lies, if the system allows that (`direct_copies.py`). Between
nodes every local rank is busy at once: it reduces its slice with the same slice of the other nodes, on a communicator
of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpidist.arrays import AnyArray
from mpidist.comm.arithmetic.combine import FUNCTIONS, combine, is_half, open_quiet
from mpidist.comm.arithmetic.slices import cut_evenly, slices_of
from mpidist.comm.arithmetic.tree_order import combine_in_tree
from mpidist.comm.backends.direct_copies import LEAST_BYTES, DirectCopies, piece_bytes
from mpidist.comm.backends.mpi import MpiCollective
from mpidist.comm.communicator import Communicator
from mpidist.comm.front.front import ArrayCollective
from mpidist.comm.memory.node_barrier import NodeBarrier, open_node_barrier
from mpidist.comm.memory.node_memory import NodeMemory
from mpidist.comm.memory.peer_memory import open_peer_memory
from mpidist.comm.memory.shared_buffers import SharedBuffers
from mpidist.errors import UnavailableError
from mpidist.options import CommunicationOptions, ReduceOp

logger = logging.getLogger("mpidist")

# A rank's block. It should stay in the rank's own cache, and a barrier be short beside it.
BLOCK_BYTES = 1 << 19
# What all blocks of a node take together at most; many ranks have smaller ones.
ROOM_BYTES = 1 << 26
# Looking up where an array lies costs a barrier: it pays for large ones only (64 KB took 36 us so, 26 us otherwise).
_LOOKED_UP_BYTES = 1 << 18
# Of arrays that are shared already a rank reads and writes all ranks' blocks.
SHARED_BLOCK_BYTES = 1 << 18
# Every rank combines whole arrays, with one barrier, where those of all ranks take no more: 4 bytes took 4 ranks on 2
# cores 14 us so, and 54 by slices; 64 KB 53 and 72; 256 KB 175 either way.
_AT_ONCE_BYTES = 1 << 19
# Views of blocks are kept for so many sizes.
_KEPT = 256
# Blocks begin at multiples of this: no two ranks write to one cache line, and every dtype fits (of 32 bytes, too).
_LINE = 64


class NodeCollective(ArrayCollective):
    """Reduction, broadcast and gathering in node memory; what crosses nodes, and the rest, goes by MPI.

    Collective. Args:
        communicator: An `MpiCommunicator`.
        options: `bytes_per_pack` is the block.

    Raises:
        UnavailableError: The ranks share no memory; on every rank.
    """

    combines_halves = True

    def __init__(self, communicator: Communicator, options: CommunicationOptions) -> None:
        super().__init__(communicator, options)
        self._mpi = MpiCollective(communicator, CommunicationOptions())
        self._rank, self._size = communicator.node.rank, communicator.node.size
        self._is_one_node = len(communicator.node_sizes) == 1
        # The order of the tree is that of all ranks: over several nodes it cannot be kept here.
        in_tree = options.reproducible and self._is_one_node
        self._combine = combine_in_tree if in_tree else combine
        lane = communicator.open_lane()
        self._lane = None if lane is None else MpiCollective(lane, CommunicationOptions())
        self._lane_count = min(communicator.node_sizes)
        # Per rank of the node a block of its own, and one block for results; all of it twice, so that a rank may fill
        # the next while another still reads.
        largest = max(communicator.node_sizes)
        block = options.bytes_per_pack or min(BLOCK_BYTES, ROOM_BYTES // (2 * (largest + 1)))
        self._block_bytes = -(-block // _LINE) * _LINE
        try:
            rooms_bytes = 2 * (largest + 1) * self._block_bytes
            memory = NodeMemory(communicator, rooms_bytes + (largest + 1) * _LINE + NodeBarrier.byte_count(largest))
        except OSError as error:
            raise UnavailableError(f"the collective NODE needs memory that ranks share: {error}") from error
        rooms = memory.bytes[:rooms_bytes].reshape(2, largest + 1, self._block_bytes)
        self._blocks = [[rooms[turn, rank] for rank in range(self._size)] for turn in range(2)]
        self._results = [rooms[turn, largest] for turn in range(2)]
        self._turn = 0
        self._buffers = SharedBuffers(communicator)
        self._has_allocated = False
        tables = memory.bytes[rooms_bytes : rooms_bytes + 32 * self._size].view(np.int64)
        self._places = tables[: self._size]
        self._barrier = open_node_barrier(communicator, memory.bytes[rooms_bytes + (largest + 1) * _LINE :])
        self._spare = np.empty(self._block_bytes, np.uint8)
        self._kept: dict[tuple[np.dtype[Any], int], tuple[list[list[AnyArray]], AnyArray]] = {}
        self._is_in_order = not in_tree or self._size == 2
        at_once = min(self._block_bytes, _AT_ONCE_BYTES // self._size, LEAST_BYTES)
        self._at_once_bytes = at_once if self._is_one_node else 0
        self._quietly = open_quiet()
        self._direct: DirectCopies | None = None
        self._open_direct(options, tables[self._size :].reshape(-1, 3), changes_parts=in_tree)

    def _open_direct(self, options: CommunicationOptions, table: AnyArray, *, changes_parts: bool) -> None:
        """Collective. Direct copies where the system allows them."""
        peers, why_not = open_peer_memory(self.communicator, table, self._barrier)
        way = f"all arrays go through shared blocks: {why_not}"
        if peers is not None:
            pieces = piece_bytes(max(self.communicator.node_sizes), options.bytes_per_pack)
            self._direct = DirectCopies(self.communicator, peers, self._barrier, pieces, changes_parts=changes_parts)
            # Blocks as the user wants them are not for a trial.
            if not options.bytes_per_pack:
                self._direct.compare_with_blocks(self._all_reduce)
            way = f"arrays from {self._direct.limit} bytes on are copied directly between processes, others by trial"
        if self.communicator.rank == 0:
            logger.info("collective NODE: %s", way)

    def allocate(self, shape: Sequence[int], dtype: Any = np.float32) -> AnyArray:
        """Collective. An array in node memory; see `ArrayCollective.allocate`."""
        mine = self._buffers.allocate(int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize)
        self._has_allocated = True
        array: AnyArray = mine.view(dtype).reshape(tuple(shape))
        return array

    def _all_reduce(self, source: AnyArray, total: AnyArray, op: ReduceOp) -> None:
        if source.nbytes <= self._at_once_bytes:
            self._combine_at_once(source, total, op)
            return
        if self._has_allocated and self.all_reduce_shared(source, total, op):
            return
        direct = self._direct
        if direct is not None and source.nbytes >= direct.least and direct.takes(source, total, source.nbytes):
            direct.all_reduce(source, total, op, self._slice_count, self._combine, self._across_nodes)
            return
        pieces = self._pieces(source)
        if self._is_one_node and self._size == 2:
            for piece in pieces:
                self._combine_at_once(source[piece], total[piece], op)
            return
        slices = [cut_evenly(piece.stop - piece.start, self._slice_count) for piece in pieces]
        # One barrier per block: it says that this block is reduced and the next one is filled.
        self._fill(source, pieces, 0)
        self._barrier()
        for number, piece in enumerate(pieces):
            turn, count = self._turn, piece.stop - piece.start
            result = self._results[turn][: count * source.itemsize].view(source.dtype)
            if self._rank < self._slice_count:
                mine = slices[number][self._rank]
                blocks = [block[: count * source.itemsize].view(source.dtype)[mine] for block in self._blocks[turn]]
                self._combine(blocks, result[mine], op)
                self._across_nodes(result[mine], op)
            self._turn = 1 - turn
            self._fill(source, pieces, number + 1)
            self._barrier()
            total[piece] = result

    def _across_nodes(self, array: AnyArray, op: ReduceOp) -> None:
        if self._lane is not None and array.size:
            # A MEAN is a sum here: it is divided once, by the number of all ranks.
            self._lane.all_reduce(array, ReduceOp.SUM if op is ReduceOp.MEAN else op, in_place=True)

    @property
    def _slice_count(self) -> int:
        return self._size if self._is_one_node else self._lane_count

    def all_reduce_shared(self, source: AnyArray, total: AnyArray, op: ReduceOp) -> bool:
        """Collective. See `ArrayCollective.all_reduce_shared`: each rank its slice, which it then writes to all."""
        # Only what all ranks know decides about the barrier that compares where their arrays lie.
        if not self._has_allocated or source.nbytes < _LOOKED_UP_BYTES:
            return False
        place = self._buffers.place(source) if total is source else -1
        self._places[self._rank] = place
        self._barrier()
        agreed = self.communicator.all_reduce_max if not self._is_one_node else int
        if agreed(int(place < 0 or bool((self._places != place).any()))):
            return False
        parts = self._buffers.parts(place, source)
        if self._rank < self._slice_count:
            mine = cut_evenly(source.size, self._slice_count)[self._rank]
            length = max(1, SHARED_BLOCK_BYTES // source.itemsize)
            for begin in range(mine.start, mine.stop, length):
                blocks = [part[begin : min(begin + length, mine.stop)] for part in parts]
                self._combine(blocks, blocks[0], op)
                self._across_nodes(blocks[0], op)
                for block in blocks[1:]:
                    block[...] = blocks[0]
        self._barrier()
        return True

    def _combine_at_once(self, source: AnyArray, total: AnyArray, op: ReduceOp) -> None:
        """Each rank gives its array and combines all ranks' by itself, in their order: one barrier, slices take two.

        What can be kept for the next call is kept: NumPy and Python take longer than the barrier.
        """
        key = source.dtype, source.size
        kept = self._kept.get(key)
        if kept is None:
            kept = self._kept[key] = self._keep(*key)
        rooms, spare = kept
        blocks = rooms[self._turn]
        blocks[self._rank][...] = source
        self._turn = 1 - self._turn
        self._barrier()
        if not self._is_in_order or (source.dtype.itemsize == 2 and is_half(source.dtype)):
            # A tree changes what it combines, and others still read the blocks.
            self._combine([block.copy() for block in blocks], total, op)
            return
        function = FUNCTIONS[op]
        quietly = self._quietly
        # NumPy takes 0.8 us to add one element in place, 0.25 into another array: they take turns, `total` last.
        result, other = (total, spare) if self._size % 2 == 0 else (spare, total)
        quietly(function, blocks[0], blocks[1], out=result)
        for block in blocks[2:]:
            quietly(function, result, block, out=other)
            result, other = other, result

    def _keep(self, dtype: np.dtype[Any], size: int) -> tuple[list[list[AnyArray]], AnyArray]:
        """The blocks of all ranks as arrays of so many elements, for both turns, and one more array."""
        if len(self._kept) == _KEPT:
            self._kept.clear()
        rooms = [[block[: size * dtype.itemsize].view(dtype) for block in blocks] for blocks in self._blocks]
        return rooms, self._spare[: size * dtype.itemsize].view(dtype)

    def _fill(self, source: AnyArray, pieces: Sequence[slice], number: int) -> None:
        if number < len(pieces):
            mine = source[pieces[number]]
            self._blocks[self._turn][self._rank][: mine.nbytes].view(source.dtype)[...] = mine

    def _pieces(self, array: AnyArray) -> list[slice]:
        length = max(1, self._block_bytes // array.itemsize)
        return [slice(begin, min(begin + length, array.size)) for begin in range(0, array.size, length)]

    def _reduce(self, source: AnyArray, total: AnyArray, op: ReduceOp, root: int) -> None:
        result = total if self.communicator.rank == root else source.copy()
        self._all_reduce(source, result, op)

    def _reduce_scatter(self, source: AnyArray, mine: AnyArray, counts: Sequence[int], op: ReduceOp) -> None:
        if not self._is_one_node:
            total = source.copy()
            self._all_reduce(source, total, op)
            mine[...] = total[slices_of(counts)[self.communicator.rank]]
            return
        if self._direct is not None and self._direct.takes(source, source, source.nbytes):
            self._direct.reduce_scatter(source, mine, counts, op, self._combine)
            return
        # Pieces of the whole array: what of a piece is a rank's part, that rank combines.
        part = slices_of(counts)[self._rank]
        pieces = self._pieces(source)
        self._fill(source, pieces, 0)
        self._barrier()
        for number, piece in enumerate(pieces):
            low, high = max(piece.start, part.start), min(piece.stop, part.stop)
            if low < high:
                count = piece.stop - piece.start
                blocks = [block[: count * source.itemsize].view(source.dtype) for block in self._blocks[self._turn]]
                self._combine(
                    [block[low - piece.start : high - piece.start] for block in blocks],
                    mine[low - part.start : high - part.start], op,
                )
            self._turn = 1 - self._turn
            self._fill(source, pieces, number + 1)
            self._barrier()

    def _broadcast(self, data: AnyArray, root: int) -> None:
        if not self._is_one_node:
            self._mpi._broadcast(data, root)
            return
        if self._direct is not None and self._direct.takes(data, data, data.nbytes):
            self._direct.broadcast(data, root)
            return
        for piece in self._pieces(data):
            turn, mine = self._turn, data[piece]
            room = self._blocks[turn][root][: mine.nbytes]
            if self._rank == root:
                room[...] = mine
            self._turn = 1 - turn
            self._barrier()
            if self._rank != root:
                mine[...] = room

    def _all_gather(self, mine: AnyArray, gathered: AnyArray, counts: Sequence[int]) -> None:
        if not self._is_one_node:
            self._mpi._all_gather(mine, gathered, counts)
            return
        if self._direct is not None and self._direct.takes(mine, mine, gathered.nbytes):
            self._direct.all_gather(mine, gathered, counts)
            return
        parts = slices_of(counts)
        for begin in range(0, max(counts), self._block_bytes):
            turn = self._turn
            piece = mine[begin : begin + self._block_bytes]
            self._blocks[turn][self._rank][: piece.size] = piece
            self._turn = 1 - turn
            self._barrier()
            for part, block in zip(parts, self._blocks[turn], strict=True):
                target = gathered[part][begin : begin + self._block_bytes]
                target[...] = block[: target.size]

    def _all_to_all(
        self, sent: AnyArray, sent_counts: Sequence[int], got: AnyArray, got_counts: Sequence[int]
    ) -> None:
        self._mpi._all_to_all(sent, sent_counts, got, got_counts)
