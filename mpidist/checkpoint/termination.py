"""The notices that a job is about to end: signals, a function of the user's, and the settings of what is done then."""

from __future__ import annotations

import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from mpidist.arguments import described, flag, number, whole
from mpidist.comm.deaths import WATCH
from mpidist.comm.interrupts import INTERRUPTS

# A function of the user's is asked so often.
WATCHER_SECONDS = 1.0
# After a signal that may tell of a death on another host a rank that stays in one call for so long waits in vain.
SUSPECT_SECONDS = 60.0
# What a notice says; the largest one of all ranks counts. A signal is `SIGNALLED` and its number.
WATCHED, SIGNALLED, TIME_IS_UP, GRACE_IS_OVER = 1, 100, 1000, 2000


class TerminationConfig:
    """Settings of `PreemptionCheckpointHandler`: what tells that the job is about to end, and what is done then.

    Local. Args:
        termination_watcher_fn: Called every second in a thread of its own, on each rank; it returns True when the job
            is about to end. It must not communicate. An exception of it is raised by the handler's next call.
        exit_fn: Called on each rank after the last checkpoint; default: `sys.exit(exit_code)`. If it returns, training
            goes on, and nothing is saved any more.
        grace_period: So many seconds after a notice the job is ended. A checkpoint is saved at once, training goes on
            as long as six steps and a save fit, and then the last checkpoint is saved. With 0 there is one checkpoint.
        save_fn: Called on each rank instead of saving, with the arguments of `save_checkpoint_if_preempted`.
        signals: The signals that tell of the end, on any rank.
        time_limit: The job ends so many seconds after the handler is made; default: when Slurm ends it, if it does.
        exit_code: The code with which the program ends.
        save_factor: Before the end there is so many times the time for a save that the last save took.
        save_seconds: Taken for the time of a save as long as none was measured.
        requeue: Rank 0 has Slurm queue the job again (`scontrol requeue`), unless nothing new was saved.
        max_requeues: Not more often than this; None: as often as it takes.

    Raises:
        TypeError, ValueError: An argument of a wrong type, or out of its range.
    """

    def __init__(  # noqa: PLR0913  # the first four are tf.distribute's
        self,
        termination_watcher_fn: Callable[[], Any] | None = None,
        exit_fn: Callable[[], Any] | None = None,
        grace_period: float | None = None,
        save_fn: Callable[..., Any] | None = None,
        *,
        signals: Sequence[int] = (signal.SIGTERM, signal.SIGUSR1),
        time_limit: float | None = None,
        exit_code: int = 42,
        save_factor: float = 3.0,
        save_seconds: float = 30.0,
        requeue: bool = False,
        max_requeues: int | None = None,
    ) -> None:
        functions = {"termination_watcher_fn": termination_watcher_fn, "exit_fn": exit_fn, "save_fn": save_fn}
        for name, function in functions.items():
            if function is not None and not callable(function):
                raise TypeError(f"`{name}` must be a function, or None, got {described(function)}")
        self.termination_watcher_fn = termination_watcher_fn
        self.exit_fn = exit_fn
        self.grace_period = 0.0 if grace_period is None else number("grace_period", grace_period, least=0)
        self.save_fn = save_fn
        self.signals = _signals(signals)
        self.time_limit = None if time_limit is None else number("time_limit", time_limit, least=0)
        self.exit_code = whole("exit_code", exit_code, least=0)
        if self.exit_code > 255:
            raise ValueError(f"`exit_code` must be from 0 to 255, got {exit_code!r}")
        self.save_factor = number("save_factor", save_factor, least=1)
        self.save_seconds = number("save_seconds", save_seconds, least=0)
        self.requeue = flag("requeue", requeue)
        self.max_requeues = None if max_requeues is None else whole("max_requeues", max_requeues, least=0)


def _signals(given: Any) -> tuple[signal.Signals, ...]:
    if isinstance(given, (str, bytes)) or not isinstance(given, Sequence):
        raise TypeError(f"`signals` must be a list of signals, [signal.SIGTERM], got {described(given)}")
    found = []
    for one in given:
        try:
            found.append(signal.Signals(whole("signals", one, least=1)))
        except ValueError:
            raise ValueError(f"`signals` must be signals, as signal.SIGTERM, got {one!r}") from None
        # SIGINT is an interrupt, which has rules of its own.
        if one in (signal.SIGKILL, signal.SIGSTOP, signal.SIGINT):
            raise ValueError(f"`signals` must be signals that tell of the end, got {found[-1].name}")
    return tuple(found)


