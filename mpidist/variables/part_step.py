"""A step of one part: the ranks' gradients are added up, between nodes lane by lane, and the kernel is applied."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpidist.comm.collective import AnyArray, Collective
from mpidist.options import ReduceOp
from mpidist.variables.part import Block, Part, Update

# What goes to another node, or through a collective, at a time.
CHUNK_BYTES = 1 << 20


class PartStep:
    """What one rank does in a step for one part and one selection of its variables.

    Args:
        part: Of a plan.
        numbers: Of variables in it, increasing.
    """

    def __init__(self, part: Part, numbers: Sequence[int]) -> None:
        self._arena = arena = part.arena
        self._node = node = arena.communicator.node
        self._is_shared = part.is_shared
        self._writes_back = part.writes_back
        spans = part.merged(numbers)
        total = sum(high - low for low, high in spans)
        chunk_bytes = arena.options.bytes_per_pack or CHUNK_BYTES
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

    def apply(self, update: Update) -> None:
        """Collective. Reduce the gradients and apply `update`, between the barriers of `Plan.step`."""
        if self._is_shared and len(self._arena.communicator.node_sizes) == 1:
            for _, blocks in self._chunks:
                for parameter, gradients, slots, scratch in blocks:
                    update(parameter, _add(gradients, scratch[0]), slots, scratch[1:])
        elif self._writes_back:
            self._apply_and_write_back(update)
        elif self._is_fused or not self._is_shared:
            for chunk, blocks in self._chunks:
                self._reduce_chunk(chunk, blocks)
                _update_all(blocks, update)
        else:
            self.reduce()
            for _, blocks in self._chunks:
                _update_all(blocks, update)

    def _apply_and_write_back(self, update: Update) -> None:
        """Every rank updates its private state and a copy of the parameters; one per node writes these back."""
        for chunk, blocks in self._chunks:
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
        if self._is_fused or not self._is_shared:
            for chunk, blocks in self._chunks:
                self._reduce_chunk(chunk, blocks)
            return
        for _, blocks in self._chunks:
            _add_in_place(blocks)
        self._node.barrier()
        for chunk in self._lane_chunks:
            _reduce(self._arena.lane, chunk)
        self._node.barrier()

    def _reduce_chunk(self, chunk: AnyArray, blocks: Sequence[Block]) -> None:
        _add_in_place(blocks)
        _reduce(self._arena.lane if self._is_shared else self._arena.collective, chunk)


def _add_in_place(blocks: Sequence[Block]) -> None:
    for block in blocks:
        if len(block.gradients) > 1:
            _add(block.gradients, block.gradients[0])


def _reduce(between: Collective | None, chunk: AnyArray) -> None:
    if between is not None:
        between.all_reduce(chunk, ReduceOp.SUM, in_place=True)


def _update_all(blocks: Sequence[Block], update: Update) -> None:
    for parameter, gradients, slots, scratch in blocks:
        update(parameter, gradients[0], slots, scratch[1:])


def _add(gradients: Sequence[AnyArray], out: AnyArray) -> AnyArray:
    """The sum in the order of the ranks; half precision is added up in float32."""
    if len(gradients) == 1:
        return gradients[0]
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
