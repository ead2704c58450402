"""The slab: a piece of memory of one dtype, dealt out in ranges to variables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpidist.arrays import AnyArray, as_bytes

if TYPE_CHECKING:
    from mpidist.comm.memory.node_memory import NodeMemory

# Bytes of a cache line. Ranks cut node memory at lines only: two cores that write to one line take it from each other
# at every store. Vector instructions are fastest on addresses that start a line, too.
ALIGNMENT = 64


class Slab:
    """A piece of node memory, or of private memory, of one dtype.

    Args:
        dtype: The dtype of its elements.
        count: Number of elements.
        memory: Node memory of that size; None makes it private.
        xp: The module that makes private memory: NumPy, or CuPy for the current GPU.

    Attributes:
        writable: All elements, flat.
        readable: The same elements, read-only. CuPy has no read-only arrays: there it is `writable`.
        is_shared: Whether all ranks of a node see the same bytes.
        free: Free ranges [start, stop), sorted. No two of them touch.
    """

    def __init__(self, dtype: np.dtype[Any], count: int, memory: NodeMemory | None, xp: Any = np) -> None:
        self.dtype = dtype
        self.is_shared = memory is not None
        self.writable: AnyArray
        self.readable: AnyArray
        if memory is None and xp is not np:
            # CuPy's memory begins at multiples of 512 bytes.
            self.writable = self.readable = xp.zeros(count, dtype)
        elif memory is None:
            self.writable = aligned_zeros(count, dtype)
            self.readable = self.writable.view()
            self.readable.flags.writeable = False
        else:
            self.writable = memory.bytes[: count * dtype.itemsize].view(dtype)
            self.readable = memory.readable[: count * dtype.itemsize].view(dtype)
        self.free = [(0, count)]

    def take(self, count: int) -> int | None:
        """Local. The start of `count` elements that are free, or None."""
        for i, (start, stop) in enumerate(self.free):
            if stop - start >= count:
                self.free[i : i + 1] = [(start + count, stop)] if stop - start > count else []
                return start
        return None

    def give_back(self, start: int, count: int) -> None:
        """Local. Make a range free again."""
        merged: list[tuple[int, int]] = []
        for low, high in sorted([*self.free, (start, start + count)]):
            if merged and merged[-1][1] == low:
                merged[-1] = (merged[-1][0], high)
            else:
                merged.append((low, high))
        self.free = merged


class SlabRange(NamedTuple):
    """The place of a variable: a range of a slab.

    Attributes:
        slab: The slab.
        start: First element in it.
        size: Number of elements.
        number: The number of the variable, the same on every rank.
    """

    slab: Slab
    start: int
    size: int
    number: int | str

    @property
    def writable(self) -> AnyArray:
        """Local. The elements, flat. Only `Arena.write`, a step and `load` write here, between their barriers."""
        return self.slab.writable[self.start : self.start + self.size]

    @property
    def readable(self) -> AnyArray:
        """Local. The elements, flat and read-only. In host memory this array lives as long as any view of it."""
        elements = self.slab.readable[self.start : self.start + self.size]
        if type(elements) is not np.ndarray:
            return elements
        # NumPy passes over arrays that are views of arrays: a view of `elements` would keep only the slab alive.
        return np.frombuffer(as_bytes(elements).data, elements.dtype)


def line_elements(dtype: np.dtype[Any]) -> int:
    """Local. The number of elements in a cache line, at least 1."""
    return max(1, ALIGNMENT // dtype.itemsize)


def padded(count: int, dtype: np.dtype[Any]) -> int:
    """Local. `count` elements, rounded up to whole cache lines."""
    per_line = line_elements(dtype)
    return -(-count // per_line) * per_line


def aligned_zeros(count: int, dtype: np.dtype[Any]) -> AnyArray:
    """Local. Private zeros that start a cache line."""
    raw = np.zeros(count * dtype.itemsize + ALIGNMENT, np.uint8)
    begin = -raw.ctypes.data % ALIGNMENT
    return raw[begin : begin + count * dtype.itemsize].view(dtype)
