"""Processes that are no children of this one: whether they live, and how they have ended.

Linux before 5.3 has no descriptors of processes, and elsewhere none may be left: then a thread looks into `/proc` twice
a second. Of many processes it looks at the next one, as each of them does, and who sees one that has ended tells the
others to look at all. How one with a descriptor has ended Linux tells since 6.15.
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

# Between two looks.
LOOK_SECONDS = 0.5
# `PIDFD_GET_INFO` of <linux/pidfd.h>: it has the status of a process that its parent has waited for.
_GET_INFO = 0xC040FF0B
_HAS_STATUS = 1 << 3
# The mask of what is there, eleven identities that are not read here, and the status as of `man 2 wait`.
_INFO = struct.Struct("<Q52xi")
# The launcher waits for its children at once, unless the machine is busy.
_WAITED_SECONDS = 0.2


_Watched = tuple[int, str, Callable[[], None]]


class Lives:
    """The lives of processes of this host, of which each is told that ends.

    Args:
        life: Returns a sign of the life of the process with a number, as the function `life_of` does.
    """

    def __init__(self, life: Callable[[int], str] | None = None) -> None:
        self._life = life or life_of
        self._budget = Budget()
        self._heard = 0
        # `add` runs in other threads than `look`. Without it a process that is added while a look replaces the list
        # would be lost, or be left to a thread that is about to end.
        self._lock = Lock()
        # Of each process: its number, the sign of its life, and what is called at its end.
        self._watched: list[_Watched] = []
        self._has_thread = False

    def add(self, number: int, on_end: Callable[[], None]) -> None:
        """Local. Look at one more process.

        Args:
            number: The number of a process that was alive a moment ago.
            on_end: Called once when it has ended, in a thread of ours.
        """
        with self._lock:
            self._watched.append((number, self._life(number), on_end))
            if not self._has_thread:
                self._has_thread = True
                # The thread that waits for descriptors could be woken only by one more, and none may be left.
                threading.Thread(target=self._work, name="mpidist-lives", daemon=True).start()

    def look(self) -> bool:
        """Local. Look at all of them once, or at the next one of many. Returns whether any are left."""
        with self._lock:
            ended = self._look_at_all() if self._is_to_look_at_all() else self._look_at_next()
            self._watched = [one for one in self._watched if one not in ended]
            self._has_thread = goes_on = bool(self._watched)
        # Outside the lock, which is not reentrant: what is called here may `add`.
        for _, _, on_end in ended:
            on_end()
        return goes_on

    def _is_to_look_at_all(self) -> bool:
        if len(self._watched) < FEW:
            return True
        heard, self._heard = self._heard, 0 if WATCHDOG.page is None else WATCHDOG.page.bell
        # The next one may be stopped, and not see who ends behind it.
        return heard != self._heard or self._budget.is_free(len(self._watched) + 1)

    def _look_at_all(self) -> list[_Watched]:
        self._budget.begin()
        ended = [one for one in self._watched if not one[1] or self._life(one[0]) != one[1]]
        self._budget.end()
        return ended

    def _look_at_next(self) -> list[_Watched]:
        """Look at the process with the next number, and at all of them if it has ended; the others do so, too."""
        later = [one for one in self._watched if one[0] > os.getpid()]
        number, sign, _ = min(later or self._watched, key=lambda one: one[0])
        # Those that had ended when they were added are seen without a look.
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
    """Local. The time at which a process was started, empty if it has ended: its number may be another's by now."""
    try:
        # The name of a program may have brackets and spaces, too.
        state, *fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    # Zombies and dead processes wait for their parent (`man 5 proc`).
    return "" if state in "ZX" else fields[18]


def how_ended(descriptor: int) -> str:
    """Local. The end of a process: "signal 11 (SIGSEGV)" or "exit code 0"; empty where the kernel does not tell.

    Args:
        descriptor: A process descriptor of it (`man 2 pidfd_open`).
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
    """The status; None as long as it is not there, and -1 if this kernel does not have it."""
    info = bytearray(_INFO.size)
    _INFO.pack_into(info, 0, _HAS_STATUS, 0)
    try:
        fcntl.ioctl(descriptor, _GET_INFO, info)
    except OSError:
        return -1
    mask, status = _INFO.unpack_from(info)
    return int(status) if mask & _HAS_STATUS else None
