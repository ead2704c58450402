"""Threads, forked children and interrupts, none of which may come between the messages of a process.

Threads use its window one after the other, children that are forked from it do not, and on the chief KeyboardInterrupt
comes between messages, never inside one.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from threading import RLock, get_ident, main_thread
from types import TracebackType
from typing import Concatenate, NoReturn, ParamSpec, TypeVar

from mpidist.comm.calls.order import CallOrder
from mpidist.errors import InterruptedCallError
from mpidist.failures.interrupts import INTERRUPTS
from mpidist.observe.output import flush

W = TypeVar("W", bound="OwnThreads")
P = ParamSpec("P")
R = TypeVar("R")

# Returns seconds after which it is to be called again; None if there is nothing more to do for this function.
Act = Callable[[], "float | None"]


class OwnersLock:
    """A lock that a thread of this process may hold several times over.

    Args:
        is_alone: Whether there is no other rank: a forked child then has a copy of everything, and may use it.
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
        if self._process is not None and self._process != os.getpid():
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


class WindowLock(OwnersLock):
    """The right to use the window of a worker: for threads of a function, and for one that pulls for the next one.

    The latter never keeps the others waiting for longer than one piece of its work. In which order threads of a
    function get the window is not said.

    Args:
        is_alone: See `OwnersLock`.
    """

    def __init__(self, *, is_alone: bool) -> None:
        super().__init__(is_alone=is_alone)
        self._is_wanted = self._is_over = False
        # Whether the other thread may ask for the lock: it would otherwise take it again at once, before a thread that
        # waits for it is awake.
        self._may = threading.Event()
        self._thread: threading.Thread | None = None

    def share(self, act: Act) -> None:
        """Local. Let the other thread use the window whenever it is not in use: a function begins.

        Args:
            act: A function that the other thread calls again and again, with the lock.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, args=(act,), name="mpidist-ahead", daemon=True)
            self._thread.start()
        self._is_wanted = True
        self._may.set()

    def take_back(self) -> None:
        """Local. Take the window from the other thread, which has left it on return: the function has ended."""
        self._is_wanted = False
        # It may be in the middle of a piece: outside functions the thread that serves uses the window without asking.
        with self:
            pass

    def end(self) -> None:
        """Local. End the other thread, outside a function."""
        if self._thread is not None:
            self._is_over = True
            self._may.set()
            self._thread.join()
            self._thread = None

    def __enter__(self) -> None:
        if self._thread is not None:
            self._may.clear()
        self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._lock.release()
        if self._is_wanted:
            self._may.set()

    def _run(self, act: Act) -> None:
        while True:
            self._may.wait()
            seconds: float | None = 0.0
            with self._lock:
                if self._is_over:
                    return
                # Looked at again: a thread of the function may have come between, and wait for the lock now.
                if self._may.is_set():
                    seconds = act()
                if seconds is None:
                    self._is_wanted = False
                    self._may.clear()
            if seconds:
                time.sleep(seconds)


class OwnThreads:
    """The threads that functions start on a worker.

    Args:
        lock: See the attribute.

    Attributes:
        lock: The lock of the thread that uses the window while a function runs.
        server: The thread that serves, and runs the functions.
        runs: Whether a function runs. Where none does, the window is for the thread that serves.
    """

    def __init__(self, lock: WindowLock) -> None:
        self.lock = lock
        self.server = get_ident()
        self.runs = False

    @contextlib.contextmanager
    def in_this_process(self) -> Iterator[None]:
        """Local. Inside, a function of the program runs: a child that it has forked ends with it.

        Otherwise the child would continue as this process, and send messages to the other ranks in its name.
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
        """Local. Inside, a function runs. Calls of threads that it has not joined are refused afterwards."""
        self.runs = True
        try:
            yield
        finally:
            # With the lock: no thread of the function is in the middle of a read or a write any more.
            with self.lock:
                self.runs = False


def _end_child(error: BaseException | None) -> NoReturn:
    """End this forked process as Python ends one, but without the exit functions of a rank."""
    code = 0
    if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
        code = error.code or 0
    elif error is not None:
        code = 1
        sys.stderr.write("".join(traceback.format_exception(error)))
    flush()
    os._exit(code & 0xFF)


def one_at_a_time(method: Callable[Concatenate[W, P], R]) -> Callable[Concatenate[W, P], R]:
    """Local. Let threads call a method of a worker one after the other.

    Args:
        method: A method that uses the window.

    Returns:
        The method, which now raises RuntimeError in a forked child, and in a thread while no function runs.
    """
    @functools.wraps(method)
    def call(self: W, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self.lock:
            if not self.runs and get_ident() != self.server:
                raise RuntimeError(
                    "a thread of this worker reads or writes a variable while no function runs here: join the threads "
                    "of a function before it returns"
                )
            return method(self, *args, **kwargs)

    return call


class Whole:
    """`with whole:` surrounds uninterrupted work; one may contain another. Background threads get no interrupts.

    Args:
        order: The order of calls that no other rank makes.
    """

    def __init__(self, order: CallOrder) -> None:
        self._order = order
        self._is_torn = False

    def __enter__(self) -> None:
        if get_ident() != main_thread().ident:
            return
        if self._is_torn:
            # A message may be lost, and a wait for its answer would never end.
            raise InterruptedCallError(
                "a second interrupt has cut off a message between the chief and another rank, so the coordinator "
                "cannot continue. Restart the job: a program that saves checkpoints resumes from the last one"
            )
        self._order.during("a message of parameter servers")

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        if get_ident() != main_thread().ident:
            return
        self._is_torn = self._is_torn or isinstance(error, KeyboardInterrupt)
        self._order.__exit__(kind, error, trace)
        if error is None and self._order.is_asked and not self._order.is_inside:
            # It came between two messages. No other rank raises it with this one.
            INTERRUPTS.deliver(is_own=True)
