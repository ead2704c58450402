"""Prefetching: a thread that reads ahead of its consumer and never communicates."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")

# How long `close` waits for a thread that is inside somebody's `next`.
CLOSE_SECONDS = 5.0


class Prefetcher(Iterator[T]):
    """An iterator that keeps up to `depth` elements of another one ready, read by a daemon thread.

    An exception is raised where it happened: after the elements that came before it. The thread ends at the end of
    the iterator, at `close`, or when the prefetcher is collected as garbage.

    Args:
        iterator: Is used by the thread alone. It must not call MPI.
        depth: How many elements may be ready, at least 1.

    Raises:
        ValueError: `depth` is less than 1.
    """

    def __init__(self, iterator: Iterator[T], depth: int) -> None:
        if depth < 1:
            raise ValueError(f"`depth` must be at least 1, got {depth!r}")
        channel: _Channel[T] = _Channel(depth)
        self._channel = channel
        # The thread knows the channel only, so that a forgotten prefetcher is collected and ends it.
        self._thread = threading.Thread(
            target=_produce, args=(iterator, channel), name="mpidist-prefetch", daemon=True
        )
        self._finalizer = weakref.finalize(self, channel.close)
        self._thread.start()

    def __next__(self) -> T:
        """The next element.

        Raises:
            StopIteration: At the end.
            RuntimeError: After `close`.
            BaseException: What the iterator raised.
        """
        return self._channel.take()

    def take_ready(self) -> T | None:
        """Local. The next element if it is ready now; None if it is not, at the end, and before an error."""
        return self._channel.take_ready()

    def close(self) -> None:
        """Local. End the thread, and drop what it has prepared. Safe twice."""
        self._finalizer()
        if self._thread is not threading.current_thread():
            self._thread.join(CLOSE_SECONDS)


class _Channel(Generic[T]):
    """Elements on their way from one thread to another."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._ready: deque[T] = deque()
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._is_ended = False
        self._is_closed = False

    def put(self, element: T) -> bool:
        """Wait for room; False says that nobody wants more."""
        with self._changed:
            while len(self._ready) >= self._depth and not self._is_closed:
                self._changed.wait()
            if not self._is_closed:
                self._ready.append(element)
                self._changed.notify_all()
            return not self._is_closed

    def end(self, error: BaseException | None) -> None:
        """No more will come."""
        with self._changed:
            self._error = error
            self._is_ended = True
            self._changed.notify_all()

    def take(self) -> T:
        """Wait for an element."""
        with self._changed:
            while not self._ready and not self._is_ended and not self._is_closed:
                self._changed.wait()
            if self._is_closed:
                raise RuntimeError("prefetcher already closed")
            if self._ready:
                element = self._ready.popleft()
                self._changed.notify_all()
                return element
            error, self._error = self._error, None
        if error is not None:
            raise error
        raise StopIteration

    def take_ready(self) -> T | None:
        """Do not wait."""
        with self._changed:
            if not self._ready:
                return None
            self._changed.notify_all()
            return self._ready.popleft()

    def close(self) -> None:
        """Wake up both sides, for good."""
        with self._changed:
            self._is_closed = True
            self._ready.clear()
            self._changed.notify_all()


def _produce(iterator: Iterator[T], channel: _Channel[T]) -> None:
    error: BaseException | None = None
    try:
        for element in iterator:
            if not channel.put(element):
                break
    except BaseException as caught:
        error = caught
    channel.end(error)
