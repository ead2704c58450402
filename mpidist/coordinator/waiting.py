"""Waiting closures: who is next, by priority and by number, of those that a worker may take."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field


@dataclass
class Waiting:
    """The queue. A closure that is bound to a worker waits for it alone; the key None is for any worker."""

    _heaps: dict[int | None, list[tuple[float, int]]] = field(default_factory=dict)
    _count: int = 0

    def __len__(self) -> int:
        """The number of closures that wait."""
        return self._count

    def put(self, closure: int, priority: float, worker: int | None) -> None:
        """Local. Add a closure.

        Args:
            closure: Its number; of equal priorities the lowest number is first, also one that comes back.
            priority: The highest is first.
            worker: The only one that may take it; None is any.
        """
        heapq.heappush(self._heaps.setdefault(worker, []), (-priority, closure))
        self._count += 1

    def take(self, worker: int) -> int | None:
        """Local. Remove and return the next closure for this worker; None if there is none."""
        heads = [(heap[0], key) for key in (None, worker) if (heap := self._heaps.get(key))]
        if not heads:
            return None
        (_, closure), key = min(heads, key=lambda head: head[0])
        heapq.heappop(self._heaps[key])
        if not self._heaps[key]:
            del self._heaps[key]
        self._count -= 1
        return closure

    def unbind(self, worker: int) -> None:
        """Local. Let any worker take what waits for this one, which is lost."""
        for item in self._heaps.pop(worker, ()):
            heapq.heappush(self._heaps.setdefault(None, []), item)

    def clear(self) -> list[int]:
        """Local. Remove all closures; returns their numbers in order."""
        closures = sorted(closure for heap in self._heaps.values() for _, closure in heap)
        self._heaps.clear()
        self._count = 0
        return closures
