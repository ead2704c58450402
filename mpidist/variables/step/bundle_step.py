"""The choice of a bundle's way through a step: how its gradients are summed and its variables updated.

- sums that are there already, and one replica: the kernel alone (`GivenSums`);
- node memory on one node: each block is added up and updated while it is in the cache (`NodeSums`);
- several nodes of one size, and private memory: chunk by chunk, with an all-reduce of each chunk (`ChunkSums`);
- state in shards: sums and parameters are exchanged in lanes (`ShardedSums`);
- all else: first all sums (`LaneReduction`, `SegmentReduction`, compression), then the kernel (`PhasedSums`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from mpidist.arrays import AnyArray
from mpidist.comm.choice.sizes import NEVER, circulant_begins
from mpidist.comm.first_use import at_first_use
from mpidist.comm.front.front import CollectiveFront
from mpidist.options import ReduceOp
from mpidist.variables.memory.arena_memory import ArenaMemory
from mpidist.variables.step.bundle import Block, Bundle
from mpidist.variables.step.step import Phase
from mpidist.variables.step.sums import (
    Add,
    AllReduce,
    Chunk,
    ChunkSums,
    GivenSums,
    NodeSums,
    PhasedSums,
    WriteBack,
    add_in_place,
    adder,
)
from mpidist.variables.update.kernel import GPU_BLOCK_BYTES

if TYPE_CHECKING:
    from mpidist.comm.front.halves import is_halved
    from mpidist.variables.step.sharding.sharded_sums import ShardedSums
    from mpidist.variables.step.sharding.shards import Shards
else:
    is_halved = at_first_use("mpidist.comm.front.halves", "is_halved")
    ShardedSums = at_first_use("mpidist.variables.step.sharding.sharded_sums", "ShardedSums")

# Bytes of a message between nodes, or through a collective: a chunk is added up, sent and updated while it is in a
# cache.
CHUNK_BYTES = 1 << 20


def open_bundle_step(bundle: Bundle, numbers: Sequence[int], *, is_summed: bool = False) -> Phase:
    """Local. The phase of this rank for some variables of a bundle.

    Args:
        bundle: The bundle of a plan.
        numbers: The numbers of variables in it, increasing.
        is_summed: Whether the first segment of each node, or each private one, holds the sums already.
    """
    chunks = _own_chunks(bundle, numbers)
    phase = _open_sums(bundle, numbers, chunks, is_summed=is_summed)
    if bundle.shards is not None:
        reduction = None if _lanes_sum(bundle.arena) and not is_summed else phase.reduce
        phase = _open_sharded(bundle, bundle.shards, numbers, reduction)
    return WriteBack(bundle.arena, _blocks_in(chunks), phase, bundle.room) if bundle.writes_back else phase


def open_reduced_step(bundle: Bundle, numbers: Sequence[int], reduction: Callable[[], None]) -> Phase:
    """Local. The phase of this rank for some variables of a private bundle, by a reduction of its own.

    Args:
        bundle: The bundle of a plan.
        numbers: The numbers of variables in it, increasing.
        reduction: A Collective function that puts the sums into this rank's gradients.
    """
    if bundle.shards is not None:
        return _open_sharded(bundle, bundle.shards, numbers, reduction)
    return PhasedSums(reduction, _blocks_in(_own_chunks(bundle, numbers)))


def _open_sharded(
    bundle: Bundle, shards: Shards, numbers: Sequence[int], reduction: Callable[[], None] | None
) -> Phase:
    return ShardedSums(
        bundle, shards, numbers, add=_adder_of(bundle), byte_count=chunk_bytes(bundle.arena), reduction=reduction
    )


def _lanes_sum(arena: ArenaMemory) -> bool:
    """Whether the shards' sums are made in the order of the nodes, and no other way was asked for."""
    replicas = arena.replicas
    return not (arena.options.reproducible or replicas.has_user_collective or replicas.wire_dtype is not None)


def _open_sums(bundle: Bundle, numbers: Sequence[int], chunks: Sequence[Chunk], *, is_summed: bool) -> Phase:
    arena, sizes = bundle.arena, bundle.arena.communicator.node_sizes
    blocks = _blocks_in(chunks)
    # Two collectives do more than add, therefore they are asked on one rank, too: the user's own, and one with a
    # `wire_dtype`, which rounds the sums.
    does_more = arena.replicas.has_user_collective or arena.replicas.wire_dtype is not None
    if is_summed or (arena.communicator.size == 1 and not does_more):
        return GivenSums(blocks)
    if not bundle.is_shared:
        return ChunkSums(chunks, _adder_of(bundle), _all_reduce_of(bundle, numbers, arena.collective))
    if len(sizes) == 1:
        return NodeSums(blocks, _adder_of(bundle))
    if arena.options.reproducible:
        return PhasedSums(SegmentReduction(bundle, numbers), blocks)
    if arena.lane is not None and len(set(sizes)) == 1:
        # Every node has as many ranks as lanes, so a rank's slice is its lane.
        return ChunkSums(chunks, _adder_of(bundle), _all_reduce_of(bundle, numbers, arena.lane))
    return PhasedSums(LaneReduction(bundle, numbers, blocks), blocks)


