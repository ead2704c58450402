"""Signals by which a cluster notifies a process that its job is about to end."""

from __future__ import annotations

import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from mpidist.cluster.children import CHILDREN
from mpidist.cluster.early_signals import EARLY
from mpidist.failures.deaths import WATCH
from mpidist.failures.interrupts import INTERRUPTS

# What a notice says of a signal: this and its number.
SIGNALLED = 100
# After a signal that may report a death on another host, a rank is deadlocked if it stays this long in one call.
SUSPECT_SECONDS = 60.0
# A launcher's signal may come this long before the death that it reports is detected.
_NEWS_SECONDS = 1.0


def _nothing() -> None:
    """Notify no object."""


class Notice:
    """A notice of the job's end, as this rank knows it.

    Args:
        clock: A monotonic clock in seconds.

    Attributes:
        reason: A number of `preemption.termination`, `SIGNALLED` and more; 0 while there is no notice.
        since: The time of the first reason, by the clock.
        error: The error of the user's function.
        is_closed: Whether later notices are ignored.
        on_first: A function that is called after the first reason, at any moment and in any thread.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.reason = 0
        self.since = 0.0
        self.error: BaseException | None = None
        self.is_closed = False
        self.on_first: Callable[[], None] = _nothing

    def note(self, reason: int) -> None:
        """Local. Note a reason; the first one counts."""
        if not self.reason:
            self.since = self._clock()
            self.reason = reason
            self.on_first()

    def take(self) -> int:
        """Local. Return the reason and forget it: the next one is noted again."""
        reason, self.reason = self.reason, 0
        return reason

    def passed_milliseconds(self) -> int:
        """Local. The time since then."""
        return int((self._clock() - self.since) * 1e3) if self.reason else 0


class _Signals:
    """The signals that announce the end of this process; there is one object per process, `SIGNALS`."""

    def __init__(self) -> None:
        self._suspects = False
        self._notices: dict[int, list[weakref.ref[Notice]]] = {}
        self._previous: dict[int, Any] = {}
        self._mask: set[Any] | None = None
        self._has_hooks = False
        self._error: Exception | None = None
        # The number of deaths at the last signal that reported one.
        self._deaths = 0

    def tell(self, notice: Notice, numbers: Sequence[signal.Signals]) -> None:
        """Local. Report signals to a notice from now on.

        Raises:
            ValueError: This is not the main thread.
        """
        if numbers and threading.current_thread() is not threading.main_thread():
            raise ValueError(
                "signal handlers can be installed in the main thread only: create the PreemptionCheckpointHandler "
                "there, or pass TerminationConfig(signals=[])"
            )
        if not self._has_hooks:
            self._has_hooks = True
            os.register_at_fork(
                before=self._block, after_in_parent=self._be_parent, after_in_child=self._be_child
            )
        if numbers:
            CHILDREN.begin()
        for number_ in numbers:
            heard = [one for one in self._notices.get(number_, []) if one() is not None]
            self._notices[number_] = [*heard, weakref.ref(notice)]
            if EARLY.hand_over(number_):
                notice.note(SIGNALLED + number_)
            if number_ == signal.SIGUSR1 and WATCH.give_notices(self._take_notice):
                continue
            present = signal.getsignal(number_)
            if present not in (self.take, self._take_doubtful):
                # Ranks that serve or coordinate under Hydra ignore this one: there it also reports deaths.
                is_doubtful = number_ == signal.SIGUSR1 and present == signal.SIG_IGN
                self._deaths = len(WATCH.dead)
                self._previous[number_] = signal.signal(number_, self._take_doubtful if is_doubtful else self.take)

    def _block(self) -> None:
        # Python loses signals that a child gets at its very start, where its handlers are still the parent's.
        heard = [number_ for number_, notices in self._notices.items() if notices]
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, heard) if heard else None

    def _unblock(self) -> None:
        if self._mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def _be_parent(self) -> None:
        self._unblock()
        CHILDREN.take()

    def _be_child(self) -> None:
        # A worker of the rank's. `multiprocessing` ends its own by SIGTERM.
        heard = [number_ for number_ in self._notices if self._listening(number_)]
        for number_ in self._notices:
            self._restore(number_)
        self._notices = {}
        if heard:
            CHILDREN.separate([number_ for number_ in heard if number_ != signal.SIGTERM])
        self._unblock()

    def silence(self, notice: Notice) -> None:
        """Local. Report no more signals to a notice; after the last notice, the earlier handlers are restored."""
        for number_, heard in self._notices.items():
            self._notices[number_] = [one for one in heard if one() not in (None, notice)]
            if not self._notices[number_]:
                self._restore(number_)

    def ignore(self) -> None:
        """Local. Ignore all these signals from now on: the process is about to end in good order.

        Python gives signals back to the system when it ends, and one that comes late would change the exit code. In
        another thread than the main one, which ends only itself, nothing changes.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        for number_ in [one for one, heard in self._notices.items() if heard]:
            signal.signal(number_, signal.SIG_IGN)

    def numbers(self) -> list[int]:
        """Local. The signals for which some object wants notices."""
        return [number_ for number_ in self._notices if self._listening(number_)]

    def _listening(self, number_: int) -> list[Notice]:
        return [notice for one in self._notices.get(number_, []) if (notice := one()) is not None]

    def note(self, number_: int) -> None:
        """Local. Set the notices for a signal that another process of the job got."""
        for notice in self._listening(number_):
            notice.note(SIGNALLED + number_)

    def take(self, number_: int, _: FrameType | None = None) -> None:
        """Local. Handle a signal."""
        error, self._error = self._error, None
        if error is not None:
            if INTERRUPTS.place() is None:
                raise error
            return
        if self._listening(number_):
            self.note(number_)
            return
        # No notice is left.
        self._restore(number_)
        os.kill(os.getpid(), number_)

    def raise_in_main_thread(self, error: Exception) -> None:
        """Local. Raise an error in the main thread, outside calls; from another thread.

        The handler of a signal raises it: without a signal a call that waits would not return.
        """
        for number_ in self.numbers():
            if signal.getsignal(number_) == self.take:
                self._error = error
                signal.pthread_kill(threading.main_thread().ident or 0, number_)
                return

    def _take_doubtful(self, number_: int, _: FrameType | None = None) -> None:
        """Handle a signal by which the launcher also reports deaths, which end nothing here."""
        threading.Thread(target=self._decide, args=(number_,), name="mpidist-preemption", daemon=True).start()

    def _decide(self, number_: int) -> None:
        # Python does not say which process has sent it. Each death causes one.
        end = time.monotonic() + _NEWS_SECONDS
        while (deaths := len(WATCH.dead)) == self._deaths and time.monotonic() < end:
            time.sleep(0.02)
        if deaths == self._deaths:
            self.note(number_)
        self._deaths = deaths

    def _take_notice(self, may_be_death: bool) -> None:
        self.take(signal.SIGUSR1)
        if may_be_death and not self._suspects:
            self._suspects = True
            threading.Thread(target=_suspect, name="mpidist-preemption", daemon=True).start()

    def _restore(self, number_: int) -> None:
        # A program that had kept this handler may have set it again later, when no earlier handler is known.
        is_ours = signal.getsignal(number_) in (self.take, self._take_doubtful)
        if is_ours and threading.current_thread() is not threading.main_thread():
            # Only the main thread can: it does so at the next signal, for which no notice is wanted any more.
            return
        if number_ in self._previous or is_ours:
            previous = self._previous.pop(number_, signal.SIG_DFL)
            if is_ours:
                # None: a handler that was not set by Python.
                signal.signal(number_, signal.SIG_DFL if previous is None else previous)
        elif number_ == signal.SIGUSR1:
            WATCH.give_notices(None)


SIGNALS = _Signals()


def _suspect() -> None:
    """Take a signal for the death of a rank on another host, if this rank stays in one call for long."""
    last = None
    while (place := INTERRUPTS.place()) is None or place != last:
        last = place
        time.sleep(SUSPECT_SECONDS)
    WATCH.suspect()
