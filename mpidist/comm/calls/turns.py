"""Turns: the threads of a program make calls on the same ranks one after the other.

A framework makes calls on a thread of its own: XLA in a callback, PyTorch in a backward pass on a GPU. MPI matches
calls by their order, so another thread waits for the end of such a call. Which of two threads comes first may differ
between ranks: their signatures then differ, and all ranks raise an error.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from mpidist.comm.calls.text import refuse_inside
from mpidist.errors import is_shared
from mpidist.failures.interrupts import INTERRUPTS
from mpidist.recorder.calls import Calls

if TYPE_CHECKING:
    from mpidist.comm.calls.order import CallOrder

P = ParamSpec("P")
T = TypeVar("T")

# The pause between two looks at a call of another thread, whose end nobody signals.
_PAUSE_SECONDS = 1e-4


class Turns:
    """The calls of frameworks on one communicator, from any one thread at a time; `turns_of` gives it.

    Args:
        order: The order of calls on the communicator, which waits for these calls from now on.
        calls: The record of calls on it.
    """

    def __init__(self, order: CallOrder, calls: Calls) -> None:
        self._order = order
        self._calls = calls
        self._lock = threading.Lock()
        # The thread that is in a call, and the one whose step it has entered; 0: none.
        self._thread = self._lender = 0
        # The open steps: the thread of each, and the depth of calls in it.
        self._steps: list[tuple[int, int]] = []
        # Called before calls that are inside no other, and the threads that are in them.
        self._before: list[Callable[[], object]] = []
        self._waiting: set[int] = set()
        order.turns = self

    def call(self, name: str, owner: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Collective. Call a function that makes calls, as one call; an interrupt waits for its end.

        Args:
            name: The name of the call, the same on all ranks.
            owner: The number of the strategy; see `CallOrder.deal`.
            function: The function.
            *args: Its arguments.
            **kwargs: Its keyword arguments.

        Returns:
            Its result. On another thread than the main one an interrupt is raised in the main thread instead.

        Raises:
            RuntimeError: Two threads make calls at once, neither of them the main one; or this thread is in a call.
        """
        self._enter(name, owner)
        try:
            result = function(*args, **kwargs)
        except BaseException as error:
            try:
                self._order.fail(error)
            finally:
                self._give_back()
            raise
        try:
            self._order.leave()
        except KeyboardInterrupt:
            if threading.current_thread() is threading.main_thread():
                raise
            # The framework would make another error of it.
            INTERRUPTS.pass_on(self._is_main_outside)
        finally:
            self._give_back()
        return result

    def _is_main_outside(self) -> bool:
        return not self._order.is_inside or self._calls.thread != threading.main_thread().ident

    def call_before(self, function: Callable[[], object]) -> None:
        """Local. Call a function before each call that begins on these ranks inside no other, on any thread.

        Args:
            function: The function, which may wait for calls of frameworks. It is not called in such a call itself.
        """
        self._before.append(function)
        self._calls.on_begin = self._run_before

    def forget(self, function: Callable[[], object]) -> None:
        """Local. Undo `call_before`."""
        self._before.remove(function)
        self._calls.on_begin = self._run_before if self._before else None

    def _run_before(self) -> None:
        me, depth = get_ident(), self._calls.depth
        # A call of another thread is no reason to go without: more calls may follow it there, before this one.
        is_mine = self._order.is_inside and self._calls.thread == me
        is_between = not is_mine or bool(self._steps and self._steps[-1] == (me, depth))
        if me == self._thread or me in self._waiting or not is_between:
            return
        self._waiting.add(me)
        try:
            for function in tuple(self._before):
                function()
        finally:
            self._waiting.discard(me)

    def _enter(self, name: str, owner: int) -> None:
        me, calls = get_ident(), self._calls
        if self._thread == me:
            # A signal handler, or the like, inside a call.
            refuse_inside(name, me)
        if self._before:
            # Before the lock, which the calls that it waits for need.
            self._run_before()
        if not self._lock.acquire(blocking=False):
            if self._thread and threading.main_thread().ident not in (me, self._thread):
                refuse_inside(name, self._thread)
            self._lock.acquire()
        self._thread = me
        try:
            if self._order.is_inside and calls.thread != me:
                self._await_calls(me)
            self._order.during(name, owner)
        except BaseException:
            self._give_back()
            raise

    def _await_calls(self, me: int) -> None:
        """Wait until the call of another thread has ended, or enter the step in which it is."""
        calls = self._calls
        while self._order.is_inside and (thread := calls.thread) != me:
            if self._steps and self._steps[-1] == (thread, calls.depth):
                self._lender = thread
                calls.thread = me
                return
            time.sleep(_PAUSE_SECONDS)

    def _give_back(self) -> None:
        self._thread = 0
        if self._lender:
            self._calls.thread, self._lender = self._lender, 0
        self._lock.release()

    def prepare(self, name: str, depth: int, *, is_at_once: bool) -> None:
        """Local. Wait until a call can begin: for functions of `call_before`, and for a call of a framework's thread.

        Args:
            name: The name of the call that is to begin.
            depth: The number of nested calls that this rank is in.
            is_at_once: Whether the innermost call makes no further calls.

        Raises:
            RuntimeError: This thread is in the middle of a call.
        """
        self._run_before()
        me, thread = get_ident(), self._calls.thread
        if depth and thread != me != self._thread:
            with self._lock:
                return
        if depth and (thread != me or is_at_once):
            refuse_inside(name, thread)

    @contextmanager
    def step(self, name: str, owner: int) -> Iterator[None]:
        """Collective. Surround a step: interrupts wait for its end, and an exception that leaves it marks it as torn.

        Calls inside may be made by other threads.

        Args:
            name: The name of the step, the same on all ranks.
            owner: See `call`.

        Raises:
            InterruptedCallError: An earlier step or call was left in the middle.
            RuntimeError: Another thread is in a call.
        """
        order = self._order
        order.during(f"step {name}", owner)
        order.is_under_way = True
        self._steps.append((get_ident(), self._calls.depth))
        INTERRUPTS.be_patient(order, patient=True)
        try:
            yield
        except BaseException as error:
            self._end_step()
            # Shown as what was left in the middle, on all ranks: in the place of the next call, since others may still
            # be in the last one.
            order.key = (f"step {name!r}", None)
            order.number += not is_shared(error)
            order.fail(error)
            raise
        self._end_step()
        order.leave()

    def _end_step(self) -> None:
        self._steps.pop()
        INTERRUPTS.be_patient(self._order, patient=bool(self._steps))


def turns_of(order: CallOrder, calls: Calls) -> Turns:
    """Local. The turns of a communicator.

    Args:
        order: The order of calls on it.
        calls: The record of calls on it.
    """
    return order.turns or Turns(order, calls)
