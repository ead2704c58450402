"""Waiting closures: who is next, by priority and by number, of those that a worker may take."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Waiting:
    """The queue. A closure that is bound to a worker waits for it alone; the key None is for any worker.

    Below it the key is the data that the closures take: of a few iterators at a time.
    """

    _heaps: dict[int | None, dict[tuple[int, ...], list[tuple[float, int]]]] = field(default_factory=dict)
    _count: int = 0

    def __len__(self) -> int:
        """The number of closures that wait."""
        return self._count

    def put(self, closure: int, priority: float, worker: int | None, data: tuple[int, ...] = ()) -> None:
        """Local. Add a closure.

        Args:
            closure: Its number; of equal priorities the lowest number is first, also one that comes back.
            priority: The highest is first.
            worker: The only one that may take it; None is any.
            data: See `Work`.
        """
        self._push((-priority, closure), worker, data)
        self._count += 1

    def _push(self, item: tuple[float, int], worker: int | None, data: tuple[int, ...]) -> None:
        heapq.heappush(self._heaps.setdefault(worker, {}).setdefault(data, []), item)

    def take(self, worker: int, may_take: Callable[[tuple[int, ...]], bool]) -> int | None:
        """Local. Remove and return the next closure for this worker; None if there is none.

        Args:
            worker: The worker.
            may_take: Whether it may take a closure of this data that others may take, too.
        """
        heads = [
            (heap[0], key, data)
            for key in (None, worker) if key in self._heaps
            for data, heap in self._heaps[key].items() if key is not None or may_take(data)
        ]
        if not heads:
            return None
        (_, closure), key, data = min(heads, key=lambda head: head[0])
        heaps = self._heaps[key]
        heapq.heappop(heaps[data])
        if not heaps[data]:
            del heaps[data]
        if not heaps:
            del self._heaps[key]
        self._count -= 1
        return closure

    def unbind(self, worker: int) -> None:
        """Local. Let any worker take what waits for this one, which is lost."""
        for data, heap in self._heaps.pop(worker, {}).items():
            for item in heap:
                self._push(item, None, data)

    def clear(self) -> list[int]:
        """Local. Remove all closures; returns their numbers in order."""
        closures = sorted(closure for heaps in self._heaps.values() for heap in heaps.values() for _, closure in heap)
        self._heaps.clear()
        self._count = 0
        return closures
