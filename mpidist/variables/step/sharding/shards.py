"""The shards of an optimizer's state: each node has a fixed part of it, which no selection of variables changes.

Where memory is private, each rank counts as a node. All nodes know all shards, so nothing is sent to find them.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from mpidist.arrays import AnyArray
from mpidist.comm.backends.counted_messages import CountedMessages
from mpidist.comm.collective import Collective
from mpidist.variables.memory.arena_memory import ArenaMemory

if TYPE_CHECKING:
    from collections.abc import Sequence


class Shards:
    """Local. The shards of the state of a bundle, or of a table.

    Args:
        arena: The arena of the variables.
        edges: The limits of the shards: shard i has the elements [edges[i], edges[i + 1]) of the flat order.
        is_shared: Whether the state is in node memory.

    Attributes:
        edges: The constructor's argument.
        count: Number of shards.
        index: The number of the shard of this node.
        own: The first element of this shard and the one after its last.
        writers: This rank's place among the ranks that update the shard, and their number.
        collective: The collective of one rank of each node that has the same lane, for sums and new parameters.
        messages: Messages over these ranks; None where memory is private, and the program may have chosen the
            collective.
        lane: The number of this rank's lane; None on a rank without one.
        lane_count: Number of lanes.
        is_even: Whether all ranks that update have a lane.
    """

    def __init__(self, arena: ArenaMemory, edges: Sequence[int], *, is_shared: bool) -> None:
        communicator, node = arena.communicator, arena.communicator.node
        self.edges, self.count = tuple(edges), len(edges) - 1
        self.index = communicator.node_index if is_shared else communicator.rank
        self.own = self.edges[self.index], self.edges[self.index + 1]
        self.writers = (node.rank, node.size) if is_shared else (0, 1)
        self.collective: Collective | None = arena.lane if is_shared else arena.collective
        self.messages = CountedMessages(arena.lane) if is_shared and arena.lane is not None else None
        self._rooms: dict[np.dtype[Any], AnyArray] = {}
        self.lane_count = arena.lane_count if is_shared else 1
        self.lane: int | None = self.writers[0] if self.writers[0] < self.lane_count else None
        self.is_even = not is_shared or len(set(communicator.node_sizes)) == 1
        # The ranks that have a shard, in the order of their slices of it.
        self._ranks = [
            [rank for rank, node in enumerate(communicator.nodes) if node == shard] if is_shared else [shard]
            for shard in range(self.count)
        ]

    def room(self, dtype: np.dtype[Any], sizes: Sequence[int]) -> list[AnyArray]:
        """Local. Arrays of these sizes for what is received, in private memory that the next call gives again."""
        room = self._rooms.get(dtype)
        if room is None or room.size < sum(sizes):
            room = self._rooms[dtype] = np.empty(sum(sizes), dtype)
        return [room[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]

    def within(self, spans: Sequence[tuple[int, int]], shard: int) -> list[tuple[int, int]]:
        """Local. The parts of some ranges that are in a shard."""
        low, high = self.edges[shard], self.edges[shard + 1]
        clipped = [(max(start, low), min(stop, high)) for start, stop in spans]
        return [(start, stop) for start, stop in clipped if start < stop]

    def parts(self, start: int, stop: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Local. The slices of all ranks of a range, for `BaseVariable.bounds` and `owners`; counted from its start."""
        bounds, owners = [0], []
        for ranks, (low, high) in zip(self._ranks, pairwise(self.edges), strict=True):
            first, last = (min(max(edge, start), stop) - start for edge in (low, high))
            for place, rank in enumerate(ranks, 1):
                bounds.append(first + (last - first) * place // len(ranks))
                owners.append(rank)
        return tuple(bounds), tuple(owners)


def cut(
    arena: ArenaMemory, size: int, slice_of: Callable[[int, int, int], tuple[int, int]], floor: Callable[[int], int],
    *, is_shared: bool, width: int = 1,
) -> Shards | None:
    """Local. Cut flat state into shards of nearly one size; None where one node has all of it.

    Args:
        arena: The arena of the variables.
        size: Number of elements, or of rows.
        slice_of: A function: `slice_of(size, index, count)` returns a slice of them.
        floor: A function that returns the last place up to an element at which the state may be cut.
        is_shared: Whether the state is in node memory.
        width: Number of elements of a row.
    """
    count = len(arena.communicator.node_sizes) if is_shared else arena.communicator.size
    if count == 1:
        return None
    edges = [0, *(floor(slice_of(size, index, count)[0]) for index in range(1, count)), size]
    return Shards(arena, [edge * width for edge in edges], is_shared=is_shared)
