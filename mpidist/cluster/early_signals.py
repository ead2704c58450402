"""Signals that come before a program has made its `PreemptionCheckpointHandler`: they are noted from the import on.

A start may take longer than a short job has, and Slurm's signal would end the job then, without a requeue. So a rank of
a job that may be queued again, or one with `MPIDIST_SIGNALS`, notes such a signal, and the handler gets it when it
is made. Without one by the first call of a training, or with a handler of the program's own, the signal has the effect
that it would have had: the earlier handler is restored, and the signal is raised again.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

from mpidist import launch
from mpidist.cluster.slurm import job
from mpidist.comm.calls.before_calls import call_before
from mpidist.errors import LauncherError

VARIABLE = "MPIDIST_SIGNALS"
# Without the variable: what Slurm sends, and what sites have it send.
_DEFAULT = (signal.SIGTERM, signal.SIGUSR1)
# A program that makes no such call, and no handler, is as any other after this time.
MOST_SECONDS = 600.0
_LOOK_SECONDS = 0.1
# The calls of a training; variables are made, and take their first values, before there is a handler.
_CALLS = re.compile("apply_gradients|all_|reduce|arrays reduced|barrier|save")


class EarlySignals:
    """The signals of this process before it has a handler. There is one object of a process, `EARLY`."""

    def __init__(self) -> None:
        self._process = 0
        self._began = 0.0
        self._previous: dict[int, Any] = {}
        self._came: list[int] = []
        self._asks = self._waits = self._lets_go = False
        self._mask: set[Any] | None = None

    def begin(self, numbers: tuple[signal.Signals, ...], *, asks: bool) -> None:
        """Local. Note these signals from now on, in the main thread, except those that the program handles already.

        Args:
            numbers: The signals.
            asks: Whether Slurm is asked, when a signal has come, if the job can be requeued.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        self._process, self._asks, self._began = os.getpid(), asks, time.monotonic()
        for number in numbers:
            if signal.getsignal(number) == signal.SIG_DFL:
                self._previous[number] = signal.signal(number, self.take)
        if self._previous:
            os.register_at_fork(before=self._block, after_in_parent=self._unblock, after_in_child=self._be_child)
            call_before(self._on_call)

    def take(self, number: int, _: FrameType | None = None) -> None:
        """Local. Note a signal; if no handler has been made in time, let it have the effect that it would have had."""
        if self._lets_go or time.monotonic() > self._began + MOST_SECONDS:
            self._came.append(number)
            self.release()
            return
        if number not in self._came:
            self._came.append(number)
        if not self._waits:
            self._waits = True
            # Slurm's control daemon may take seconds to answer.
            threading.Thread(target=self._wait, name="mpidist-early-signal", daemon=True).start()

    def _wait(self) -> None:
        """Discard a noted signal that no handler has taken in time, or if the job cannot be requeued."""
        # Where Slurm does not say: most jobs can.
        can_be_requeued = True
        if self._asks:
            with contextlib.suppress(LauncherError):
                can_be_requeued = job.can_be_requeued()
        # No event: a signal's handler may not wait for the lock of one.
        while can_be_requeued and self._previous and time.monotonic() < self._began + MOST_SECONDS:
            time.sleep(_LOOK_SECONDS)
        self._lets_go = True
        # A handler of the program's own gets each of them once.
        for number in [one for one in self._came if one in self._previous]:
            if signal.getsignal(number) != self.take:
                self._came.remove(number)
            signal.pthread_kill(threading.main_thread().ident or 0, number)

    def hand_over(self, number: int) -> bool:
        """Local. Leave a signal to a handler that is about to be set.

        Returns:
            Whether the signal has come.
        """
        if number not in self._previous:
            return False
        self._put_back(number)
        return number in self._came

    def release(self) -> None:
        """Local. Restore the earlier handlers, and raise again the signals that have come."""
        came, self._came = [number for number in dict.fromkeys(self._came) if number in self._previous], []
        for number in list(self._previous):
            self._put_back(number)
        for number in came:
            # With the effect of a signal that comes now: of a handler that the program has set meanwhile, too.
            signal.raise_signal(number)

    def _on_call(self, name: str) -> bool:
        """Whether nothing is to be done before later calls."""
        if _CALLS.match(name) and threading.current_thread() is threading.main_thread():
            self.release()
        return not self._previous

    def _put_back(self, number: int) -> None:
        previous = self._previous.pop(number)
        if signal.getsignal(number) == self.take:
            signal.signal(number, previous)

    def _block(self) -> None:
        # As `SIGNALS`: Python loses signals that a child gets at its very start.
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, list(self._previous)) if self._previous else None

    def _unblock(self) -> None:
        if self._mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def _be_child(self) -> None:
        for number in list(self._previous):
            self._put_back(number)
        self._came = []
        self._unblock()


EARLY = EarlySignals()


def begin() -> None:
    """Local. Begin where this process is a rank of a job that wants it; `import mpidist` calls it.

    Raises:
        LauncherError: The variable names no signals.
    """
    given = os.environ.get(VARIABLE, "")
    in_slurm = bool(job.job_name())
    if not (given or in_slurm) or launch.read() is None or launch.is_multiprocessing_child() or _is_child_of_rank():
        return
    numbers = _signals(given) if given else _DEFAULT
    # There this signal also reports deaths.
    if _parent("comm").startswith("hydra"):
        numbers = tuple(number for number in numbers if number != signal.SIGUSR1)
    EARLY.begin(numbers, asks=not given)


def _signals(text: str) -> tuple[signal.Signals, ...]:
    found = []
    for name in text.split(","):
        number = getattr(signal, f"SIG{name.strip().upper().removeprefix('SIG')}", None)
        if not isinstance(number, signal.Signals) or number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGINT):
            raise LauncherError(
                f"{VARIABLE} must be names of signals that announce the end of a job, such as USR1,TERM, got "
                f"{name.strip()!r} in {text!r}"
            )
        found.append(number)
    return tuple(found)


def _parent(file: str) -> str:
    try:
        return Path(f"/proc/{os.getppid()}/{file}").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def _is_child_of_rank() -> bool:
    """Whether a rank has started this process: its parent is Python, too, and has the same words of the launcher."""
    if not _parent("comm").startswith("python"):
        return False
    names = {launcher.rank for launcher in launch.LAUNCHERS}
    own = {f"{name}={os.environ[name]}" for name in names & set(os.environ)}
    return bool(own & set(_parent("environ").split("\0")))