def _adder_of(bundle: Bundle) -> Add:
    arena = bundle.arena
    largest = min(bundle.room.nbytes, bundle.size * bundle.dtype.itemsize)
    return adder(bundle.dtype, bundle.segment_count, largest, in_tree=arena.options.reproducible)


def _all_reduce_of(bundle: Bundle, numbers: Sequence[int], collective: CollectiveFront) -> AllReduce:
    """The sums of pieces of gradients: rounded to the wire dtype where all gradients together are large enough."""
    wire_dtype = bundle.arena.replicas.wire_dtype
    if wire_dtype is not None:
        # Neither the variable nor the piece decides, which depend on how a model and a message are cut.
        byte_count = sum(high - low for low, high in bundle.merged(numbers)) * bundle.dtype.itemsize
        if is_halved(bundle.dtype, byte_count, wire_dtype):
            return partial(collective.sum_in_halves, wire_dtype=wire_dtype)
    return partial(collective.all_reduce, op=ReduceOp.SUM, in_place=True)


def chunk_bytes(arena: ArenaMemory) -> int:
    """Local. The number of bytes of gradients that are sent at a time."""
    if arena.options.bytes_per_pack:
        return arena.options.bytes_per_pack
    if arena.namespace is not np:
        return GPU_BLOCK_BYTES
    # With many nodes only larger arrays go over a circulant graph.
    circulant_from = circulant_begins(len(arena.communicator.node_sizes))
    return CHUNK_BYTES if circulant_from == NEVER else max(CHUNK_BYTES, circulant_from)


def _blocks_in(chunks: Sequence[Chunk]) -> list[Block]:
    return [block for _, blocks in chunks for block in blocks]


def _own_chunks(bundle: Bundle, numbers: Sequence[int]) -> list[Chunk]:
    node = bundle.arena.communicator.node
    spans = bundle.merged(numbers)
    total = sum(high - low for low, high in spans)
    low, high = (0, total)
    if bundle.is_shared:
        low, high = bundle.slice_of(total, node.rank, bundle.writer_count(total, node.size))
    return [
        (bundle.first_segment[start:stop], bundle.blocks(start, stop))
        for start, stop in bundle.pieces(spans, low, high, chunk_bytes(bundle.arena))
    ]


class LaneReduction:
    """Sums over nodes of different sizes: slices are added up inside the nodes, then lanes are summed between them.

    A lane is a slice for the smallest node; further ranks of a node have none.

    Args:
        bundle: In node memory.
        numbers: The numbers of variables in it, increasing.
        blocks: The blocks of this rank's slice.
    """

    def __init__(self, bundle: Bundle, numbers: Sequence[int], blocks: Sequence[Block]) -> None:
        arena, node = bundle.arena, bundle.arena.communicator.node
        self._blocks = blocks
        self._add = _adder_of(bundle)
        self._barrier = arena.barrier
        self._all_reduce: AllReduce | None = None
        self._chunks: list[AnyArray] = []
        if arena.lane is not None:
            self._all_reduce = _all_reduce_of(bundle, numbers, arena.lane)
            spans = bundle.merged(numbers)
            total = sum(stop - start for start, stop in spans)
            low, high = bundle.slice_of(total, node.rank, bundle.writer_count(total, arena.lane_count))
            pieces = bundle.pieces(spans, low, high, chunk_bytes(arena))
            self._chunks = [bundle.first_segment[start:stop] for start, stop in pieces]

    def __call__(self) -> None:
        """Collective. Put the sums into the first segment."""
        add_in_place(self._blocks, self._add)
        # A lane covers slices of several ranks: they must have been added up.
        self._barrier()
        if self._all_reduce is not None:
            for chunk in self._chunks:
                self._all_reduce(chunk)
        # A slice covers several lanes: they must have been summed.
        self._barrier()


class SegmentReduction:
    """Sums over several nodes in the order of the tree over all ranks, which no lane knows (`reproducible`).

    Each rank's own segment becomes the sum, at the cost of more messages.

    Args:
        bundle: In node memory.
        numbers: The numbers of variables in it, increasing.
    """

    def __init__(self, bundle: Bundle, numbers: Sequence[int]) -> None:
        spans = bundle.merged(numbers)
        pieces = bundle.pieces(spans, 0, sum(high - low for low, high in spans), chunk_bytes(bundle.arena))
        self._chunks = [bundle.gradient[start:stop] for start, stop in pieces]
        self._collective = bundle.arena.collective
        self._barrier = bundle.arena.barrier

    def __call__(self) -> None:
        """Collective. Put the sums into every segment."""
        for chunk in self._chunks:
            self._collective.all_reduce(chunk, ReduceOp.SUM, in_place=True)
        # The updates read the first rank's segment.
        self._barrier()
