"""The bundle: variables of one dtype laid end to end, with their gradients and state, and how they are cut."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mpidist.arrays import AnyArray
from mpidist.comm.arithmetic.slices import slice_count
from mpidist.comm.first_use import at_first_use
from mpidist.variables.kinds.mirrored import MirroredVariable
from mpidist.variables.memory.arena_memory import ArenaMemory
from mpidist.variables.memory.sharing import return_at_once
from mpidist.variables.memory.slab import Slab, SlabRange, line_elements, padded
from mpidist.variables.update.halves import scratch_blocks, state_dtype
from mpidist.variables.update.kernel import BLOCK_BYTES, GPU_BLOCK_BYTES

if TYPE_CHECKING:
    from mpidist.variables.step.sharding.shards import Shards, cut
else:
    cut = at_first_use("mpidist.variables.step.sharding.shards", "cut")


class Block(NamedTuple):
    """One cache-sized piece of this rank's work; every array has the same length.

    Attributes:
        parameter: The parameter of the variables, writable.
        gradients: One gradient for each rank of the node that has a segment in a shared bundle, else this rank's own.
        slots: The slots of the state, in the kernel's order; none where another node has them.
        total: Private memory for the sum of the gradients.
        scratch: Private memory for the kernel.
    """

    parameter: AnyArray
    gradients: tuple[AnyArray, ...]
    slots: tuple[AnyArray, ...]
    total: AnyArray
    scratch: tuple[AnyArray, ...]


class Bundle:
    """Collective. The variables of a plan that have one dtype and one kind of memory, laid end to end.

    Args:
        arena: The arena of the variables.
        variables: The variables in the plan's order, with their numbers in it.
        slots: Names of the state and its initial value.
        scratch_count: Number of private blocks for the kernel.
        has_directions: Whether half precision also has gradients in float32, for updates in two passes.

    Attributes:
        gradient: This rank's gradients, flat; where it has no segment, private memory that nobody reads.
        first_segment: The gradients of the node's first rank that has a segment; they take the sums that another node
            has to see.
        segment_count: The number of gradients that are added up on this node.
        has_segment: Whether this rank has one of them.
        takes_given_sums: Whether sums that are given go straight into the first segment, since the ranks that count
            are its owners.
        spans: For each variable number its [start, stop) in the flat order.
        slots: Memory of the state by name, of half precision in float32; for the elements `own`.
        directions: The gradients in float32 where `has_directions`, and for half precision only; for the elements
            `own`. Else None.
        shards: The shards of the state, None where each node has all of it.
        own: The first element whose state is here, and the one after the last.
        room: Private memory for a block.
        is_shared: Whether gradients and state are in node memory.
        writes_back: Whether they are private, since node memory ran out, and the variables are shared.
    """

    def __init__(
        self,
        arena: ArenaMemory,
        variables: Sequence[tuple[int, MirroredVariable]],
        slots: Mapping[str, complex],
        scratch_count: int,
        *,
        has_directions: bool = False,
    ) -> None:
        self.arena = arena
        first = variables[0][1].address.slab
        self.dtype = first.dtype
        self.is_shared = first.is_shared
        self._runs: list[tuple[int, SlabRange]] = []
        self.spans: dict[int, tuple[int, int]] = {}
        self.size = self._lay_out(variables)
        self._segments: list[AnyArray] = []
        self.slots: dict[str, Slab] = {}
        self.shards: Shards | None = None
        self.own = (0, self.size)
        self.directions: AnyArray | None = None
        self._state_dtype = state_dtype(self.dtype)
        self._has_directions = has_directions and self._state_dtype != self.dtype
        itemsize = self._state_dtype.itemsize
        byte_count = BLOCK_BYTES if arena.namespace is np else min(GPU_BLOCK_BYTES, self.size * itemsize)
        self._length = max(1, byte_count // itemsize)
        self.writes_back = False
        try:
            self._reserve(slots)
        except OSError as error:
            # Every rank is here with the same error, and the variables stay where they are.
            arena.accept_private("gradients and state of an optimizer are", error)
            self.is_shared, self.writes_back = False, True
            self._reserve(slots)
        xp = arena.namespace
        own = arena.communicator.node.rank
        self.segment_count = len(self._segments)
        self.has_segment = not self.is_shared or own in arena.givers
        self.gradient: AnyArray = (
            self._segments[arena.givers.index(own) if self.is_shared else 0] if self.has_segment
            else xp.zeros(self.size, self.dtype)
        )
        self.first_segment = self._segments[0]
        is_one_copy = self.is_shared and len(arena.communicator.node_sizes) == 1
        self.takes_given_sums = arena.gives_everywhere or is_one_copy
        self.room: AnyArray = xp.empty(self._length, self.dtype)
        self._scratch = scratch_blocks(scratch_count, self._length, self.dtype, xp)

    def _reserve(self, slots: Mapping[str, complex]) -> None:
        count = len(self.arena.givers) if self.is_shared else 1
        # All ranks' gradients are in one piece of memory; a rank's own segment starts a cache line.
        stride = padded(self.size, self.dtype)
        memory = self.arena.reserve(stride * count, self.dtype, shared=self.is_shared).writable
        self._segments = [memory[rank * stride : rank * stride + self.size] for rank in range(count)]
        if self.arena.shards_state:
            floor = self._floor if self.arena.options.reproducible else int
            self.shards = cut(self.arena, self.size, self.slice_of, floor, is_shared=self.is_shared)
            self.own = (0, self.size) if self.shards is None else self.shards.own
        held = self.own[1] - self.own[0]
        self.slots = self.arena.reserve_slots(slots, held, self._state_dtype, shared=self.is_shared)
        if self._has_directions:
            self.directions = self.arena.reserve(held, self._state_dtype, shared=self.is_shared).writable

    @property
    def node_barrier(self) -> Callable[[], None]:
        """Local. The barrier of the ranks that share the gradients; for private ones it returns at once."""
        return self.arena.barrier if self.is_shared else return_at_once

    def _floor(self, element: int) -> int:
        """The last start of a block up to an element: under `reproducible` each fixed block is measured as a whole."""
        low = max((start for start, _ in self.spans.values() if start <= element), default=0)
        return low + (element - low) // self._length * self._length

    def _lay_out(self, variables: Sequence[tuple[int, MirroredVariable]]) -> int:
        """Join variables that are next to one another into runs; returns the length of all runs."""
        position = 0
        previous: SlabRange | None = None
        for number, variable in variables:
            address = variable.address
            length = padded(address.size, self.dtype)
            last = self._runs[-1] if self._runs else None
            touches = previous is not None and last is not None and address.slab is previous.slab and (
                address.start == last[1].start + position - last[0]
            )
            if touches and last is not None:
                self._runs[-1] = (last[0], last[1]._replace(size=last[1].size + length))
            else:
                self._runs.append((position, address._replace(size=length)))
            self.spans[number] = (position, position + address.size)
            position += length
            previous = address
        return position

    def pieces(
        self, spans: Sequence[tuple[int, int]], start: int, stop: int, byte_count: int
    ) -> list[tuple[int, int]]:
        """Local. Ranges of at most `byte_count` bytes that cover [start, stop), counted along `spans` end to end."""
        length = max(line_elements(self.dtype), byte_count // self.dtype.itemsize)
        result: list[tuple[int, int]] = []
        seen = 0
        for low, high in spans:
            begin, end = max(low, low + start - seen), min(high, low + stop - seen)
            seen += high - low
            result.extend((at, min(at + length, end)) for at in range(begin, end, length))
        return result

    def blocks(self, low: int, high: int, *, of_directions: bool = False) -> list[Block]:
        """Local. The blocks of the elements [low, high) of the flat order.

        Args:
            low: The first element.
            high: The element after the last.
            of_directions: Where there are directions, they are the only gradient. All elements are then `own`.
        """
        result: list[Block] = []
        for position, address in self._runs:
            begin, end = max(low, position), min(high, position + address.size)
            for at in range(begin, end, self._length):
                result.append(self._block(position, address, at, min(at + self._length, end), of_directions))
        return result

    def parameters(self, low: int, high: int) -> list[AnyArray]:
        """Local. The parameters of the elements [low, high) of the flat order, in pieces as long as possible."""
        result: list[AnyArray] = []
        for position, address in self._runs:
            begin, end = max(low, position), min(high, position + address.size)
            if begin < end:
                offset = address.start - position
                result.append(address.slab.writable[begin + offset : end + offset])
        return result

    def variable_blocks(
        self, numbers: Sequence[int], index: int, count: int, *, of_directions: bool = False, is_written: bool = False
    ) -> list[tuple[int, Block]]:
        """Local. Slice `index` of `count` of what is `own` of these variables, as blocks with the variable's number.

        No block spans two variables.

        Args:
            numbers: The numbers of the variables.
            index: The number of the slice.
            count: The number of ranks.
            of_directions: See `blocks`.
            is_written: Whether the slices are those of `writer_count` ranks. Measured slices are cut over all ranks,
                since the bits of a sum depend on how it is cut.
        """
        first, last = self.own
        spans = {number: (max(start, first), min(stop, last)) for number, (start, stop) in self.spans.items()}
        lengths = {number: padded(max(0, stop - start), self.dtype) for number, (start, stop) in spans.items()}
        total = sum(lengths[number] for number in numbers)
        first, last = self.slice_of(total, index, self.writer_count(total, count) if is_written else count)
        result: list[tuple[int, Block]] = []
        seen = 0
        for number in numbers:
            low, high = spans[number]
            begin, end = max(low, low + first - seen), min(high, low + last - seen)
            seen += lengths[number]
            if begin < end:
                result.extend((number, block) for block in self.blocks(begin, end, of_directions=of_directions))
        return result

    def fixed_blocks(self, number: int, *, of_directions: bool = False) -> list[Block | None]:
        """Local. A variable's blocks, cut at its own start: they depend neither on ranks nor on other variables.

        In the place of a block that another node has there is None.
        """
        (low, high), (first, last) = self.spans[number], self.own
        result: list[Block | None] = []
        for at in range(low, high, self._length):
            # The own elements begin and end with such blocks, and a variable's block is never in two runs.
            is_own = first <= at < last
            end = min(at + self._length, high)
            result.extend(self.blocks(at, end, of_directions=of_directions) if is_own else [None])
        return result

    def _block(self, position: int, address: SlabRange, at: int, end: int, of_directions: bool) -> Block:
        offset = address.start - position
        first, last = self.own
        is_own, begin, stop = first <= at and end <= last, at - first, end - first
        gradients = (
            tuple(segment[at:end] for segment in self._segments) if self.directions is None or not of_directions
            else (self.directions[begin:stop],)
        )
        return Block(
            address.slab.writable[at + offset : end + offset],
            gradients,
            tuple(slab.writable[begin:stop] for slab in self.slots.values()) if is_own else (),
            self.room[: end - at],
            tuple(scratch[: end - at] for scratch in self._scratch),
        )

    def merged(self, numbers: Sequence[int]) -> list[tuple[int, int]]:
        """Local. The spans of these variables, padded to cache lines, joined where they touch."""
        result: list[tuple[int, int]] = []
        for number in numbers:
            low, high = self.spans[number]
            high = low + padded(high - low, self.dtype)
            if result and result[-1][1] == low:
                result[-1] = (result[-1][0], high)
            elif high > low:
                result.append((low, high))
        return result

    def writer_count(self, size: int, rank_count: int) -> int:
        """Local. The number of ranks that update slices of `size` elements; see `slices.slice_count`."""
        return slice_count(size * self.dtype.itemsize, rank_count)

    def slice_of(self, size: int, index: int, count: int) -> tuple[int, int]:
        """Local. Slice `index` of `count` of `size` elements, cut at cache lines."""
        per_line = line_elements(self.dtype)
        lines = -(-size // per_line)
        low, high = (min(size, lines * number // count * per_line) for number in (index, index + 1))
        return low, high