class Notice:
    """The knowledge of this rank of the job's end.

    Attributes:
        reason: `WATCHED`, `SIGNALLED` and more; 0 as long as there is nothing.
        since: When that was known first, by the monotonic clock.
        error: Of the user's function.
    """

    def __init__(self) -> None:
        self.reason = 0
        self.since = 0.0
        self.error: BaseException | None = None

    def note(self, reason: int) -> None:
        """Local. Take note of a reason; the first one counts."""
        if not self.reason:
            self.since = time.monotonic()
            self.reason = reason

    def passed_milliseconds(self) -> int:
        """Local. The time since then."""
        return int((time.monotonic() - self.since) * 1e3) if self.reason else 0


class _Signals:
    """The signals of this process that tell of its end; there is one object of a process, `SIGNALS`."""

    def __init__(self) -> None:
        self._suspects = False
        self._notices: dict[int, list[weakref.ref[Notice]]] = {}
        self._previous: dict[int, Any] = {}
        self._mask: set[Any] | None = None
        self._has_hooks = False

    def tell(self, notice: Notice, numbers: Sequence[signal.Signals]) -> None:
        """Local. Let a notice know of signals from now on.

        Raises:
            ValueError: This is not the main thread.
        """
        if numbers and threading.current_thread() is not threading.main_thread():
            raise ValueError(
                "signals can be taken in the main thread only: make the PreemptionCheckpointHandler there, or pass "
                "TerminationConfig(signals=[])"
            )
        if not self._has_hooks:
            self._has_hooks = True
            os.register_at_fork(
                before=self._block, after_in_parent=self._unblock, after_in_child=self._be_child
            )
        for number_ in numbers:
            heard = [one for one in self._notices.get(number_, []) if one() is not None]
            self._notices[number_] = [*heard, weakref.ref(notice)]
            # Who serves or coordinates under Hydra ignores this one: there it tells of deaths.
            if number_ == signal.SIGUSR1 and (
                WATCH.give_notices(self._take_notice) or signal.getsignal(number_) == signal.SIG_IGN
            ):
                continue
            if signal.getsignal(number_) != self.take:
                self._previous[number_] = signal.signal(number_, self.take)

    def _block(self) -> None:
        # Python forgets what comes to a child at its very start, where its handlers are still the parent's.
        heard = [number_ for number_, notices in self._notices.items() if notices]
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, heard) if heard else None

    def _unblock(self) -> None:
        if self._mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def _be_child(self) -> None:
        # As those that `multiprocessing` starts, and ends by SIGTERM.
        for number_ in self._notices:
            self._restore(number_)
        self._notices = {}
        self._unblock()

    def silence(self, notice: Notice) -> None:
        """Local. Let a notice know of no signal any more; where it was the last one, signals are as before."""
        for number_, heard in self._notices.items():
            self._notices[number_] = [one for one in heard if one() not in (None, notice)]
            if not self._notices[number_]:
                self._restore(number_)

    def ignore(self) -> None:
        """Local. Ignore all these signals from now on: the process is about to end in good order.

        Python gives signals back to the system when it ends, and one that comes late would change the exit code.
        """
        for number_ in [one for one, heard in self._notices.items() if heard]:
            signal.signal(number_, signal.SIG_IGN)

    def take(self, number_: int, _: FrameType | None = None) -> None:
        """Local. Handle a signal."""
        living = [notice for one in self._notices.get(number_, []) if (notice := one()) is not None]
        if living:
            for notice in living:
                notice.note(SIGNALLED + number_)
            return
        # Nobody listens any more.
        self._restore(number_)
        os.kill(os.getpid(), number_)

    def _take_notice(self, may_be_death: bool) -> None:
        self.take(signal.SIGUSR1)
        if may_be_death and not self._suspects:
            self._suspects = True
            threading.Thread(target=_suspect, name="mpidist-preemption", daemon=True).start()

    def _restore(self, number_: int) -> None:
        if number_ in self._previous:
            if signal.getsignal(number_) == self.take:
                previous = self._previous[number_]
                # None: a handler that was not set by Python.
                signal.signal(number_, signal.SIG_DFL if previous is None else previous)
            del self._previous[number_]
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


def watch(function: Callable[[], Any], notice: Notice) -> None:
    """Local. Ask a function of the user's every second, in a thread of its own that ends with the notice.

    Args:
        function: Returns whether the job is about to end.
        notice: To be told.
    """
    arguments = (function, weakref.ref(notice))
    threading.Thread(target=_work, args=arguments, name="mpidist-preemption", daemon=True).start()


def _work(function: Callable[[], Any], reference: weakref.ref[Notice]) -> None:
    pause = threading.Event()
    while (notice := reference()) is not None and not notice.reason:
        try:
            if function():
                notice.note(WATCHED)
        except BaseException as error:
            notice.error = error
            return
        # The thread must not keep it alive.
        del notice
        pause.wait(WATCHER_SECONDS)


def describe(reason: int) -> str:
    """Local. A reason in words."""
    if reason >= TIME_IS_UP:
        return "the time is up" if reason == TIME_IS_UP else "the grace period is over"
    return "the watcher function returned True" if reason == WATCHED else signal.Signals(reason - SIGNALLED).name
