"""The threads of a process use its window one after the other, and children that are forked from it do not."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from threading import RLock, get_ident
from types import TracebackType
from typing import Concatenate, NoReturn, ParamSpec, TypeVar

from mpidist.observe.output import flush
from mpidist.parameter_server.protocol.window_turns import Turn, in_turn

W = TypeVar("W", bound="OwnThreads")
P = ParamSpec("P")
R = TypeVar("R")


class OwnersLock:
    """A lock that a thread of this process may hold several times over.

    Args:
        is_alone: Whether no other rank is there: a child that is forked has a copy of all, then, and may use it.
    """

    def __init__(self, *, is_alone: bool) -> None:
        self._lock = RLock()
        self._process = None if is_alone else os.getpid()

    def is_ours(self) -> bool:
        """Local. Whether this process may hold it."""
        return self._process is None or self._process == os.getpid()

    def acquire(self, *, blocking: bool = True) -> bool:
        """Local. Take the lock; returns whether this thread has it.

        Args:
            blocking: Whether to wait for it.

        Raises:
            RuntimeError: This process was forked from a rank. A thread may have held the lock at that moment, for good,
                and the other ranks would take this process for its parent.
        """
        if not self.is_ours():
            raise RuntimeError(
                "this process was forked from a rank of a job with parameter servers and is not a rank itself: it can "
                "neither use variables nor schedule functions. Let its parent do that, and give it arrays "
                "(`variable.numpy()`)"
            )
        return self._lock.acquire(blocking)

    def release(self) -> None:
        """Local. Give the lock back."""
        self._lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._lock.release()


class OwnThreads:
    """The threads that functions start on a worker.

    Args:
        is_alone: See `OwnersLock`.

    Attributes:
        lock: Held by the thread that uses the window while a function runs. Who has the turn does not wait for it.
        server: The thread that serves, and runs the functions.
        runs: Whether a function runs. Where none does, the window is for the thread that serves.
        turn: To use the window.
    """

    turn: Turn

    def __init__(self, *, is_alone: bool) -> None:
        self.lock = OwnersLock(is_alone=is_alone)
        self.server = get_ident()
        self.runs = False

    @contextlib.contextmanager
    def in_this_process(self) -> Iterator[None]:
        """Local. Surround a function of the program: a child that it has forked ends with it.

        It would continue as this process else, and speak to the other ranks in its name.
        """
        error: BaseException | None = None
        try:
            yield
        except BaseException as raised:
            if self.lock.is_ours():
                raise
            error = raised
        if not self.lock.is_ours():
            _end_child(error)

    @contextlib.contextmanager
    def during_function(self) -> Iterator[None]:
        """Local. Surround a function. Threads that it has not joined come too late."""
        self.runs = True
        try:
            yield
        finally:
            with self.lock:
                self.runs = False


def _end_child(error: BaseException | None) -> NoReturn:
    """End this forked process as Python ends one, but without what is to be done at a rank's end."""
    code = 0
    if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
        code = error.code or 0
    elif error is not None:
        code = 1
        sys.stderr.write("".join(traceback.format_exception(error)))
    flush()
    os._exit(code & 0xFF)


def one_at_a_time(method: Callable[Concatenate[W, P], R]) -> Callable[Concatenate[W, P], R]:
    """Local. Let threads call a method of a worker one after the other, in its turn.

    Args:
        method: Uses the window.

    Returns:
        The same, which raises RuntimeError in a forked child, and in a thread while no function runs.
    """
    in_its_turn = in_turn(method)

    @functools.wraps(method)
    def call(self: W, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self.lock:
            if not self.runs and get_ident() != self.server:
                raise RuntimeError(
                    "a thread of this worker reads or writes a variable while no function runs here: join the threads "
                    "of a function before it returns"
                )
            return in_its_turn(self, *args, **kwargs)

    return call
