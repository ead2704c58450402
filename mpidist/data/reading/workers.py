"""Threads for `map`: several calls at a time, results in the order of the items, an error in its place."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from mpidist.comm.cores import count_cores, own_cores

# The most threads that AUTOTUNE takes: the ranks of a node share its cores.
_AUTOMATIC_LIMIT = 4


def automatic_count() -> int:
    """Local. The number of threads that AUTOTUNE chooses."""
    return max(1, min(_AUTOMATIC_LIMIT, count_cores([own_cores()])))


class ReaderThreads:
    """Threads that call a function for each item. They must not call MPI; see `reading.prefetch`.

    Args:
        count: Number of calls that run at a time.

    Attributes:
        lock: A lock that is held while a source is read. Sources need not be safe for several threads (h5py is not), so
            only the user's functions run at the same time.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.lock = threading.Lock()
        # Threads start at the first call. They end when the pool is collected, with the last dataset that uses it.
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="mpidist-map")

    def ordered(self, function: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
        """Local. The results of `function` for each item, in the order of the items.

        Items are taken at most `count` ahead: an endless stream must not fill the memory.

        Raises:
            Exception: The error of `function` or of taking an item, after the results that come before it.
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
