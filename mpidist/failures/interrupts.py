"""Interrupts: Ctrl-C, or another SIGINT, breaks no call off, and all ranks raise KeyboardInterrupt together.

Python raises KeyboardInterrupt between any two instructions, on the ranks that got the signal. In the middle of a step
that would leave half of an update on some ranks. mpidist's handler notes the interrupt instead. The next call in which
all ranks synchronize transmits it (`comm/calls/order.py`), and all ranks raise it when that call is done.

A second interrupt, or five seconds in one call, ends the job. If the rank makes no call within that time,
KeyboardInterrupt is raised at the current line of its program.
"""

from __future__ import annotations

import itertools
import math
import os
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from types import FrameType
from typing import NoReturn, Protocol

from mpidist.failures.deaths import WATCH
from mpidist.failures.watchdog import WATCHDOG

# The longest time from an interrupt to the next call, and the longest duration of a call after an interrupt.
PATIENCE_SECONDS = 5.0
# A second interrupt breaks off a call that no other rank makes. Signals within this time are one interrupt: launchers
# may pass on those of one Ctrl-C, and a key that is held down repeats them.
_ONE_PRESS_SECONDS = 0.5
# The main thread runs a handler within this time, unless it is in a call of MPI.
_HANDLED_SECONDS = 0.2


class Order(Protocol):
    """The calls on one communicator; see `CallOrder`.

    Attributes:
        is_asked: Whether this rank was interrupted, and not all ranks are notified yet.
        is_part: Whether these calls are made inside others, or by a background thread.
        is_across: Whether there are ranks with which this one shares no memory.
        broken, left, identity: See `CallOrder`.
    """

    broken: str
    left: tuple[int, str]
    identity: int
    is_asked: bool
    is_part: bool
    is_across: bool

    @property
    def is_inside(self) -> bool:
        """Local. Whether this rank is in a call."""
        ...

    @property
    def is_alone(self) -> bool:
        """Local. Whether no other rank makes these calls."""
        ...

    @property
    def number(self) -> int:
        """Local. The number of the last call."""
        ...

    def interrupt(self) -> bool:
        """Local. Raise KeyboardInterrupt at the end of the call; False if that was requested already."""
        ...

    def show_call(self) -> None:
        """Local. Show the last call to other ranks."""
        ...

    def difference(self) -> str:
        """Local. The difference of the ranks' last calls, as far as this rank sees it; empty if there is none."""
        ...

    def differing(self) -> tuple[Sequence[int], str]:
        """Local. The ranks that have shown another call than this rank, or left one in the middle; and why, if any."""
        ...


