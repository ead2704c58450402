"""The ways of a bundle's gradients through a step: how the ranks' gradients become sums, and what follows at once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from mpidist.arrays import AnyArray
from mpidist.comm.arithmetic.combine import is_half
from mpidist.comm.arithmetic.compiled_sums import CompiledSum, Pairs, in_order
from mpidist.comm.arithmetic.tree_order import combine_pairs, pairs_of_leaves
from mpidist.options import ReduceOp
from mpidist.variables.memory.arena_memory import ArenaMemory
from mpidist.variables.step.bundle import Block
from mpidist.variables.step.step import Phase
from mpidist.variables.update.compiled import CompiledUpdate, JoinedRuns
from mpidist.variables.update.kernel import Update

# `all_reduce(piece)` is Collective: it sums a piece of a gradient segment over nodes, or over all ranks, in place.
AllReduce = Callable[[AnyArray], object]
# A piece of a gradient segment, and the blocks in it.
Chunk = tuple[AnyArray, list[Block]]


def unwatched() -> np.errstate:
    """Local. A context of sums over nodes: one node alone may detect an overflow, and must not act on it.

    The sum is then infinite on all of them, and the updates show that in the variables.
    """
    return np.errstate(over="ignore")


class Add(NamedTuple):
    """The sum of the gradients of a node's ranks.

    Attributes:
        function: A function of gradients and `out` that puts the sum in `out`, or in the first of the gradients.
        pairs: Its order, as of `tree_order.pairing`.
    """

    function: Callable[[Sequence[AnyArray], AnyArray], AnyArray]
    pairs: Pairs


class GivenSums:
    """A bundle whose first gradient segment holds the sums already.

    Args:
        blocks: The blocks of this rank's slice.
    """

    def __init__(self, blocks: Sequence[Block]) -> None:
        self._work = BlockList(blocks)

    def apply(self, update: Update) -> None:
        """Collective. See `Phase.apply`."""
        self._work.update(update)

    def reduce(self) -> None:
        """Collective. See `Phase.reduce`: nothing is left to be summed."""


class NodeSums:
    """A bundle in the memory of one node: each rank reads all ranks' gradients of its slice.

    Args:
        blocks: The blocks of this rank's slice.
        add: The sum of the ranks' gradients of a block.
    """

    def __init__(self, blocks: Sequence[Block], add: Add) -> None:
        self._blocks = blocks
        self._add = add

    @functools.cached_property
    def _runs(self) -> JoinedRuns:
        return JoinedRuns(self._blocks)

    def apply(self, update: Update) -> None:
        """Collective. See `Phase.apply`."""
        add, pairs = self._add
        if isinstance(update, CompiledUpdate) and update.sum_and_update(self._runs, pairs):
            return
        for parameter, gradients, slots, total, scratch in self._blocks:
            update(parameter, add(gradients, total), slots, scratch)

    def reduce(self) -> None:
        """Collective. See `Phase.reduce`."""
        add_in_place(self._blocks, self._add)


class ChunkSums:
    """A bundle that is summed by a collective: a chunk is reduced and updated while it is in the cache.

    Args:
        chunks: The chunks of this rank's slice.
        add: The sum of the gradients of the node's ranks.
        all_reduce: A function that sums over the nodes, or over all ranks where memory is private.
    """

    def __init__(self, chunks: Sequence[Chunk], add: Add, all_reduce: AllReduce) -> None:
        self._chunks = [(chunk, blocks, BlockList(blocks)) for chunk, blocks in chunks]
        self._add = add
        self._all_reduce = all_reduce

    def apply(self, update: Update) -> None:
        """Collective. See `Phase.apply`."""
        for chunk, blocks, work in self._chunks:
            with unwatched():
                add_in_place(blocks, self._add)
                self._all_reduce(chunk)
            work.update(update)

    def reduce(self) -> None:
        """Collective. See `Phase.reduce`."""
        for chunk, blocks, _ in self._chunks:
            add_in_place(blocks, self._add)
            self._all_reduce(chunk)


class PhasedSums:
    """A bundle that is summed as a whole before it is updated.

    Args:
        reduction: A function that puts the sums into the first segment; it ends with a barrier of the node.
        blocks: The blocks of this rank's slice.
    """

    def __init__(self, reduction: Callable[[], None], blocks: Sequence[Block]) -> None:
        self._reduction = reduction
        self._work = BlockList(blocks)

    def apply(self, update: Update) -> None:
        """Collective. See `Phase.apply`."""
        with unwatched():
            self._reduction()
        self._work.update(update)

    def reduce(self) -> None:
        """Collective. See `Phase.reduce`."""
        self._reduction()


class WriteBack:
    """A bundle with private gradients and state, since node memory ran out, whose parameters are in node memory.

    Every rank updates a copy of the parameters, and one rank of each node writes the copy back, so that each byte of
    node memory has one writer.

    Args:
        arena: The arena of the bundle.
        blocks: All blocks of the step.
        phase: The phase that sums the gradients and applies an update.
        room: Private memory for a block.
    """

    def __init__(self, arena: ArenaMemory, blocks: Sequence[Block], phase: Phase, room: AnyArray) -> None:
        self._blocks = blocks
        self._room = room
        self._phase = phase
        self._barrier = arena.barrier
        self._writes = arena.communicator.node.rank == 0

    def apply(self, update: Update) -> None:
        """Collective. See `Phase.apply`."""
        self._phase.apply(aside(update, self._room))
        # Other ranks may still be reading the old parameters.
        self._barrier()
        if self._writes:
            write_back(self._blocks)
        self._barrier()

    def reduce(self) -> None:
        """Collective. See `Phase.reduce`."""
        self._phase.reduce()


class BlockList:
    """The blocks that a rank updates by sums, one after another; for a compiled update all of them at once.

    Args:
        blocks: The blocks.
    """

    def __init__(self, blocks: Sequence[Block]) -> None:
        self._blocks = blocks

    @functools.cached_property
    def _sums(self) -> JoinedRuns:
        return JoinedRuns([block._replace(gradients=block.gradients[:1]) for block in self._blocks])

    def update(self, update: Update) -> None:
        """Local. Apply `update` to the blocks, whose first gradients are sums."""
        if isinstance(update, CompiledUpdate) and update.sum_and_update(self._sums, ()):
            return
        for parameter, gradients, slots, _, scratch in self._blocks:
            update(parameter, gradients[0], slots, scratch)


def aside(update: Update, room: AnyArray) -> Update:
    """Local. The same update of a copy of the parameter, which it leaves in the memory of the gradient.

    Args:
        update: The update of a bundle's blocks.
        room: Private memory for the copy of a block.
    """

    def update_copy(
        parameter: AnyArray, gradient: AnyArray, slots: Sequence[AnyArray], scratch: Sequence[AnyArray]
    ) -> None:
        copy = room[: parameter.size]
        np.copyto(copy, parameter)
        update(copy, gradient, slots, scratch)
        np.copyto(gradient, copy)

    return update_copy


def write_back(blocks: Sequence[Block]) -> None:
    """Local. Set parameters to what `aside` has left in the memory of their gradients."""
    for parameter, gradients, _, _, _ in blocks:
        np.copyto(parameter, gradients[0])


def add_in_place(blocks: Sequence[Block], add: Add) -> None:
    """Local. Put the sums into the first gradients of the blocks."""
    for block in blocks:
        add.function(block.gradients, block.gradients[0])


def adder(dtype: np.dtype[Any], count: int, byte_count: int, *, in_tree: bool) -> Add:
    """Local. The function that sums the gradients of a block; half precision is added up in float32.

    Args:
        dtype: The dtype of the gradients.
        count: Their number.
        byte_count: The number of bytes of the largest block.
        in_tree: Whether to add in the order of the tree over the ranks, and not rank after rank.
    """
    if count == 1:
        return Add(_take_only, ())
    pairs_of = pairs_of_leaves if in_tree else in_order
    pairs = pairs_of(count)
    if is_half(dtype):
        return Add(partial(_add_halves_in_pairs, pairs) if in_tree else _add_halves, pairs)
    by_numpy = partial(_add_in_pairs, pairs) if in_tree else _add_in_order
    # Small steps enter no function that does nothing.
    if not CompiledSum.pays(count, byte_count):
        return Add(by_numpy, pairs)
    return Add(partial(_add_compiled, CompiledSum(pairs_of, count), by_numpy), pairs)


def _take_only(gradients: Sequence[AnyArray], _out: AnyArray) -> AnyArray:
    return gradients[0]


def _add_compiled(
    compiled: CompiledSum, by_numpy: Callable[[Sequence[AnyArray], AnyArray], AnyArray],
    gradients: Sequence[AnyArray], out: AnyArray,
) -> AnyArray:
    return out if compiled.add(gradients, out) else by_numpy(gradients, out)


def _add_in_order(gradients: Sequence[AnyArray], out: AnyArray) -> AnyArray:
    np.add(gradients[0], gradients[1], out=out)
    for gradient in gradients[2:]:
        np.add(out, gradient, out=out)
    return out


def _add_halves(gradients: Sequence[AnyArray], out: AnyArray) -> AnyArray:
    total = gradients[0].astype(np.float32)
    for gradient in gradients[1:]:
        total += gradient.astype(np.float32)
    out[...] = total.astype(out.dtype)
    return out


def _add_in_pairs(pairs: Pairs, gradients: Sequence[AnyArray], _out: AnyArray) -> AnyArray:
    # It overwrites the gradients: of these blocks this rank is the only reader, in all segments.
    return combine_pairs(gradients, pairs, ReduceOp.SUM)


def _add_halves_in_pairs(pairs: Pairs, gradients: Sequence[AnyArray], out: AnyArray) -> AnyArray:
    out[...] = combine_pairs([gradient.astype(np.float32) for gradient in gradients], pairs, ReduceOp.SUM)
    return out
