"""The node backend: the ranks of a node combine arrays in memory that they share, each rank its slice.

Small arrays pass through blocks of node memory (`shared_blocks.py`). Large arrays are read and written in place,
if the system allows that (`direct_copies.py`). Both combine what they have of a node's ranks, and pass it to the lane
of this rank where there are other nodes (`lane.py`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpidist.arrays import AnyArray, as_bytes
from mpidist.comm.arithmetic.combination import Combination
from mpidist.comm.arithmetic.combine import FUNCTIONS, is_half, open_quiet
from mpidist.comm.arithmetic.slices import own_slice, slices_of
from mpidist.comm.backend import Backend
from mpidist.comm.backends.direct_copies import DirectCopies, piece_bytes
from mpidist.comm.backends.lane import Lane
from mpidist.comm.backends.mpi import MpiBackend
from mpidist.comm.backends.shared_blocks import SharedBlocks
from mpidist.comm.calls.rank_tree import MOST_FLAT
from mpidist.comm.group.communicator import Communicator
from mpidist.comm.group.resource import end_all
from mpidist.comm.memory.node_barrier import NodeBarrier
from mpidist.comm.memory.peer_memory import open_peer_memory
from mpidist.comm.memory.shared_buffers import SharedBuffers
from mpidist.options import CommunicationOptions, ReduceOp

logger = logging.getLogger("mpidist")

# From this size on ranks check whether their arrays are shared already. It costs a barrier: 64 KB took 36 us with
# it and 26 us without.
_LOOKED_UP_BYTES = 1 << 18
# The size of a block of arrays that are shared already, where a rank reads and writes the blocks of all ranks.
SHARED_BLOCK_BYTES = 1 << 18
# Up to this size of all ranks' arrays together every rank combines whole arrays, with one barrier. 4 ranks on 2 cores
# took 14 us for 4 bytes, and 54 us in slices; 53 and 72 us for 64 KB; 175 us both ways for 256 KB.
_AT_ONCE_BYTES = 1 << 19
# The same limit for the array of one rank.
_AT_ONCE_BYTES_OF_RANK = 1 << 17
# The size of what is combined across nodes at once where it goes over a circulant graph.
_CIRCULANT_BYTES = 1 << 20
# Up to this size new results of all ranks cost less than looking up what was kept.
_SMALL_BYTES = 1 << 14
# The number of dtypes and sizes for which views of blocks are kept.
_KEPT = 256


class NodeBackend(Backend):
    """Collective. Reductions, broadcasts and gathers in node memory. MPI does all else, and communicates between nodes.

    Args:
        communicator: An `MpiCommunicator`.
        options: The options: `bytes_per_pack` is the size of a block; under `reproducible` the ranks of one node
            combine in the tree order.
        direct_from: Arrays of this size in bytes and above are copied directly between processes. The same on every
            rank.
        circulant_from: Pieces of this size in bytes and above are combined over a circulant graph of the nodes; None:
            none are. The same on every rank.

    Attributes:
        direct_from: The constructor's argument. None if the system does not let processes read each other's memory.

    Raises:
        UnavailableError: There is no memory that ranks share; on every rank.
    """

    combines_halves = True
    compares_calls = True

    def __init__(
        self, communicator: Communicator, options: CommunicationOptions, direct_from: int,
        circulant_from: int | None = None,
    ) -> None:
        self.communicator = communicator
        self._mpi = MpiBackend(communicator, CommunicationOptions())
        self._rank, self._size = communicator.node.rank, communicator.node.size
        self._is_one_node = len(communicator.node_sizes) == 1
        # The tree order is an order of all ranks. Lanes, which combine across nodes, do not keep it.
        in_tree = options.reproducible and self._is_one_node
        self._combination = Combination(self._size, in_tree=in_tree)
        self._lane = None if self._is_one_node else Lane(communicator, circulant_from)
        # What is combined across nodes at once must not be too small for the circulant graph.
        self._across_bytes = 0
        if circulant_from is not None:
            self._across_bytes = options.bytes_per_pack or max(_CIRCULANT_BYTES, circulant_from)
        self._slice_count = min(communicator.node_sizes)
        self._blocks = SharedBlocks(communicator, self._combination, self._lane, options.bytes_per_pack)
        self._barrier = self._blocks.barrier
        self._buffers = SharedBuffers(communicator)
        self._has_allocated = False
        self._is_in_order = self._combination.is_in_order
        at_once = min(self._blocks.block_bytes, _AT_ONCE_BYTES // self._size, _AT_ONCE_BYTES_OF_RANK, direct_from - 1)
        # Where ranks outnumber cores, the calls of all of them together would grow with the square of the ranks.
        is_wide = isinstance(self._barrier, NodeBarrier) and self._size > max(MOST_FLAT, self._barrier.core_count)
        self._at_once_bytes = at_once if self._is_one_node and not is_wide else 0
        self._kept: dict[tuple[np.dtype[Any], int], tuple[list[list[AnyArray]], AnyArray]] = {}
        self._spare = np.empty(self._blocks.block_bytes, np.uint8)
        self._quietly = open_quiet()
        self._direct = self._open_direct(options.bytes_per_pack, direct_from)
        self.direct_from = None if self._direct is None else direct_from

    def _open_direct(self, bytes_per_pack: int, direct_from: int) -> DirectCopies | None:
        """Collective. Direct copies; None if the system does not allow them."""
        peers, why_not = open_peer_memory(self.communicator, self._blocks.addresses, self._barrier)
        way = f"all arrays pass through shared blocks: {why_not}"
        direct = None
        if peers is not None:
            pieces = piece_bytes(max(self.communicator.node_sizes), bytes_per_pack)
            direct = DirectCopies(
                self.communicator, peers, self._combination, self._lane, pieces, limit=direct_from,
                across_bytes=self._across_bytes,
            )
            way = f"arrays of {direct_from} bytes and above are copied directly between processes"
        if self.communicator.rank == 0:
            logger.info("backend NODE: %s", way)
        return direct

    def _way(self, source: AnyArray, target: AnyArray, byte_count: int) -> DirectCopies | SharedBlocks:
        """Collective. Direct copies if they take these arrays, otherwise shared blocks; see `DirectCopies.takes`."""
        if self._direct is not None and self._direct.takes(source, target, byte_count):
            return self._direct
        return self._blocks

    def allocate(self, byte_count: int) -> AnyArray | None:
        """Collective. Allocate an array in node memory; see `Backend.allocate`."""
        self._has_allocated = True
        return self._buffers.allocate(byte_count)

    def all_reduce(self, source: AnyArray, total: AnyArray, op: ReduceOp) -> None:
        """Collective. See `Backend.all_reduce`."""
        if source.nbytes <= self._at_once_bytes:
            self._combine_at_once(source, total, op)
            return
        if self._has_allocated and self.all_reduce_allocated(source, total, op):
            return
        way = self._way(source, total, source.nbytes)
        if way is self._blocks and self._is_one_node and self._size == 2:
            for piece in way.pieces(source):
                self._combine_at_once(source[piece], total[piece], op)
            return
        way.all_reduce(source, total, op)

    def open_small(
        self, op: ReduceOp, dtype: np.dtype[Any], shape: tuple[int, ...]
    ) -> Callable[[AnyArray], AnyArray] | None:
        """Local. See `Backend.open_small`; as `_combine_at_once`, with the same bits."""
        byte_count = math.prod(shape) * dtype.itemsize
        if byte_count > min(self._at_once_bytes, _SMALL_BYTES) or not self._is_in_order or is_half(dtype):
            return None
        views = [
            [block[:byte_count].view(dtype).reshape(shape) for block in blocks] for blocks in self._blocks.blocks
        ]
        memory, barrier, rank, quietly, function = (
            self._blocks, self._barrier, self._rank, self._quietly, FUNCTIONS[op]
        )
        empty, is_pair = np.empty, self._size == 2

        def combine_small(source: AnyArray) -> AnyArray:
            blocks = views[turn := memory.turn]
            blocks[rank][...] = source
            barrier()
            memory.turn = 1 - turn
            # The array is made first: NumPy would give a scalar for one without dimensions.
            total: AnyArray = empty(shape, dtype)
            quietly(function, blocks[0], blocks[1], out=total)
            if not is_pair:
                for block in blocks[2:]:
                    result: AnyArray = empty(shape, dtype)
                    quietly(function, total, block, out=result)
                    total = result
            return total

        return combine_small

    def all_reduce_allocated(self, source: AnyArray, total: AnyArray, op: ReduceOp) -> bool:
        """Collective. See `Backend.all_reduce_allocated`. Each rank combines its slice and writes it to all arrays."""
        return self._combine_allocated(source, total, op, 1)

    def mean_allocated(self, array: AnyArray) -> bool:
        """Collective. See `Backend.mean_allocated`: blocks are divided in the cache, and not in one more pass."""
        return self._combine_allocated(array, array, ReduceOp.SUM, self.communicator.size)

    def _combine_allocated(self, source: AnyArray, total: AnyArray, op: ReduceOp, divisor: int) -> bool:
        # All ranks must enter the barrier or none: the size, which all ranks share, may decide, the address may not.
        if not self._has_allocated or source.nbytes < _LOOKED_UP_BYTES:
            return False
        place = self._buffers.place(source) if total is source else -1
        places = self._blocks.places
        places[self._rank] = place
        self._barrier()
        agreed = self.communicator.all_reduce_max if not self._is_one_node else int
        if agreed(int(place < 0 or bool((places != place).any()))):
            return False
        everyones = self._buffers.arrays_at(place, source)
        mine = own_slice(source.size, source.itemsize, self._rank, self._slice_count)
        # By the inverse of a power of two, which has the same bits: a division takes longer.
        is_exact = divisor & (divisor - 1) == 0 and source.dtype.kind == "f"
        if mine.start < mine.stop:
            parts = [one[mine] for one in everyones]
            if divisor == 1 and self._is_one_node and self._combination.add_to_all(parts, op):
                mine = slice(0, 0)
            length = max(1, max(SHARED_BLOCK_BYTES, self._across_bytes) // source.itemsize)
            for begin in range(mine.start, mine.stop, length):
                blocks = [one[begin : min(begin + length, mine.stop)] for one in everyones]
                self._combination.combine(blocks, blocks[0], op)
                if self._lane is not None:
                    self._lane.all_reduce(blocks[0], op)
                if divisor != 1:
                    (np.multiply if is_exact else np.divide)(
                        blocks[0], 1 / divisor if is_exact else divisor, out=blocks[0]
                    )
                for block in blocks[1:]:
                    block[...] = blocks[0]
        self._barrier()
        return True

    def _combine_at_once(self, source: AnyArray, total: AnyArray, op: ReduceOp) -> None:
        """Combine whole arrays: each rank shows its array and combines all ranks' itself, in their order.

        This takes one barrier, slices take two. All ranks get the same bits, since they combine in the same order.
        Views and NumPy's function are kept for the next call: making them takes longer than the barrier.
        """
        key = source.dtype, source.size
        kept = self._kept.get(key)
        if kept is None:
            kept = self._kept[key] = self._keep(*key)
        views, spare = kept
        memory = self._blocks
        blocks = views[memory.turn]
        blocks[self._rank][...] = source
        # `SharedBlocks` says why one barrier is enough, and why the turn ends after it.
        self._barrier()
        memory.turn = 1 - memory.turn
        if not self._is_in_order or (source.dtype.itemsize == 2 and is_half(source.dtype)):
            # The tree order changes its sources, and other ranks still read the blocks.
            self._combination.combine([block.copy() for block in blocks], total, op)
            return
        function = FUNCTIONS[op]
        quietly = self._quietly
        # NumPy takes 0.8 us to add one element in place and 0.25 us into another array. Two arrays therefore take
        # turns, so that the last result is in `total`.
        result, other = (total, spare) if self._size % 2 == 0 else (spare, total)
        quietly(function, blocks[0], blocks[1], out=result)
        for block in blocks[2:]:
            quietly(function, result, block, out=other)
            result, other = other, result

    def _keep(self, dtype: np.dtype[Any], size: int) -> tuple[list[list[AnyArray]], AnyArray]:
        """Views of all ranks' blocks as arrays of this dtype and size, for both turns, and a view of a spare array."""
        if len(self._kept) == _KEPT:
            self._kept.clear()
        views = [[block[: size * dtype.itemsize].view(dtype) for block in blocks] for blocks in self._blocks.blocks]
        return views, self._spare[: size * dtype.itemsize].view(dtype)

    def _end(self, *, is_collective: bool) -> None:
        end_all([one for one in (self._mpi, self._lane) if one is not None], is_collective=is_collective)
        # Views of node memory, which is freed with the last view.
        self._kept.clear()
        self._blocks.drop()
        self._direct = None

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
        self._way(source, source, source.nbytes).reduce_scatter(source, mine, counts, op)

    def broadcast(self, data: AnyArray, root: int) -> None:
        """Collective. See `Backend.broadcast`."""
        if not self._is_one_node:
            self._mpi.broadcast(data, root)
            return
        data = as_bytes(data)
        self._way(data, data, data.nbytes).broadcast(data, root)

    def all_gather(self, mine: AnyArray, gathered: AnyArray, counts: Sequence[int]) -> None:
        """Collective. See `Backend.all_gather`."""
        if not self._is_one_node:
            self._mpi.all_gather(mine, gathered, counts)
            return
        self._way(mine, mine, gathered.nbytes).all_gather(mine, gathered, counts)

    def all_to_all(
        self, sent: AnyArray, sent_counts: Sequence[int], got: AnyArray, got_counts: Sequence[int]
    ) -> None:
        """Collective. See `Backend.all_to_all`."""
        self._mpi.all_to_all(sent, sent_counts, got, got_counts)
