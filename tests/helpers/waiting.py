"""Waits for what happens in another process, for tests and for their programs: `until_waits_in(1, "barrier")`.

A rank shows in its page in which calls it is (`mpidist/recorder/rank_page.py`), and its watchdog shows there that it
looks.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mpidist.failures.peers import Peer
from mpidist.failures.startup.ranks import PAGE_NAME
from mpidist.failures.watchdog import WATCHDOG
from mpidist.recorder.calls import CODES, IDENTITY, NEXT, PLACE_WORDS, STATE, may_have_one_name
from mpidist.recorder.rank_page import PAGE_BYTES, Page
from tests.helpers import stuck
from tests.helpers.limits import limit
from tests.helpers.processes import descendants, environment_of, state_of

# Between two looks, at first and in a long wait. A look costs up to five milliseconds of a core that others need.
_LOOK_SECONDS = 0.01
_LONG_LOOK_SECONDS = 0.05
_RANK_VARIABLES = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK")


def until(
    condition: Callable[[], object], what: str = "", *, job: subprocess.Popen[Any] | None = None, seconds: float = 60
) -> None:
    """Wait until a condition holds.

    Args:
        condition: Asked again and again.
        what: For the error.
        job: Whose end ends the wait.
        seconds: A limit, as `tests.helpers.limits` has it.

    Raises:
        AssertionError: It does not hold, and the job has ended, or the limit is over.
        OutsideError: It was proved why, and that is no matter of mpidist.
    """
    end = time.monotonic() + limit(seconds)
    pause = _LOOK_SECONDS
    while not condition():
        # What the job did last may be what is waited for.
        if job is not None and job.poll() is not None and not condition():
            rest = _rest(job)
            stuck.require_launcher(job, rest)
            raise AssertionError(f"the job has ended with {job.returncode}, before {what or condition}\n{rest}")
        if time.monotonic() > end:
            seen, kind = ("", AssertionError) if job is None else stuck.examine(job)
            raise kind(f"after {limit(seconds):.0f} s still not {what or condition}\n{seen}")
        time.sleep(pause)
        pause = min(1.05 * pause, _LONG_LOOK_SECONDS)


def until_exists(*paths: Path | str, job: subprocess.Popen[Any] | None = None, seconds: float = 60) -> None:
    """Wait until there are files; see `until`. Where their text counts, they must come by `os.replace`."""
    for path in map(Path, paths):
        until(path.exists, f"there is {path}", job=job, seconds=seconds)


def until_state(process: int, states: str) -> None:
    """Wait until a process is in one of these states of `man 5 proc`; "X" if it is gone."""
    until(lambda: state_of(process) in states, f"process {process} is in {states}")


def until_waits_in(rank: int, *calls: str, job: subprocess.Popen[Any] | None = None) -> None:
    """Wait until a rank waits in a call, and so is behind all that it does before.

    Args:
        rank: In a program of a test a rank of its first communicator; with `job` a rank of that.
        *calls: Names, as a report of the watchdog has them: "barrier", "all_reduce"; any of these. None: in any call.
        job: The job, outside it.
    """
    until_process_waits_in(process_of(rank, job), *calls, job=job)


def until_process_waits_in(process: int, *calls: str, job: subprocess.Popen[Any] | None = None) -> None:
    """Wait until a process waits in a call, on any communicator.

    It does where its watchdog has looked twice while it was in one call: whatever comes before MPI is done by then.
    """
    # A state also says which call of that name it is.
    codes = [CODES[name] for name in calls]
    seen: dict[int, tuple[int, int, int]] = {}

    def waits() -> bool:
        page = page_of(process)
        if page is None:
            return False
        beat = page.beat
        for place in range(0, len(page.places), PLACE_WORDS):
            state = page.places[place + STATE]
            is_meant = not codes or any(may_have_one_name(code, state % NEXT) for code in codes)
            if not page.places[place + IDENTITY] or not state % NEXT or not is_meant:
                seen.pop(place, None)
                continue
            before, last, looks = seen.get(place, (0, beat, 0))
            seen[place] = state, beat, (looks + (beat != last) if before == state else 0)
            if seen[place][2] >= 2:
                return True
        return False

    with contextlib.closing(_PAGES):
        until(waits, f"process {process} waits in {' or '.join(calls) or 'a call'}", job=job)


def until_has_ended(rank: int) -> None:
    """In a program of a test: wait until the program of another rank has ended."""
    peer = _peer(rank)
    until(peer.has_ended, f"rank {rank} has ended")


def until_has_died(rank: int) -> None:
    """In a program of a test: wait until the process of another rank has died."""
    peer = _peer(rank)
    until(peer.has_died, f"rank {rank} has died")


def let_pass(seconds: float) -> None:
    """Let so much time pass, at least: longer than a time that what is tested counts. No rank may wait so for another.
    """
    threading.Event().wait(seconds)


def process_of(rank: int, job: subprocess.Popen[Any] | int | None = None) -> int:
    """The process of a rank.

    Args:
        rank: In the first communicator.
        job: That a test has started, or the number of a process that has started all ranks; None: this program's job.
    """
    if job is None:
        return _peer(rank).key.number
    starter, process = (job, None) if isinstance(job, int) else (job.pid, job)
    until(lambda: _process_in(starter, rank), f"rank {rank} has begun", job=process)
    return _process_in(starter, rank)


def page_of(process: int) -> Page | None:
    """The page of a process of this machine, to read; None where it has none yet, or has ended."""
    return _PAGES.page_of(process)


class _Pages:
    """The pages that are being read: they are found once, by the descriptor that each rank keeps."""

    def __init__(self) -> None:
        self._open: dict[int, Page] = {}

    def page_of(self, process: int) -> Page | None:
        with contextlib.suppress(OSError):
            if process not in self._open and (path := _page_file(process)) is not None:
                descriptor = os.open(path, os.O_RDONLY)
                try:
                    self._open[process] = Page(memoryview(mmap.mmap(descriptor, PAGE_BYTES, prot=mmap.PROT_READ)))
                finally:
                    os.close(descriptor)
        return self._open.get(process)

    def close(self) -> None:
        self._open.clear()


_PAGES = _Pages()


def _peer(rank: int) -> Peer:
    (found,) = (peer for peer in WATCHDOG.peers() if peer.order == rank and not peer.is_far)
    return found


def _page_file(process: int) -> Path | None:
    for path in Path(f"/proc/{process}/fd").iterdir():
        with contextlib.suppress(OSError):
            # A page that is being made is empty.
            if PAGE_NAME in str(path.readlink()) and path.stat().st_size >= PAGE_BYTES:
                return path
    return None


def _process_in(starter: int, rank: int) -> int:
    """The process of a rank among those that a process has started, 0 if it has none yet."""
    wanted = {f"{name}={rank}" for name in _RANK_VARIABLES}
    for process in descendants(starter):
        with contextlib.suppress(OSError):
            if wanted & {*environment_of(process)} and _page_file(process) is not None:
                return process
    return 0


def _rest(job: subprocess.Popen[Any]) -> str:
    """What a job has written that nobody has read."""
    streams = [stream for stream in (job.stdout, job.stderr) if stream is not None and not stream.closed]
    return "\n".join(str(stream.read()) for stream in streams)
