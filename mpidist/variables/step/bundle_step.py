"""A step of one part: the ranks' gradients are added up, between nodes lane by lane, and the kernel is applied."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpidist.arrays import AnyArray
from mpidist.comm.arithmetic.combine import is_half
from mpidist.comm.arithmetic.tree_order import combine_pairs, leaves, pairing
from mpidist.comm.collective import Collective
from mpidist.options import ReduceOp
from mpidist.variables.step.bundle import GPU_BLOCK_BYTES, Block, Bundle, Update

# What goes to another node, or through a collective, at a time.
CHUNK_BYTES = 1 << 20

Pairs = Sequence[tuple[int, int]]


class BundleStep:
    """What one rank does in a step for one part and one selection of its variables.

    Args:
        part: Of a plan.
        numbers: Of variables in it, increasing.
    """

    def __init__(self, part: Bundle, numbers: Sequence[int]) -> None:
        self._arena = arena = part.arena
        self._node = node = arena.communicator.node
        self._is_shared = part.is_shared
        self._writes_back = part.writes_back
        spans = part.merged(numbers)
        total = sum(high - low for low, high in spans)
        chunk_bytes = arena.options.bytes_per_pack or (CHUNK_BYTES if arena.namespace is np else GPU_BLOCK_BYTES)
        mine = part.slice_of(total, node.rank, node.size) if part.is_shared else (0, total)
        # Each chunk: the piece of this rank's (or the node's first) gradient segment, and the blocks in it.
        self._chunks = [
            (part.first_segment[low:high], part.blocks(low, high))
            for low, high in part.pieces(spans, *mine, chunk_bytes)
        ]
        # Where every node has as many ranks as lanes, a rank's slice is its lane, and a chunk goes through reduction,
        # lane and kernel while it is in the cache. Else slices and lanes differ, and the phases are apart.
        self._is_fused = len(set(arena.communicator.node_sizes)) == 1
        self._lane_chunks: list[AnyArray] = []
        if part.is_shared and not self._is_fused and node.rank < arena.lane_count:
            lane = part.slice_of(total, node.rank, arena.lane_count)
            self._lane_chunks = [part.first_segment[a:b] for a, b in part.pieces(spans, *lane, chunk_bytes)]
        # Under `reproducible` the order is that of the tree over all ranks, which no lane knows: where there are
        # several nodes, each rank's own segment becomes the sum, at the cost of more messages.
        is_in_tree = arena.options.reproducible and part.is_shared
        self._pairs: Pairs = pairing(leaves(node.size)) if is_in_tree else ()
        self._own_chunks: list[AnyArray] = []
        if is_in_tree and len(arena.communicator.node_sizes) > 1:
            self._own_chunks = [part.gradient[a:b] for a, b in part.pieces(spans, 0, total, chunk_bytes)]

    def apply(self, update: Update) -> None:
        """Collective. Reduce the gradients and apply `update`, between the barriers of `Plan.step`."""
        if self._writes_back:
            self._apply_and_write_back(update, is_summed=False)
        elif self._is_shared and len(self._arena.communicator.node_sizes) == 1:
            for _, blocks in self._chunks:
                for parameter, gradients, slots, scratch in blocks:
                    update(parameter, _add(gradients, scratch[0], self._pairs), slots, scratch[1:])
        elif (self._is_fused or not self._is_shared) and not self._own_chunks:
            for chunk, blocks in self._chunks:
                self._reduce_chunk(chunk, blocks)
                update_all(blocks, update)
        else:
            self.reduce()
            for _, blocks in self._chunks:
                update_all(blocks, update)

    def apply_summed(self, update: Update) -> None:
        """Collective. `apply` where the first segment of each node, or each private one, holds the sums already."""
        if self._writes_back:
            self._apply_and_write_back(update, is_summed=True)
            return
        for _, blocks in self._chunks:
            update_all(blocks, update)

    def _apply_and_write_back(self, update: Update, *, is_summed: bool) -> None:
        """Every rank updates its private state and a copy of the parameters; one per node writes these back."""
        for chunk, blocks in self._chunks:
            if not is_summed:
                self._reduce_chunk(chunk, blocks)
            for parameter, gradients, slots, scratch in blocks:
                np.copyto(scratch[0], parameter)
                update(scratch[0], gradients[0], slots, scratch[1:])
                np.copyto(gradients[0], scratch[0])
        self._node.barrier()
        if self._node.rank == 0:
            for _, blocks in self._chunks:
                for parameter, gradients, _, _ in blocks:
                    np.copyto(parameter, gradients[0])
        self._node.barrier()

    def reduce(self) -> None:
        """Collective. Put the sums into the first segment, between the barriers of `Plan.step`."""
        if self._own_chunks:
            for chunk in self._own_chunks:
                _reduce(self._arena.collective, chunk)
            self._node.barrier()
            return
        if self._is_fused or not self._is_shared:
            for chunk, blocks in self._chunks:
                self._reduce_chunk(chunk, blocks)
            return
        for _, blocks in self._chunks:
            _add_in_place(blocks, self._pairs)
        self._node.barrier()
        for chunk in self._lane_chunks:
            _reduce(self._arena.lane, chunk)
        self._node.barrier()

    def _reduce_chunk(self, chunk: AnyArray, blocks: Sequence[Block]) -> None:
        _add_in_place(blocks, self._pairs)
        _reduce(self._arena.lane if self._is_shared else self._arena.collective, chunk)


def _add_in_place(blocks: Sequence[Block], pairs: Pairs) -> None:
    for block in blocks:
        if len(block.gradients) > 1:
            _add(block.gradients, block.gradients[0], pairs)


def _reduce(between: Collective | None, chunk: AnyArray) -> None:
    if between is not None:
        between.all_reduce(chunk, ReduceOp.SUM, in_place=True)


def update_all(blocks: Sequence[Block], update: Update) -> None:
    """Local. Apply `update` to blocks whose first gradient is the sum."""
    for parameter, gradients, slots, scratch in blocks:
        update(parameter, gradients[0], slots, scratch[1:])


def _add(gradients: Sequence[AnyArray], out: AnyArray, pairs: Pairs) -> AnyArray:
    """The sum in the order of the ranks, or of `pairs`; half precision is added up in float32."""
    if len(gradients) == 1:
        return gradients[0]
    if pairs:
        if not is_half(out.dtype):
            # Of these blocks this rank is the only reader, in all segments.
            return combine_pairs(gradients, pairs, ReduceOp.SUM)
        out[...] = combine_pairs([one.astype(np.float32) for one in gradients], pairs, ReduceOp.SUM)
        return out
    if out.dtype.itemsize == 2 and out.dtype.kind != "i" and out.dtype.kind != "u":
        total = gradients[0].astype(np.float32)
        for gradient in gradients[1:]:
            total += gradient.astype(np.float32)
        out[...] = total.astype(out.dtype)
        return out
    np.add(gradients[0], gradients[1], out=out)
    for gradient in gradients[2:]:
        np.add(out, gradient, out=out)
    return out
