"""The step of a bundle whose state is in shards: sums go to the node that has the state, new parameters to all.

In a lane: the sums of each node for each shard, an all-to-all, the addition in the order of the nodes, the kernel on
the own shard, and an all-gather of the new parameters. Together these are the bytes of an all-reduce.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

from mpidist.arrays import AnyArray
from mpidist.comm.collective import Collective
from mpidist.variables.step.bundle import Block, Bundle
from mpidist.variables.step.sharding.shards import Shards
from mpidist.variables.step.sums import Add, BlockList, add_in_place, unwatched
from mpidist.variables.update.halves import state_dtype
from mpidist.variables.update.kernel import Update

# The least bytes of a message to one node: with many nodes, many small ones would take longer.
LEAST_PART_BYTES = 1 << 16

Ranges = list[tuple[int, int]]


class LaneRound(NamedTuple):
    """The part of a bundle that a lane sends at a time.

    Attributes:
        blocks: The blocks of all shards.
        work: The blocks of the own shard.
        sums: For each shard the pieces of the gradients.
        results: For each shard the pieces of the new parameters.
    """

    blocks: list[Block]
    work: BlockList
    sums: list[list[AnyArray]]
    results: list[list[AnyArray]]


class LaneExchange:
    """Collective over a lane. The messages of some variables of a bundle: sums to their shard, parameters to all.

    Args:
        bundle: The bundle.
        shards: The shards of its state.
        numbers: The numbers of variables in it, increasing.
        byte_count: Number of bytes that go around at a time.

    Attributes:
        rounds: The rounds in their order; none on a rank without a lane.
    """

    def __init__(self, bundle: Bundle, shards: Shards, numbers: Sequence[int], byte_count: int) -> None:
        self._shards = shards
        self._dtype, self._xp = bundle.dtype, bundle.arena.namespace
        self.rounds: list[LaneRound] = []
        collective, lane = shards.collective, shards.lane
        if collective is None or lane is None:
            return
        self._collective: Collective = collective
        self._messages = shards.messages
        spans = bundle.merged(numbers)
        count = shards.count
        part_bytes = max(byte_count // count, min(byte_count, LEAST_PART_BYTES))
        dealt = [_rounds_of(bundle, shards.within(spans, shard), shards, part_bytes) for shard in range(count)]
        for number in range(max(map(len, dealt))):
            ranges = [one[number] if number < len(one) else [] for one in dealt]
            blocks = [[block for low, high in of_shard for block in bundle.blocks(low, high)] for of_shard in ranges]
            sums = [[bundle.first_segment[low:high] for low, high in of_shard] for of_shard in ranges]
            # Where one rank of a node writes for all, the new parameters are in the memory of the gradients until then.
            results = sums if bundle.writes_back else [
                [piece for low, high in of_shard for piece in bundle.parameters(low, high)] for of_shard in ranges
            ]
            everything = [block for chosen in blocks for block in chosen]
            self.rounds.append(LaneRound(everything, BlockList(blocks[shards.index]), sums, results))

    def sum(self, one: LaneRound) -> None:
        """Collective over the lane. Put the sums over the nodes into the pieces of the own shard."""
        sent, index = [self._joined(pieces) for pieces in one.sums], self._shards.index
        if self._messages is None:
            received = self._collective.all_to_all(sent)
        else:
            received = self._shards.room(self._dtype, [sent[index].size] * len(sent))
            received[index] = sent[index]
            self._messages.exchange("all_to_all", sent, received)
        wide, first, *others = state_dtype(self._dtype), *received
        # In the order of the nodes. Half precision is added up in float32, and rounded once.
        total = self._xp.add(first.astype(wide, copy=False), others[0].astype(wide, copy=False))
        for other in others[1:]:
            total += other.astype(wide, copy=False)
        _deal(total, one.sums[index])

    def gather(self, one: LaneRound) -> None:
        """Collective over the lane. Take the new parameters of all other shards."""
        index = self._shards.index
        own = self._joined(one.results[index])
        if self._messages is None:
            everything = self._collective.all_gather(own)
            ends = accumulate(sum(piece.size for piece in pieces) for pieces in one.results)
            for shard, (pieces, end) in enumerate(zip(one.results, ends, strict=True)):
                if shard != index:
                    _deal(everything[end - sum(piece.size for piece in pieces) : end], pieces)
            return
        # What is one piece is received where it belongs.
        rooms = self._shards.room(
            self._dtype, [0 if len(pieces) == 1 else sum(piece.size for piece in pieces) for pieces in one.results]
        )
        got = [pieces[0] if len(pieces) == 1 else room for pieces, room in zip(one.results, rooms, strict=True)]
        self._messages.exchange("all_gather", [own] * len(got), got)
        for shard, pieces in enumerate(one.results):
            if shard != index and len(pieces) > 1:
                _deal(got[shard], pieces)

    def gather_all(self) -> None:
        """Collective over the lane. Take the new parameters of all rounds."""
        for one in self.rounds:
            self.gather(one)

    def _joined(self, pieces: Sequence[AnyArray]) -> AnyArray:
        if len(pieces) == 1:
            return pieces[0]
        joined: AnyArray = self._xp.concatenate(pieces) if pieces else self._xp.empty(0, self._dtype)
        return joined


def _deal(flat: AnyArray, pieces: Sequence[AnyArray]) -> None:
    at = 0
    for piece in pieces:
        piece[...] = flat[at : at + piece.size]
        at += piece.size


def _rounds_of(bundle: Bundle, spans: Ranges, shards: Shards, byte_count: int) -> list[Ranges]:
    """The slice of this rank's lane of the ranges of one shard, in pieces of some bytes together."""
    total, lane = sum(high - low for low, high in spans), shards.lane or 0
    first, last = bundle.slice_of(total, lane, bundle.writer_count(total, shards.lane_count))
    rounds: list[Ranges] = []
    left = 0
    for low, high in bundle.pieces(spans, first, last, byte_count):
        if left < high - low:
            rounds.append([])
            left = max(byte_count // bundle.dtype.itemsize, high - low)
        rounds[-1].append((low, high))
        left -= high - low
    return rounds


class ShardedSums:
    """A bundle whose state is in shards: each node updates the parameters of its own.

    Args:
        bundle: The bundle.
        shards: The shards of its state.
        numbers: The numbers of variables in it, increasing.
        add: The sum of the gradients of the node's ranks.
        byte_count: See `LaneExchange`.
        reduction: A Collective function that puts the sums of all ranks into the first segment; None where the lanes do
            it.
    """

    def __init__(
        self, bundle: Bundle, shards: Shards, numbers: Sequence[int], *, add: Add, byte_count: int,
        reduction: Callable[[], None] | None = None,
    ) -> None:
        self._exchange = LaneExchange(bundle, shards, numbers, byte_count)
        self._add = add
        self._reduction = reduction
        self._barrier = bundle.node_barrier
        # Lanes and slices are the same only where all nodes have as many ranks.
        self._is_one_pass = reduction is None and shards.is_even
        self._blocks: list[Block] = []
        self._own: BlockList | None = None
        if not self._is_one_pass:
            spans, index, count = bundle.merged(numbers), *shards.writers
            self._own = BlockList(_slice(bundle, shards.within(spans, shards.index), index, count))
            if reduction is None:
                self._blocks = [block for shard in range(shards.count)
                                for block in _slice(bundle, shards.within(spans, shard), index, count)]

    def apply(self, update: Update) -> None:
        """Collective. See `Phase.apply`."""
        if self._own is None:
            for one in self._exchange.rounds:
                with unwatched():
                    add_in_place(one.blocks, self._add)
                    self._exchange.sum(one)
                one.work.update(update)
                self._exchange.gather(one)
            return
        with unwatched():
            self.reduce()
        # The slices of the ranks are not those of the lanes.
        self._barrier()
        self._own.update(update)
        self._barrier()
        self._exchange.gather_all()

    def reduce(self) -> None:
        """Collective. See `Phase.reduce`: the sums of the own shard, which the others need not have."""
        if self._reduction is not None:
            self._reduction()
            return
        if not self._is_one_pass:
            add_in_place(self._blocks, self._add)
            self._barrier()
        for one in self._exchange.rounds:
            if self._is_one_pass:
                add_in_place(one.blocks, self._add)
            self._exchange.sum(one)


def _slice(bundle: Bundle, spans: Ranges, index: int, count: int) -> list[Block]:
    """The blocks of slice `index` of `count` of some ranges."""
    total = sum(high - low for low, high in spans)
    first, last = bundle.slice_of(total, index, bundle.writer_count(total, count))
    pieces = bundle.pieces(spans, first, last, bundle.size * bundle.dtype.itemsize)
    return [block for low, high in pieces for block in bundle.blocks(low, high)]
