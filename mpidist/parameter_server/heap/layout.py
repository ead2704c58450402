"""The heap of a server, as the coordinator divides it: slots for pushes first, then variables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpidist.parameter_server.protocol.messages import SLOTS
from mpidist.variables.kinds.served import HEADER_BYTES, ServedPlace

# The part of each slot that has memory from the beginning; the first push that needs more allocates it.
FIRST_BYTES = 1 << 16
# Each variable begins on a cache line of its own.
ALIGNMENT = 64
_PAGE = 4096


@dataclass(frozen=True)
class Slots:
    """The slots at the beginning of each heap: `SLOTS` for each rank that pushes.

    Attributes:
        ranks: The ranks that push from the beginning: the coordinator and the workers.
        slot_bytes: The size of a slot.
        joined: The rank among `ranks` whose slots a worker has that has joined, by the rank of this worker.
    """

    ranks: Sequence[int]
    slot_bytes: int
    joined: dict[int, int] = field(default_factory=dict)

    @property
    def end(self) -> int:
        """Local. The first byte after all slots."""
        return len(self.ranks) * SLOTS * self.slot_bytes

    def offset(self, rank: int, slot: int) -> int:
        """Local. The first byte of a slot.

        Args:
            rank: The rank that pushes.
            slot: The number of the slot among those of the rank.
        """
        return (self.ranks.index(self.joined.get(rank, rank)) * SLOTS + slot) * self.slot_bytes


def slots_of(heap_bytes: int, ranks: Sequence[int], slot_bytes: int | None) -> Slots:
    """Local. The slots of a heap.

    Args:
        heap_bytes: The size of the heap.
        ranks: The ranks that push.
        slot_bytes: The size of a slot; by default all slots together take half of the heap.

    Raises:
        ValueError: The slots do not fit the heap.
    """
    count = len(ranks) * SLOTS
    size = heap_bytes // 2 // count if slot_bytes is None else slot_bytes
    slots = Slots(tuple(ranks), max(_PAGE, size // _PAGE * _PAGE))
    if slots.end > heap_bytes - _PAGE:
        raise ValueError(
            f"expected a heap larger than its {count} slots ({SLOTS} for each of {len(ranks)} ranks) of "
            f"{slots.slot_bytes} bytes, got heap_bytes={heap_bytes}. A heap holds two copies of each variable, the "
            "optimizer's state of it, and the slots"
        )
    return slots


class HeapFullError(MemoryError):
    """A variable does not fit into the heap of any server, or there is no memory for it."""


class Space:
    """The free space of one heap. Freed space is reused: the first gap that is large enough.

    Args:
        begin: The first free byte.
        end: The first byte after the heap.
    """

    def __init__(self, begin: int, end: int) -> None:
        self._free = [(begin, end)]

    @property
    def free_bytes(self) -> int:
        """Local. All free bytes; they need not be in one piece."""
        return sum(end - begin for begin, end in self._free)

    def take(self, byte_count: int) -> int | None:
        """Local. Take a piece; None if there is none of this size."""
        size = -(-byte_count // ALIGNMENT) * ALIGNMENT
        for place, (begin, end) in enumerate(self._free):
            if end - begin >= size:
                self._free[place : place + 1] = [(begin + size, end)] if end - begin > size else []
                return begin
        return None

    def give(self, begin: int, byte_count: int) -> None:
        """Local. Give a piece back.

        Args:
            begin: The first byte of the piece.
            byte_count: See `take`.
        """
        pieces = sorted([*self._free, (begin, begin - (-byte_count // ALIGNMENT) * ALIGNMENT)])
        joined = pieces[:1]
        for low, high in pieces[1:]:
            if low == joined[-1][1]:
                joined[-1] = (joined[-1][0], high)
            else:
                joined.append((low, high))
        self._free = joined


class Heaps:
    """The places of variables in the heaps of all servers.

    A new variable is put on the server whose variables have the fewest bytes. Of equals it is the next one after the
    server that got the last one.

    Args:
        heap_sizes: The sizes of the heaps, by the ranks of their servers.
        slots: The slots of each heap.
        name_of: A function that returns the name of a rank.
    """

    def __init__(self, heap_sizes: Mapping[int, int], slots: Slots, name_of: Callable[[int], str]) -> None:
        self._spaces = {server: Space(slots.end, size) for server, size in heap_sizes.items()}
        self._taken = dict.fromkeys(heap_sizes, 0)
        self._slots = slots
        self._name_of = name_of
        self._last = -1
        self._numbers = 0

    def take(
        self, shape: tuple[int, ...], dtype: np.dtype[Any], *, buffers: int, server: int | None = None,
        is_table: bool = False, beside: Mapping[int, int] | None = None,
    ) -> ServedPlace | None:
        """Local. Reserve memory for a variable; None if there is no room.

        Args:
            shape: The shape of the variable.
            dtype: The dtype of the variable.
            buffers: The number of its versions in memory, 1 or 2.
            server: The rank of the server; by default it is chosen.
            is_table: Whether its rows are changed in place; it has one buffer then, and at least one dimension.
            beside: The numbers of shards of the same variable that servers have already. Those with fewest go first.
        """
        servers = list(self._spaces)
        block_rows = _block_rows(shape, dtype) if is_table else 0
        wanted, aligned = _sizes(shape, dtype, buffers, block_rows)
        shards = beside or {}
        order = [server] if server is not None else sorted(
            servers, key=lambda one: (
                shards.get(one, 0), self._taken[one], (servers.index(one) - self._last - 1) % len(servers)
            )
        )
        for one in order:
            begin = self._spaces[one].take(wanted)
            if begin is None:
                continue
            if server is None:
                self._last = servers.index(one)
            self._taken[one] += wanted
            self._numbers += 1
            first = begin + HEADER_BYTES
            places = (first, first + (buffers - 1) * aligned)
            versions = places[1] + aligned if is_table else 0
            return ServedPlace(self._numbers, one, begin, places, shape, dtype.name, block_rows, versions)
        return None

    def give(self, place: ServedPlace) -> None:
        """Local. Give the memory of a variable back."""
        buffers = 1 + (place.buffers[1] > place.buffers[0])
        taken, _ = _sizes(place.shape, np.dtype(place.dtype), buffers, place.block_rows)
        self._spaces[place.server].give(place.header, taken)
        self._taken[place.server] -= taken

    def full(
        self, shape: tuple[int, ...], dtype: np.dtype[Any], name: str, *, buffers: int, is_table: bool = False
    ) -> HeapFullError:
        """Local. The error for a variable for which there is no room; for the arguments see `take`."""
        wanted, _ = _sizes(shape, dtype, buffers, _block_rows(shape, dtype) if is_table else 0)
        free = ", ".join(f"{self._name_of(one)} {space.free_bytes}" for one, space in self._spaces.items())
        slots, slot_bytes = self._slots.end, self._slots.slot_bytes
        return HeapFullError(
            f"variable {name!r} of shape {shape} and dtype {dtype} takes {wanted} bytes of a server's heap ({buffers} "
            f"buffer{'s' if buffers > 1 else ''}), and the servers have free: {free}. A heap holds two buffers of each "
            f"variable, one of each slot of an optimizer, and {slots} bytes of slots for pushes: "
            f"{SLOTS} x {len(self._slots.ranks)} (chief and workers) x slot_bytes={slot_bytes}. Give ServerOptions a "
            "larger heap_bytes or smaller slot_bytes, start more servers, or drop variables"
        )


def _sizes(shape: tuple[int, ...], dtype: np.dtype[Any], buffers: int, block_rows: int = 0) -> tuple[int, int]:
    """All bytes of a variable, and those of one buffer."""
    aligned = -(-int(np.prod(shape, dtype=np.int64)) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
    versions = -(-shape[0] // block_rows) * 8 if block_rows else 0
    return HEADER_BYTES + buffers * aligned + versions, aligned


def _block_rows(shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    """The number of a table's rows that have one version."""
    return max(1, _PAGE // max(1, int(np.prod(shape[1:], dtype=np.int64)) * dtype.itemsize))
