"""Children that a rank forks while it handles signals of the job's end: workers of a data loader, of a Pool.

Launchers send a signal to all processes of a rank's group (Hydra and PRRTE by `killpg`), which would end the children,
and with them the step that a notice leaves time for. So such a child gets a group of its own, and ignores the signals.
It gets in another way what its rank would have shared with it: it ends with the rank, and is interrupted with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import threading
from collections.abc import Iterable
from pathlib import Path

from mpidist.failures.deaths import WATCH

_PR_SET_PDEATHSIG = 1
# The size of a process number in the pipe: less than a page is written at once.
_NUMBER_BYTES = 8
_READ_BYTES = 1 << 16
# Where the kernel has no process descriptors, a child looks so often whether its parent lives.
_LOOK_SECONDS = 1.0


class Children:
    """The children of this process that have a group of their own. There is one object of a process, `CHILDREN`."""

    def __init__(self) -> None:
        self._process = 0
        self._main_thread = 0
        self._reader = self._writer = -1
        self._known: list[int] = []
        self._libc: ctypes.CDLL | None = None

    def begin(self) -> None:
        """Local. Be ready for forks; called by the main thread, and once counts."""
        if self._process == os.getpid():
            return
        self._process, self._main_thread = os.getpid(), threading.get_ident()
        # A child that is being made can load nothing any more.
        self._libc = ctypes.CDLL(None)
        # No descriptor left: the children go without Ctrl-C, and end with the rank all the same.
        with contextlib.suppress(OSError):
            self._reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        # A terminal sends it to the group of the rank alone. `hear` gets it, whatever handler the program has.
        WATCH.hear(signal.SIGINT, self.interrupt)

    def separate(self, ignored: Iterable[int]) -> None:
        """Local. In a child at its start: leave the group of the rank, and end with it.

        Args:
            ignored: The signals that the child ignores from now on.
        """
        parent, self._process = self._process, 0
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)
        # First: until it has left the group the terminal's interrupt reaches it.
        with contextlib.suppress(OSError):
            os.write(self._writer, os.getpid().to_bytes(_NUMBER_BYTES, "little"))
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)
        for descriptor in (self._reader, self._writer):
            with contextlib.suppress(OSError):
                os.close(descriptor)
        self._reader = self._writer = -1
        self._known = []
        # The kernel's signal comes when the thread that has forked ends; the main one ends with the process.
        if self._libc is None or threading.get_ident() != self._main_thread or self._libc.prctl(
            _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0
        ):
            self._follow(parent)
        elif os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)

    def _follow(self, parent: int) -> None:
        try:
            descriptor = os.pidfd_open(parent)
        except OSError:
            descriptor = -1
        # Without a thread it outlives the rank, as without us.
        with contextlib.suppress(RuntimeError):
            threading.Thread(target=_end_with, args=(parent, descriptor), name="mpidist-parent", daemon=True).start()

    def take(self) -> None:
        """Local. Note children that have separated; a fork calls it, so that the pipe is never full."""
        with contextlib.suppress(OSError):
            while data := os.read(self._reader, _READ_BYTES):
                begins = range(0, len(data), _NUMBER_BYTES)
                self._known += [int.from_bytes(data[begin : begin + _NUMBER_BYTES], "little") for begin in begins]
        if len(self._known) > _READ_BYTES // _NUMBER_BYTES:
            self._known = self.living()

    def living(self) -> list[int]:
        """Local. The children that have a group of their own, by their numbers, which are those of the groups."""
        return [child for child in self._known if _family(child) == (self._process, child)]

    def interrupt(self) -> None:
        """Local. Pass an interrupt to the children; called in a background thread."""
        self.take()
        for child in self.living():
            with contextlib.suppress(OSError):
                os.killpg(child, signal.SIGINT)


def _end_with(parent: int, descriptor: int) -> None:
    """End this process when its parent ends. The descriptor is of that process only if it still is the parent."""
    poll = select.poll()
    if descriptor != -1:
        poll.register(descriptor, select.POLLIN)
    while os.getppid() == parent:
        poll.poll(None if descriptor != -1 else _LOOK_SECONDS * 1e3)
    os.kill(os.getpid(), signal.SIGKILL)


def _family(process: int) -> tuple[int, int]:
    """The parent and the group of a process; (0, 0) if it has ended."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0, 0
    return int(fields[1]), int(fields[2])


CHILDREN = Children()
