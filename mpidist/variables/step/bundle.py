"""The part of a plan: variables of one dtype laid end to end, their gradients and state, and how they are cut."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from mpidist.arrays import AnyArray
from mpidist.variables.arena import Arena
from mpidist.variables.mirrored import MirroredVariable
from mpidist.variables.slab import ALIGNMENT, Address, Slab

# What a kernel touches of one block should stay in a cache near the core. Measured on two machines (L2 of 1 and 2 MB)
# 256 KB is best for SGD and for Adam, 128 KB up to a tenth slower; 16 KB costs a factor of 1.5 to 2 in calls.
BLOCK_BYTES = 1 << 18
# On a GPU a block is a kernel's work, long enough that starting it does not count.
GPU_BLOCK_BYTES = 1 << 26

# `update(parameter, gradient, slots, scratch)` on flat blocks of one dtype, in place.
Update = Callable[[AnyArray, AnyArray, Sequence[AnyArray], Sequence[AnyArray]], None]


class Block(NamedTuple):
    """One cache-sized piece of this rank's work; every array has the same length.

    Attributes:
        parameter: Of the variables, writable.
        gradients: One per rank of the node in a shared part, else this rank's own.
        slots: Of the state, in the kernel's order.
        scratch: Private; the first one takes the reduced gradient.
    """

    parameter: AnyArray
    gradients: tuple[AnyArray, ...]
    slots: tuple[AnyArray, ...]
    scratch: tuple[AnyArray, ...]


class Bundle:
    """The variables of a plan that have one dtype and one kind of memory, laid end to end.

    Args:
        arena: Where they live.
        variables: In the plan's order, with their numbers in it.
        slots: Names of the state and its initial value.
        scratch_count: Private blocks that the kernel wants besides the gradient's.

    Attributes:
        gradient: This rank's gradients, flat.
        first_segment: The gradients of the node's first rank, where sums go that another node has to see.
        spans: For each variable number its [start, stop) in the flat order.
        slots: Node memory of the state by name.
        is_shared: Whether gradients and state are in node memory.
        writes_back: They are private, since node memory ran out, while the variables are shared.
    """

    def __init__(
        self,
        arena: Arena,
        variables: Sequence[tuple[int, MirroredVariable]],
        slots: Mapping[str, float],
        scratch_count: int,
    ) -> None:
        self.arena = arena
        first = variables[0][1].address.slab
        self.dtype = first.dtype
        self.is_shared = first.is_shared
        self._per_line = max(1, ALIGNMENT // self.dtype.itemsize)
        self._runs: list[tuple[int, Address]] = []
        self.spans: dict[int, tuple[int, int]] = {}
        self.size = self._lay_out(variables)
        self._segments: list[AnyArray] = []
        self.slots: dict[str, Slab] = {}
        self.writes_back = False
        try:
            self._reserve(slots)
        except OSError as error:
            # Every rank is here with the same error, and the variables stay where they are.
            arena.accept_private("gradients and state of an optimizer are", error)
            self.is_shared, self.writes_back = False, True
            self._reserve(slots)
        self.gradient = self._segments[arena.communicator.node.rank if self.is_shared else 0]
        self.first_segment = self._segments[0]
        xp = arena.namespace
        byte_count = BLOCK_BYTES if xp is np else min(GPU_BLOCK_BYTES, self.size * self.dtype.itemsize)
        length = max(1, byte_count // self.dtype.itemsize)
        self._scratch = [xp.empty(length, self.dtype) for _ in range(scratch_count + 1)]

    def _reserve(self, slots: Mapping[str, float]) -> None:
        count = self.arena.communicator.node.size if self.is_shared else 1
        # All ranks' gradients in one piece of memory; a rank's own segment starts on a cache line.
        stride = -(-self.size // self._per_line) * self._per_line
        memory = self.arena.reserve(stride * count, self.dtype, shared=self.is_shared).writable
        self._segments = [memory[r * stride : r * stride + self.size] for r in range(count)]
        for name, value in slots.items():
            slab = self.arena.reserve(self.size, self.dtype, shared=self.is_shared)
            if value:
                self.arena.write(slab, lambda slab=slab, value=value: slab.writable.fill(value))  # type: ignore[misc]
            self.slots[name] = slab

    def _lay_out(self, variables: Sequence[tuple[int, MirroredVariable]]) -> int:
        """Join variables that lie next to one another into runs; returns the length of all runs."""
        position = 0
        previous: Address | None = None
        for number, variable in variables:
            address = variable.address
            padded = -(-address.size // self._per_line) * self._per_line
            last = self._runs[-1] if self._runs else None
            touches = previous is not None and last is not None and address.slab is previous.slab and (
                address.start == last[1].start + position - last[0]
            )
            if touches and last is not None:
                self._runs[-1] = (last[0], last[1]._replace(size=last[1].size + padded))
            else:
                self._runs.append((position, address._replace(size=padded)))
            self.spans[number] = (position, position + address.size)
            position += padded
            previous = address
        return position

    def pieces(
        self, spans: Sequence[tuple[int, int]], start: int, stop: int, byte_count: int
    ) -> list[tuple[int, int]]:
        """Local. Ranges of at most `byte_count` bytes that cover [start, stop), counted along `spans` end to end."""
        length = max(self._per_line, byte_count // self.dtype.itemsize)
        result: list[tuple[int, int]] = []
        seen = 0
        for low, high in spans:
            begin, end = max(low, low + start - seen), min(high, low + stop - seen)
            seen += high - low
            result.extend((at, min(at + length, end)) for at in range(begin, end, length))
        return result

    def blocks(self, low: int, high: int) -> list[Block]:
        """Local. The blocks of the elements [low, high) of the flat order."""
        result: list[Block] = []
        for position, address in self._runs:
            begin, end = max(low, position), min(high, position + address.size)
            for at in range(begin, end, len(self._scratch[0])):
                result.append(self._block(position, address, at, min(at + len(self._scratch[0]), end)))
        return result

    def variable_blocks(self, numbers: Sequence[int], index: int, parts: int) -> list[tuple[int, Block]]:
        """Local. Slice `index` of `parts` of these variables as blocks with the variable's number; none spans two."""
        padded = {n: -(-(stop - start) // self._per_line) * self._per_line for n, (start, stop) in self.spans.items()}
        first, last = self.slice_of(sum(padded[number] for number in numbers), index, parts)
        result: list[tuple[int, Block]] = []
        seen = 0
        for number in numbers:
            low, high = self.spans[number]
            begin, end = max(low, low + first - seen), min(high, low + last - seen)
            seen += padded[number]
            if begin < end:
                result.extend((number, block) for block in self.blocks(begin, end))
        return result

    def fixed_blocks(self, number: int) -> list[Block]:
        """Local. A variable's blocks, cut at its own start: neither ranks nor other variables have a say in them."""
        low, high = self.spans[number]
        length = len(self._scratch[0])
        return [
            block for at in range(low, high, length) for block in self.blocks(at, min(at + length, high))
        ]

    def _block(self, position: int, address: Address, at: int, end: int) -> Block:
        offset = address.start - position
        return Block(
            address.slab.writable[at + offset : end + offset],
            tuple(segment[at:end] for segment in self._segments),
            tuple(slab.writable[at:end] for slab in self.slots.values()),
            tuple(scratch[: end - at] for scratch in self._scratch),
        )

    def merged(self, numbers: Sequence[int]) -> list[tuple[int, int]]:
        """Local. The spans of these variables, padded to cache lines, joined where they touch."""
        result: list[tuple[int, int]] = []
        for number in numbers:
            low, high = self.spans[number]
            high = low + -(-(high - low) // self._per_line) * self._per_line
            if result and result[-1][1] == low:
                result[-1] = (result[-1][0], high)
            elif high > low:
                result.append((low, high))
        return result

    def slice_of(self, count: int, index: int, parts: int) -> tuple[int, int]:
        """Local. Bundle `index` of `count` elements, cut at cache lines."""
        lines = -(-count // self._per_line)
        cut = [min(count, lines * i // parts * self._per_line) for i in (index, index + 1)]
        return cut[0], cut[1]
