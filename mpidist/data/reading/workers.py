"""Threads for `map`: several calls at a time, their results in order, an error where it happened."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

# Threads that AUTOTUNE takes at most: the ranks of a node share its cores.
_AUTOMATIC_LIMIT = 4


def automatic_count() -> int:
    """Local. How many threads AUTOTUNE stands for."""
    return max(1, min(_AUTOMATIC_LIMIT, len(os.sched_getaffinity(0))))


class Workers:
    """Threads that call a function of items. They must not call MPI.

    Args:
        count: How many calls run at a time.

    Attributes:
        lock: Held while a source is read, so that only the functions run side by side.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.lock = threading.Lock()
        # Threads start at the first call, and end with the pool, that is with the last dataset that uses it.
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="mpidist-map")

    def ordered(self, function: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
        """Local. `function` of each item, in the order of the items; items are taken only `count` ahead.

        Raises:
            Exception: What `function`, or taking an item, raised, after the results that come before it.
        """
        waiting: deque[Future[Any]] = deque()
        iterator = iter(items)
        error: Exception | None = None
        is_ended = False
        try:
            while waiting or not is_ended:
                while not is_ended and len(waiting) <= self.count:
                    try:
                        waiting.append(self._pool.submit(function, next(iterator)))
                    except StopIteration:
                        is_ended = True
                    except Exception as caught:
                        error, is_ended = caught, True
                if waiting:
                    yield waiting.popleft().result()
            if error is not None:
                raise error
        finally:
            for future in waiting:
                future.cancel()
