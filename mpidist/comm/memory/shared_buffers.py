"""Shared buffers: arrays that are in node memory, so that the ranks of a node combine them in place."""

from __future__ import annotations

import ctypes
import weakref
from typing import Any, cast

from mpidist.arrays import AnyArray
from mpidist.comm.group.communicator import Communicator
from mpidist.comm.memory.node_memory import CACHE_LINE_BYTES, NodeMemory


class SharedBuffers:
    """The buffers that a backend has allocated, and of which arrays still exist on this rank.

    Args:
        communicator: All ranks.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._rank, self._size = communicator.node.rank, communicator.node.size
        self._known: list[_Buffer] = []

    def allocate(self, byte_count: int) -> AnyArray:
        """Collective. Allocate zeros for this rank, uint8, in memory that all ranks of its node see.

        Args:
            byte_count: The size, the same on every rank.

        Raises:
            OSError: There is no room; on every rank.
        """
        stride = max(CACHE_LINE_BYTES, -(-byte_count // CACHE_LINE_BYTES) * CACHE_LINE_BYTES)
        memory = NodeMemory(self._communicator, stride * max(self._communicator.node_sizes)).bytes
        number = self._known[-1].number + 1 if self._known else 0
        begin = stride * self._rank
        buffer = _Buffer(number, weakref.ref(memory), address_of(memory) + begin, byte_count, stride)
        self._known = [known for known in self._known if known.memory() is not None] + [buffer]
        return memory[begin : begin + byte_count]

    def place(self, array: AnyArray) -> int:
        """Local. A number for the place of an array in the buffers, the same on all ranks; -1 if it is in none."""
        address = address_of(array)
        for buffer in self._known:
            offset = address - buffer.begin
            if 0 <= offset <= buffer.byte_count - array.nbytes:
                return buffer.number << 48 | offset
        return -1

    def arrays_at(self, place: int, like: AnyArray) -> list[AnyArray]:
        """Local. The arrays at `place` of all ranks of the node, of the size and dtype of `like`."""
        number, offset = place >> 48, place & (1 << 48) - 1
        buffer = next(known for known in self._known if known.number == number)
        memory = buffer.memory()
        if memory is None:
            raise RuntimeError("the memory of a shared buffer was freed while an array still uses it")
        starts = (buffer.stride * rank + offset for rank in range(self._size))
        return [memory[start : start + like.nbytes].view(like.dtype) for start in starts]


class _Buffer:
    """One allocation. The user's views keep its memory alive; this object holds a weak reference only."""

    def __init__(
        self, number: int, memory: weakref.ref[AnyArray], begin: int, byte_count: int, stride: int
    ) -> None:
        self.number = number
        self.memory = memory
        self.begin = begin
        self.byte_count = byte_count
        self.stride = stride


def address_of(array: AnyArray) -> int:
    """Local. The address at which the array begins."""
    try:
        # This takes a quarter of the time of `__array_interface__`, but fails for arrays that are read-only, empty or
        # of a dtype of ml_dtypes.
        return ctypes.addressof(ctypes.c_char.from_buffer(cast(Any, array)))
    except (TypeError, ValueError):
        return int(array.__array_interface__["data"][0])
