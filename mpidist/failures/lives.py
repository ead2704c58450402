"""Processes that are no children of this one: whether they are alive, and how they have ended.

Linux before 5.3 has no descriptors of processes, and on later versions none may be free: then a thread reads `/proc`
twice a second. If there are many processes, each one checks only the next one, and a process that finds its next one
ended makes the others check all. Linux reports how a process with a descriptor has ended since version 6.15.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from threading import Lock

from mpidist.failures.looks import FEW, Budget
from mpidist.failures.watchdog import WATCHDOG

# Seconds between two checks.
LOOK_SECONDS = 0.5
# `PIDFD_GET_INFO` of <linux/pidfd.h>: returns the status of a process for which its parent has waited.
_GET_INFO = 0xC040FF0B
_HAS_STATUS = 1 << 3
# The mask of valid fields, eleven identities that are not read here, and the status as in `man 2 wait`.
_INFO = struct.Struct("<Q52xi")
# The launcher waits for its children at once, unless the machine is busy.
_WAITED_SECONDS = 0.2


_Watched = tuple[int, str, Callable[[], None]]


class Lives:
    """The watched processes of this host; a function is called when one of them ends.

    Args:
        life: A function that returns the start time of the process with a number, as `life_of` does.
    """

    def __init__(self, life: Callable[[int], str] | None = None) -> None:
        self._life = life or life_of
        self._budget = Budget()
        self._heard = 0
        # `add` and `look` run in different threads. Without the lock a process that is added while `look` replaces the
        # list would be lost, or be left to a thread that is about to end.
        self._lock = Lock()
        # For each process its number, its start time, and the function to call at its end.
        self._watched: list[_Watched] = []
        self._has_thread = False

    def add(self, number: int, on_end: Callable[[], None]) -> None:
        """Local. Watch one more process.

        Args:
            number: The number of a process that was just alive.
            on_end: A function that is called once in a background thread when the process has ended.
        """
        with self._lock:
            self._watched.append((number, self._life(number), on_end))
            if not self._has_thread:
                self._has_thread = True
                # The thread that waits for descriptors could be woken only by one more, and none may be free.
                threading.Thread(target=self._work, name="mpidist-lives", daemon=True).start()

    def look(self) -> bool:
        """Local. Check all processes once, or only the next one of many. Returns whether any are left."""
        with self._lock:
            ended = self._look_at_all() if self._is_to_look_at_all() else self._look_at_next()
            self._watched = [one for one in self._watched if one not in ended]
            self._has_thread = goes_on = bool(self._watched)
        # Outside the lock, which is not reentrant: these functions may call `add`.
        for _, _, on_end in ended:
            on_end()
        return goes_on

    def _is_to_look_at_all(self) -> bool:
        if len(self._watched) < FEW:
            return True
        heard, self._heard = self._heard, 0 if WATCHDOG.page is None else WATCHDOG.page.bell
        # The next process may be stopped, and then does not see the end of the one after it.
        return heard != self._heard or self._budget.is_free(len(self._watched) + 1)

    def _look_at_all(self) -> list[_Watched]:
        self._budget.begin()
        ended = [one for one in self._watched if not one[1] or self._life(one[0]) != one[1]]
        self._budget.end()
        return ended

    def _look_at_next(self) -> list[_Watched]:
        """Check the process with the next number; if it has ended, check all, and make the other ranks do so, too."""
        later = [one for one in self._watched if one[0] > os.getpid()]
        number, sign, _ = min(later or self._watched, key=lambda one: one[0])
        # A process without a start time had ended when it was added, and needs no check.
        if all(one[1] for one in self._watched) and self._life(number) == sign:
            return []
        for peer in WATCHDOG.peers():
            if peer.page is not None:
                peer.page.bell = time.monotonic_ns()
        return self._look_at_all()

    def _work(self) -> None:
        while self.look():
            time.sleep(LOOK_SECONDS)


def life_of(number: int) -> str:
    """Local. The start time of a process, empty if it has ended. A reused number has another start time."""
    try:
        # The name of a program, before the last bracket, may itself contain brackets and spaces.
        state, *fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    # Zombies and dead processes wait for their parent (`man 5 proc`).
    return "" if state in "ZX" else fields[18]


def how_ended(descriptor: int) -> str:
    """Local. The end of a process: "signal 11 (SIGSEGV)" or "exit code 0"; empty if the kernel does not report it.

    Args:
        descriptor: A descriptor of the process (`man 2 pidfd_open`).
    """
    end = time.monotonic() + _WAITED_SECONDS
    while (status := _status(descriptor)) is None and time.monotonic() < end:
        time.sleep(0.01)
    if status is None or status < 0:
        return ""
    if not os.WIFSIGNALED(status):
        return f"exit code {os.waitstatus_to_exitcode(status)}"
    number = os.WTERMSIG(status)
    with contextlib.suppress(ValueError):
        return f"signal {number} ({signal.Signals(number).name})"
    return f"signal {number}"


def _status(descriptor: int) -> int | None:
    """The status; None until the kernel has it, and -1 if this kernel does not report it."""
    info = bytearray(_INFO.size)
    _INFO.pack_into(info, 0, _HAS_STATUS, 0)
    try:
        fcntl.ioctl(descriptor, _GET_INFO, info)
    except OSError:
        return -1
    mask, status = _INFO.unpack_from(info)
    return int(status) if mask & _HAS_STATUS else None
