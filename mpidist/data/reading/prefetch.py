"""Prefetching: a thread that reads ahead of the program, and never communicates.

The thread must not call MPI. MPI may have been started without THREAD_MULTIPLE, and even with it a collective call of
this thread could overtake one of the program on one rank and not on another: the ranks would then wait without end.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")

# How long `close` waits for a thread that is inside the iterator's `next`, which cannot be interrupted.
CLOSE_SECONDS = 5.0


class Prefetcher(Iterator[T]):
    """An iterator that keeps up to `depth` elements of another iterator ready; a daemon thread reads them.

    An exception is raised in its place: after the elements that came before it. The thread ends at the end of the
    iterator, at `close`, or when the prefetcher is collected as garbage.

    Args:
        iterator: The iterator, which only the thread uses. It must not call MPI.
        depth: Number of elements that may be ready, at least 1.

    Raises:
        ValueError: `depth` is less than 1.
    """

    def __init__(self, iterator: Iterator[T], depth: int) -> None:
        if depth < 1:
            raise ValueError(f"the `depth` of a prefetcher must be at least 1, got {depth!r}")
        channel: _Channel[T] = _Channel(depth)
        self._channel = channel
        # The thread must not know this object: a reference would keep a forgotten prefetcher, and its thread, alive.
        self._thread = threading.Thread(
            target=_produce, args=(iterator, channel), name="mpidist-prefetch", daemon=True
        )
        self._finalizer = weakref.finalize(self, channel.close)
        self._thread.start()

    def __next__(self) -> T:
        """The next element.

        Raises:
            StopIteration: The iterator has ended.
            RuntimeError: The prefetcher is closed.
            BaseException: The exception of the iterator.
        """
        return self._channel.take()

    def take_ready(self) -> T | None:
        """Local. The next element if it is ready now; None if it is not, and at the end or before an error."""
        return self._channel.take_ready()

    def close(self) -> None:
        """Local. End the thread and drop the elements that are ready. A second call does nothing."""
        self._finalizer()
        # A thread cannot wait for its own end, if it is the iterator that closes the prefetcher.
        if self._thread is not threading.current_thread():
            self._thread.join(CLOSE_SECONDS)


class _Channel(Generic[T]):
    """Elements that one thread passes to another."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._ready: deque[T] = deque()
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._is_ended = False
        self._is_closed = False

    def put(self, element: T) -> bool:
        """Wait for room and add an element; False means that the channel is closed."""
        with self._changed:
            while len(self._ready) >= self._depth and not self._is_closed:
                self._changed.wait()
            if not self._is_closed:
                self._ready.append(element)
                self._changed.notify_all()
            return not self._is_closed

    def end(self, error: BaseException | None) -> None:
        """Note that no more elements will come, and why if the iterator raised."""
        with self._changed:
            self._error = error
            self._is_ended = True
            self._changed.notify_all()

    def take(self) -> T:
        """Wait for an element and take it."""
        with self._changed:
            while not self._ready and not self._is_ended and not self._is_closed:
                self._changed.wait()
            if self._is_closed:
                raise RuntimeError("prefetcher already closed: make a new iterator to continue reading")
            if self._ready:
                element = self._ready.popleft()
                self._changed.notify_all()
                return element
            error, self._error = self._error, None
        if error is not None:
            raise error
        raise StopIteration

    def take_ready(self) -> T | None:
        """Take an element if there is one, without waiting."""
        with self._changed:
            if not self._ready:
                return None
            self._changed.notify_all()
            return self._ready.popleft()

    def close(self) -> None:
        """Wake both sides up; from now on neither waits again."""
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
        # All of them, also SystemExit: an exception that stayed in this thread would leave the program waiting.
        error = caught
    channel.end(error)
