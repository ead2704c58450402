"""Marks: how processes of a test tell one another how far they are, also on several hosts, by files that all see."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from mpidist.comm.group.communicator import Communicator
from mpidist.recorder.calls import NEXT
from tests.helpers.waiting import until, until_exists

# Ends a process whose test was killed.
_MOST_SECONDS = 3600.0


def put(path: Path | str, text: object = "") -> None:
    """Make a file that has its text as soon as it is there."""
    new = Path(f"{path}.{os.getpid()}.new")
    new.write_text(str(text))
    new.replace(path)


def read(path: Path | str) -> str:
    """The text of a file, when it is there."""
    until_exists(path)
    return Path(path).read_text()


def stay() -> None:
    """Stay here until the process is ended from outside, and take signals meanwhile."""
    threading.Event().wait(_MOST_SECONDS)


def hold(path: Path | str) -> None:
    """Let others wait for the end of this process, however it comes, by `until_released`."""
    # Never closed: the kernel does that after the process's last instruction.
    descriptor = os.open(f"{path}.held", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    put(path)


def until_released(path: Path | str) -> None:
    """Wait until the process that has called `hold` has ended, on whichever host of this machine it was."""
    until_exists(path)
    with _opened(f"{path}.held") as descriptor:
        fcntl.flock(descriptor, fcntl.LOCK_SH)


@contextlib.contextmanager
def _opened(path: str) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def until_others_wait(communicator: Communicator, folder: Path | str, others: int) -> None:
    """Wait until so many ranks of any hosts wait in the call that this rank's next one on a communicator will meet.

    Args:
        communicator: The ranks.
        folder: What `MPIDIST_JOB_DIR` names; ranks that wait show that there.
        others: Their number.
    """
    calls = communicator.calls

    def waits(path: Path) -> bool:
        try:
            state = int(json.loads(path.read_text())["states"].get(str(calls.identity), 0))
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
            # It is being written, or tells of deaths.
            return False
        return state // NEXT == calls.number + 1 and state % NEXT != 0

    until(lambda: sum(map(waits, Path(folder).glob(".mpidist-*/*"))) >= others, f"{others} ranks wait")


def until_put(path: Path | str) -> Iterator[int]:
    """Numbers from 0 on, until a file is there; who is orphaned gets no more after a while."""
    end = time.monotonic() + _MOST_SECONDS
    for number in itertools.count():
        if Path(path).exists():
            return
        assert time.monotonic() < end, f"nobody has made {path}"
        yield number


@contextlib.contextmanager
def while_work_goes_on(path: Path | str, many: int = 10) -> Iterator[None]:
    """Leave the body only when the number in a file has grown so much since it began, which others do meanwhile."""
    first = int(read(path))
    try:
        yield
    finally:
        until(lambda: int(read(path)) >= first + many, f"the number in {path} has grown from {first} by {many}")
