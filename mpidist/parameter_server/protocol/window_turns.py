"""The turn: two threads of a worker use its window one after the other, and the program's own goes first."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
S = TypeVar("S", bound="Sharing")
T = TypeVar("T")

# Returns seconds after which it is to be called again; None if there is nothing to do until `is_wanted` is set again.
Act = Callable[[], "float | None"]


class Turn:
    """The right to use the window. The program's thread holds it, but for the time in which a function computes.

    Nothing is locked before `share`: most workers have one thread.

    Attributes:
        is_wanted: Whether the other thread has something to do. Set by the thread that holds the turn.
    """

    def __init__(self) -> None:
        self.is_wanted = False
        self._lock = threading.RLock()
        # Whether the other thread may ask for the lock: else it would take it again before a thread that waits for it.
        self._may = threading.Event()
        self._depth = 0
        self._is_over = False
        self._thread: threading.Thread | None = None

    def share(self, act: Act) -> None:
        """Local. Start the other thread, unless it is there. The calling thread holds the turn.

        Args:
            act: Called again and again by the other thread, with the turn, as long as nobody else wants that.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, args=(act,), name="mpidist-ahead", daemon=True)
            self.__enter__()
            self._thread.start()

    def give(self) -> None:
        """Local. Let the other thread have the turn."""
        self.__exit__()

    def take_back(self) -> None:
        """Local. End what `give` has begun."""
        self.__enter__()

    def end(self) -> None:
        """Local. End the other thread. The calling thread holds the turn."""
        thread, self._is_over = self._thread, True
        if thread is not None:
            self.is_wanted = True
            self.give()
            thread.join()
            self._thread = None

    def __enter__(self) -> None:
        if self._thread is not None:
            self._may.clear()
            self._lock.acquire()
            self._depth += 1

    def __exit__(self, *_: object) -> None:
        if self._thread is not None:
            self._depth -= 1
            may = self.is_wanted and not self._depth
            self._lock.release()
            if may:
                self._may.set()

    def _run(self, act: Act) -> None:
        while True:
            self._may.wait()
            with self._lock:
                if self._is_over:
                    return
                if not self._may.is_set():
                    continue
                seconds = act()
                if seconds is None:
                    self.is_wanted = False
                    self._may.clear()
            if seconds:
                time.sleep(seconds)


class Sharing(Protocol):
    """An object that has a turn to share."""

    turn: Turn


def in_turn(
    method: Callable[Concatenate[S, P], T],
) -> Callable[Concatenate[S, P], T]:
    """Local. A method that uses the window, in its object's turn."""
    @functools.wraps(method)
    def call(self: S, /, *arguments: P.args, **named: P.kwargs) -> T:
        with self.turn:
            return method(self, *arguments, **named)

    return call