class Interrupts:
    """The interrupts of this process. There is one object per process, `INTERRUPTS`.

    Attributes:
        is_asked: Whether this rank was interrupted, and not all ranks are notified yet.
        orders: The calls on all communicators.
    """

    def __init__(self) -> None:
        self.is_asked = False
        self.orders: list[weakref.ref[Order]] = []
        self._has_ranks = False
        self._process = 0
        self._raises_now = False
        self._may_raise: Callable[[], bool] | None = None
        # The time of the handler's last run, and the number of its runs. `_signals` numbers the received signals.
        self._handled = -math.inf
        self._handlings = 0
        # The time at which a call that no other rank makes was interrupted.
        self._noted = -math.inf
        self._signals = itertools.count(1)
        self._is_stuck = False
        self._timer: threading.Timer | None = None
        self._expects_until = -math.inf
        self._end_job: Callable[[str], None] = lambda _: None
        # The calls in which the program itself computes, for any time.
        self._patient: set[int] = set()

    def add(self, order: Order) -> None:
        """Local. Protect the calls of a communicator from interrupts; the first call of this installs the handler.

        A handler that the program has installed stays.
        """
        self.orders = [*(one for one in self.orders if one() is not None), weakref.ref(order)]
        self._process = os.getpid()
        # Signals can be handled in the main thread only.
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self.take)

    def share(self, end: Callable[[str], None]) -> None:
        """Local. Raise interrupts on all ranks together from now on.

        Args:
            end: A function that prints a reason and ends the job.
        """
        if not self._has_ranks:
            self._has_ranks = True
            self._end_job = end
            self._handlings = 0
            # The main thread runs no handler while it is in a call of MPI.
            WATCH.hear(signal.SIGINT, self._hear)

    def deliver(self, *, is_own: bool = False) -> NoReturn:
        """Local. Raise KeyboardInterrupt, as all ranks do at this point.

        Args:
            is_own: Whether this rank alone was interrupted.
        """
        if not self.is_asked and not is_own:
            # One Ctrl-C reaches all ranks, and this rank's signal may arrive later.
            self._expects_until = time.monotonic() + PATIENCE_SECONDS
        self._ask(asked=False)
        raise KeyboardInterrupt

    def pass_on(self, may_raise: Callable[[], bool] | None = None) -> None:
        """Local. Raise KeyboardInterrupt in the main thread.

        Args:
            may_raise: Whether it is raised although a thread is in a call: a call of another thread, which has ended,
                has delivered it on all ranks.
        """
        self._raises_now, self._may_raise = True, may_raise
        # Send a signal: `interrupt_main` would not end a sleep.
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def be_patient(self, order: Order, *, patient: bool) -> None:
        """Local. Let an interrupt wait for the end of the present call for any time, or no longer than others.

        A second interrupt ends the job.

        Args:
            order: The calls of the communicator.
            patient: Whether it waits.
        """
        if patient:
            self._patient.add(order.identity)
        else:
            self._patient.discard(order.identity)

    def forget(self) -> None:
        """Local. Drop interrupts that were not raised yet, and expect none."""
        self._expects_until = -math.inf
        self._ask(asked=False)

    def _ask(self, *, asked: bool) -> None:
        self.is_asked = asked
        if not asked and self._timer is not None:
            self._timer.cancel()
        for order in self._all_orders():
            if not order.is_part:
                order.is_asked = asked

    def show_calls(self) -> None:
        """Local. Show the last call on each communicator to other ranks, for their `differences`."""
        for order in self._all_orders():
            order.show_call()

    def differences(self) -> list[str]:
        """Local. The differences on all communicators, see `Order.difference`; call this after all ranks have ended."""
        return [text for order in self._all_orders() if (text := order.difference())]

    def differing(self, identity: int) -> tuple[Sequence[int], str]:
        """Local. See `Order.differing`, on the communicator with this identity."""
        for order in self._all_orders():
            if order.identity == identity:
                return order.differing()
        return (), ""

    def why_awaited(self) -> str:
        """Local. The reason why other ranks may hang after this rank has ended; empty if there is none."""
        for order in self._all_orders():
            number, text = order.left
            if order.broken or (number == order.number and WATCHDOG.others_are_inside(order.identity)):
                return order.broken or text
        return ""

    def _all_orders(self) -> list[Order]:
        return [order for one in self.orders if (order := one()) is not None]

    def place(self) -> tuple[int, int] | None:
        """Local. The call in which this rank is, as its communicator's identity and its number; None outside calls."""
        order = self._inside()
        return None if order is None else (order.identity, order.number)

    def _inside(self) -> Order | None:
        return next((order for order in self._all_orders() if order.is_inside and not order.is_part), None)

    def take(self, number: int, frame: FrameType | None) -> None:
        """Local. Handle SIGINT, in the main thread."""
        if os.getpid() != self._process:
            # This is a forked child, which makes no calls.
            signal.default_int_handler(number, frame)
        self._handled = time.monotonic()
        self._handlings += 1
        if self._handled < self._expects_until and not self._raises_now:
            self._expects_until = -math.inf
            return
        inside = self._inside()
        if self._raises_now and self._may_raise is not None and self._may_raise():
            inside = None
        if inside is None and (self._raises_now or self.is_asked or not self._has_ranks):
            self._raises_now = False
            self._ask(asked=False)
            signal.default_int_handler(number, frame)
        elif inside is not None and inside.is_alone:
            if inside.interrupt():
                self._noted = self._handled
            elif self._handled - self._noted > _ONE_PRESS_SECONDS:
                signal.default_int_handler(number, frame)
        elif self.is_asked and not self._raises_now:
            self._end("was interrupted twice")
        elif not self.is_asked:
            self._raises_now = False
            self._ask(asked=True)
            self._wait(inside)

    def _count_across(self) -> int:
        """The number of calls so far that may transmit an interrupt between nodes."""
        return sum(order.number for order in self._all_orders() if order.is_across and not order.is_part)

    def _wait(self, inside: Order | None) -> None:
        number = -1 if inside is None else inside.number
        self._timer = threading.Timer(PATIENCE_SECONDS, self._expire, (inside, number, self._count_across()))
        self._timer.name = "mpidist-interrupt"
        self._timer.daemon = True
        self._timer.start()

    def _expire(self, order: Order | None, number: int, count: int) -> None:
        if not self.is_asked:
            return
        inside = self._inside()
        if inside is None and self._count_across() == count:
            self.pass_on()
        elif inside is not None and inside is order and inside.number == number and not self._patient:
            self._end(f"was interrupted, and its call has not ended within {PATIENCE_SECONDS:g} s")
        else:
            # The rank makes calls: one of them will synchronize all ranks.
            self._wait(inside)

    def _hear(self) -> None:
        """Handle a SIGINT in a background thread, also while the main thread is in a call of MPI."""
        if signal.getsignal(signal.SIGINT) != self.take:
            # The program has installed a handler, which may only set a flag.
            return
        number, heard = next(self._signals), time.monotonic()

        def is_handled() -> bool:
            # On a busy machine this thread may begin long after the handler, which may answer several signals at once.
            return self._handlings >= number or self._handled > heard - _HANDLED_SECONDS

        time.sleep(_HANDLED_SECONDS)
        if not is_handled():
            if self._is_stuck:
                self._end("was interrupted twice within one call")
            self._is_stuck = True
            while not is_handled() and time.monotonic() < heard + PATIENCE_SECONDS:
                time.sleep(_HANDLED_SECONDS)
            self._is_stuck = False
        if is_handled():
            self._handlings = max(self._handlings, number)
        elif self._inside() is not None and not self._patient:
            self._end(f"was interrupted, and its call has not ended within {PATIENCE_SECONDS:g} s")

    def _end(self, why: str) -> None:
        frames = sys._current_frames()  # noqa: SLF001 - documented; private only to say "for debuggers"
        stack = "".join(traceback.format_stack(frames.get(threading.main_thread().ident or 0)))
        self._end_job(f"{why}, the job ends. This rank was here:\n{stack}")


INTERRUPTS = Interrupts()
