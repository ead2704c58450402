"""The node backend: ranks of a node combine arrays in memory that they share, each its slice.

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

from mpidist.arrays import AnyArray, as_bytes
from mpidist.comm.arithmetic.combine import FUNCTIONS, combine, combined_dtype, is_half, open_quiet
from mpidist.comm.arithmetic.slices import cut_evenly, slices_of
from mpidist.comm.arithmetic.tree_order import combine_in_tree
from mpidist.comm.backend import Backend
from mpidist.comm.backends.direct_copies import DIRECT_FROM, DirectCopies, piece_bytes
from mpidist.comm.backends.mpi import MpiBackend
from mpidist.comm.communicator import Communicator
from mpidist.comm.memory.node_barrier import NodeBarrier, open_node_barrier
from mpidist.comm.memory.node_memory import CACHE_LINE_BYTES, NodeMemory
from mpidist.comm.memory.peer_memory import open_peer_memory
from mpidist.comm.memory.shared_buffers import SharedBuffers
from mpidist.errors import UnavailableError
from mpidist.options import CommunicationOptions, ReduceOp

logger = logging.getLogger("mpidist")

# A rank's block. It should stay in the rank's own cache, and a barrier be short beside it.
BLOCK_BYTES = 1 << 19
# What all blocks of a node take together at most; many ranks have smaller ones.
ROOM_BYTES = 1 << 26
# Finding out where an array lies costs a barrier, which pays for large arrays only (64 KB took 36 us with it, 26 us
# without).
_LOOKED_UP_BYTES = 1 << 18
# Of arrays that are shared already a rank reads and writes all ranks' blocks.
SHARED_BLOCK_BYTES = 1 << 18
# Up to this size of all ranks' arrays together, every rank combines whole arrays, with one barrier: 4 bytes took 4
# ranks on 2 cores 14 us so, and 54 by slices; 64 KB 53 and 72; 256 KB 175 either way.
_AT_ONCE_BYTES = 1 << 19
# The same limit for one rank's array.
_AT_ONCE_BYTES_OF_RANK = 1 << 17
# Views of blocks are kept for so many sizes.
_KEPT = 256


class NodeBackend(Backend):
    """Reduction, broadcast and gathering in node memory; what crosses nodes, and the rest, goes by MPI.

    Collective. Args:
        communicator: An `MpiCommunicator`.
        options: `bytes_per_pack` is the block; `reproducible` combines in the tree order.
        direct_from: Arrays of this size in bytes and above are copied directly between processes; the same on every
            rank.

    Attributes:
        direct_from: As given; None where the system does not let processes read one another.

    Raises:
        UnavailableError: The ranks share no memory; on every rank.
    """

    combines_halves = True

    def __init__(
        self, communicator: Communicator, options: CommunicationOptions, direct_from: int = DIRECT_FROM
    ) -> None:
        self.communicator = communicator
        self._mpi = MpiBackend(communicator, CommunicationOptions())
        self._rank, self._size = communicator.node.rank, communicator.node.size
        self._is_one_node = len(communicator.node_sizes) == 1
        # The order of the tree is that of all ranks: over several nodes it cannot be kept here.
        in_tree = options.reproducible and self._is_one_node
        self._combine = combine_in_tree if in_tree else combine
        lane = communicator.open_lane()
        self._lane = None if lane is None else MpiBackend(lane, CommunicationOptions())
        self._slice_count = self._size if self._is_one_node else min(communicator.node_sizes)
        self._open_rooms(options.bytes_per_pack)
        self._buffers = SharedBuffers(communicator)
        self._has_allocated = False
        self._is_in_order = not in_tree or self._size == 2
        at_once = min(self._block_bytes, _AT_ONCE_BYTES // self._size, _AT_ONCE_BYTES_OF_RANK, direct_from - 1)
        self._at_once_bytes = at_once if self._is_one_node else 0
        self._kept: dict[tuple[np.dtype[Any], int], tuple[list[list[AnyArray]], AnyArray]] = {}
        self._quietly = open_quiet()
        self._direct = self._open_direct(options.bytes_per_pack, direct_from, changes_parts=in_tree)
        self.direct_from = None if self._direct is None else direct_from

    def _open_rooms(self, bytes_per_pack: int) -> None:
        """Collective. Blocks, tables and the barrier's counters, in one piece of node memory."""
        # Each rank of the node has a block of its own, and there is one block for results. There are two sets, so that
        # a rank may fill the next block while another one still reads.
        largest = max(self.communicator.node_sizes)
        block = bytes_per_pack or min(BLOCK_BYTES, ROOM_BYTES // (2 * (largest + 1)))
        self._block_bytes = -(-block // CACHE_LINE_BYTES) * CACHE_LINE_BYTES
        rooms_bytes, tables_bytes = 2 * (largest + 1) * self._block_bytes, (largest + 1) * CACHE_LINE_BYTES
        try:
            memory = NodeMemory(self.communicator, rooms_bytes + tables_bytes + NodeBarrier.byte_count(largest)).bytes
        except OSError as error:
            raise UnavailableError(f"the collective NODE needs memory that ranks share: {error}") from error
        rooms = memory[:rooms_bytes].reshape(2, largest + 1, self._block_bytes)
        self._blocks = [[rooms[turn, rank] for rank in range(self._size)] for turn in range(2)]
        self._results = [rooms[turn, largest] for turn in range(2)]
        self._turn = 0
        self._spare = np.empty(self._block_bytes, np.uint8)
        tables = memory[rooms_bytes : rooms_bytes + 32 * self._size].view(np.int64)
        self._places, self._shown = tables[: self._size], tables[self._size :].reshape(-1, 3)
        self._barrier = open_node_barrier(self.communicator, memory[rooms_bytes + tables_bytes :])

    def _open_direct(self, bytes_per_pack: int, direct_from: int, *, changes_parts: bool) -> DirectCopies | None:
        """Collective. Direct copies, where the system allows them."""
        peers, why_not = open_peer_memory(self.communicator, self._shown, self._barrier)
        way = f"all arrays pass through shared blocks: {why_not}"
        direct = None
        if peers is not None:
            pieces = piece_bytes(max(self.communicator.node_sizes), bytes_per_pack)
            direct = DirectCopies(
                self.communicator, peers, self._barrier, pieces, limit=direct_from, changes_parts=changes_parts
            )
            way = f"arrays of {direct_from} bytes and above are copied directly between processes"
        if self.communicator.rank == 0:
            logger.info("collective NODE: %s", way)
        return direct

    def allocate(self, byte_count: int) -> AnyArray | None:
        """Collective. An array in node memory; see `Backend.allocate`."""
        self._has_allocated = True
        return self._buffers.allocate(byte_count)

    def all_reduce(self, source: AnyArray, total: AnyArray, op: ReduceOp) -> None:
        """Collective. See `Backend.all_reduce`."""
        if source.nbytes <= self._at_once_bytes:
            self._combine_at_once(source, total, op)
            return
        if self._has_allocated and self.all_reduce_allocated(source, total, op):
            return
        direct = self._direct
        if direct is not None and direct.takes(source, total, source.nbytes):
            direct.all_reduce(source, total, op, self._slice_count, self._combine, self._across_nodes)
            return
        pieces = self._pieces(source)
        if self._is_one_node and self._size == 2:
            for piece in pieces:
                self._combine_at_once(source[piece], total[piece], op)
            return
        self._combine_in_slices(source, total, op, pieces)

    def _combine_in_slices(
        self, source: AnyArray, total: AnyArray, op: ReduceOp, pieces: Sequence[slice]
    ) -> None:
        """Each rank combines its slice of every block and every rank reads the result."""
        # One barrier per block: after it, this block's results are there and the next block is filled.
        self._fill(source, pieces, 0)
        self._barrier()
        for number, piece in enumerate(pieces):
            turn, count = self._turn, piece.stop - piece.start
            result = self._results[turn][: count * source.itemsize].view(source.dtype)
            if self._rank < self._slice_count:
                mine = cut_evenly(count, self._slice_count)[self._rank]
                blocks = [block[: count * source.itemsize].view(source.dtype)[mine] for block in self._blocks[turn]]
                self._combine(blocks, result[mine], op)
                self._across_nodes(result[mine], op)
            self._turn = 1 - turn
            self._fill(source, pieces, number + 1)
            self._barrier()
            total[piece] = result

    def _across_nodes(self, array: AnyArray, op: ReduceOp) -> None:
        """Combine an array with the same slice of the other nodes, in place."""
        if self._lane is None or not array.size:
            return
        # A MEAN is a sum here: the front divides once, by the number of all ranks.
        op = ReduceOp.SUM if op is ReduceOp.MEAN else op
        # MPI has no type for halves.
        wide = array.astype(combined_dtype(array.dtype, op, combines_halves=False), copy=False)
        self._lane.all_reduce(wide, wide, op)
        if wide is not array:
            array[...] = wide

    def all_reduce_allocated(self, source: AnyArray, total: AnyArray, op: ReduceOp) -> bool:
        """Collective. See `Backend.all_reduce_allocated`: each rank combines its slice and writes it to all."""
        # Whether the barrier comes may depend only on what all ranks know: the size does, the address does not.
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

    def reduce(self, source: AnyArray, total: AnyArray, op: ReduceOp, root: int) -> None:
        """Collective. See `Backend.reduce`."""
        result = total if self.communicator.rank == root else source.copy()
        self.all_reduce(source, result, op)

    def reduce_scatter(self, source: AnyArray, mine: AnyArray, counts: Sequence[int], op: ReduceOp) -> None:
        """Collective. See `Backend.reduce_scatter`."""
        if not self._is_one_node:
            total = source.copy()
            self.all_reduce(source, total, op)
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

    def broadcast(self, data: AnyArray, root: int) -> None:
        """Collective. See `Backend.broadcast`."""
        if not self._is_one_node:
            self._mpi.broadcast(data, root)
            return
        data = as_bytes(data)
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

    def all_gather(self, mine: AnyArray, gathered: AnyArray, counts: Sequence[int]) -> None:
        """Collective. See `Backend.all_gather`."""
        if not self._is_one_node:
            self._mpi.all_gather(mine, gathered, counts)
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

    def all_to_all(
        self, sent: AnyArray, sent_counts: Sequence[int], got: AnyArray, got_counts: Sequence[int]
    ) -> None:
        """Collective. See `Backend.all_to_all`."""
        self._mpi.all_to_all(sent, sent_counts, got, got_counts)
