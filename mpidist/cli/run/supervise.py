"""The loop of `mpidist run`: start, wait, clean, and start again."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpidist.cli.run.hosts import Crew
from mpidist.cli.run.rules import DIED, JobOutcome, RestartRules
from mpidist.cli.run.start import JobStart, Signals, adopt_orphans
from mpidist.cli.run.sweep import (
    is_unlocked,
    names_noted,
    processes_of,
    remove_copies,
    remove_files,
    remove_stale_copies,
)
from mpidist.errors import LauncherError, UnavailableError
from mpidist.failures.job_directory import VARIABLE as JOB_DIRECTORY
from mpidist.failures.job_directory import wanted
from mpidist.observe.output import say

# The code with which a program asks to be queued again; see `TerminationConfig`.
REQUEUE = 42
_PREFIX = ".mpidist-run-"
# As in `checkpoint/memory/place.py`, which loads more than `run` needs.
_HAS_COPIES = "has-copies"
# A look at a folder of this host is a system call; at one of a file server, work for that.
_HERE_SECONDS, _SHARED_SECONDS = 0.02, 0.5
# Whose ranks have come together, and restore nothing for so long, continues without a checkpoint.
_QUIET_SECONDS = 10.0


class RunFolder:
    """The folder of this run, in the directory of jobs; it is removed at the end of the run.

    Attributes:
        folder: The folder, absolute.
        is_shared: Whether it is in a directory that hosts may share.

    Raises:
        LauncherError: It cannot be made.
    """

    def __init__(self) -> None:
        directory = wanted()
        self.is_shared = bool(directory)
        base = Path(directory or tempfile.gettempdir()).absolute()
        begin = f"{_PREFIX}{socket.gethostname()}-"
        try:
            _remove_stale(base, begin)
            # By another name until it is locked: else another run might take it for a dead one's.
            made = Path(tempfile.mkdtemp(prefix=".mpidist-new-", dir=base))
            self._lock = os.open(made / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            with contextlib.suppress(OSError):
                fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.folder = made.rename(base / f"{begin}{uuid.uuid4().hex[:12]}")
        except OSError as error:
            raise LauncherError(
                f"`mpidist run` cannot make its folder in {str(base)!r}: {error.strerror or error}. Set "
                f"{JOB_DIRECTORY} to a directory that all hosts share, with some free space"
            ) from None

    def close(self) -> None:
        """Local. Remove it, and the copies in the memory of this host."""
        remove_copies(self.folder)
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)


def _remove_stale(base: Path, begin: str) -> None:
    """Remove what dead runs of this user on this host have left."""
    for folder in base.glob(f"{begin}*"):
        with contextlib.suppress(OSError):
            if folder.lstat().st_uid != os.getuid() or not is_unlocked(folder / "lock"):
                continue
            starts = [one for one in folder.iterdir() if one.is_dir()]
            # Its job may live on where the run alone was killed.
            if any(map(processes_of, starts)):
                continue
            for start in starts:
                remove_files(names_noted(start, socket.gethostname()))
            shutil.rmtree(folder, ignore_errors=True)
    remove_stale_copies()


@dataclass
class _News:
    """The line about a restart, once it is known from where the job continues.

    Attributes:
        outcome: The end before it.
        since: The time of that end, in seconds since 1970.
        number: The number of the restart, and the largest one.
        hosts: What was done about lost hosts.
        is_told: Whether it was printed.
        opened: The seconds from that end to the first communicator of the new start.
    """

    outcome: JobOutcome
    since: float
    number: tuple[int, int]
    hosts: str = ""
    is_told: bool = False
    opened: float | None = None

    def take(self, event: Mapping[str, Any]) -> None:
        """Print the line when an event says where the job continues, or when none has said so for long."""
        passed = float(event.get("time", time.time())) - self.since
        if event["event"] == "restored" and event["path"]:
            step = event.get("step")
            at = "" if step is None else f", step {step}"
            self.tell(f"the job continues from {event['path']}{at}, after {passed:.1f} s")
        elif event["event"] in ("restored", "saved"):
            self.tell(f"the job continues from the beginning, after {passed:.1f} s")
        elif event["event"] == "opened":
            self.opened = passed
        elif self.opened is not None and passed > self.opened + _QUIET_SECONDS:
            self.tell(f"the job continues, and has restored nothing, after {self.opened:.1f} s")

    def tell(self, text: str) -> None:
        """Print it, once."""
        if not self.is_told:
            self.is_told = True
            number, most = self.number
            say(f"restart {number} of at most {most}: {self.outcome.text}{self.hosts}; {text}")


@dataclass
class Supervision:
    """A job that is started again.

    Attributes:
        crew: Its hosts.
        program: The words of the program.
        rules: The rules of restarts.
        min_ranks: The number of ranks with which it may continue after a host was lost; None: all.
    """

    crew: Crew
    program: Sequence[str]
    rules: RestartRules
    min_ranks: int | None = None

    def run(self) -> int:
        """Local. Run the job to its end. Returns the exit code.

        Raises:
            LauncherError, UnavailableError: No files can be exchanged with the ranks; or this MPI cannot be launched
                so.
        """
        adopt_orphans()
        home = RunFolder()
        try:
            with Signals() as signals:
                return self._run(home, signals)
        finally:
            self._remove_copies(home)
            home.close()

    def _remove_copies(self, home: RunFolder) -> None:
        """Remove the copies in the memory of other hosts, if there are any; a lost one removes them later."""
        if len(self.crew.names) > 1 and (home.folder / _HAS_COPIES).exists():
            with contextlib.suppress(OSError, LauncherError, UnavailableError):
                self.crew.ask(home.folder / "end", is_end=True)

    def _run(self, home: RunFolder, signals: Signals) -> int:
        tick = _SHARED_SECONDS if home.is_shared and len(self.crew.names) > 1 else _HERE_SECONDS
        # Whether they see the folder is better known now than after hours.
        if len(self.crew.names) > 1 and not self._is_ready(home.folder / "0", "it has not started"):
            return 1
        news: _News | None = None
        left: set[str] = set()
        while True:
            folder = home.folder / str(self.rules.restarts)
            take = _ignore if news is None else news.take
            start = JobStart(
                self.crew.line(self.program), folder, signals, tick, take, is_here=not self.crew.names,
                is_shared=home.is_shared,
            )
            outcome = start.run(left)
            left = start.left
            if news is not None:
                news.tell("it reached no checkpoint" if outcome.kind == DIED else "the job began again")
            why_not = self.rules.why_not(outcome)
            if why_not is not None:
                remove_files(left)
                _tell_end(outcome, why_not, has_signed=bool(start.ranks.by_number))
                return outcome.code
            before = self.crew
            if len(before.names) > 1 and not self._is_ready(folder, outcome.text):
                return REQUEUE
            # The word and the notes of the one before are of no use any more.
            shutil.rmtree(folder, ignore_errors=True)
            number = self.rules.restarts, self.rules.max_restarts
            news = _News(outcome, start.ended, number, _changes(before, self.crew))

    def _is_ready(self, folder: Path, text: str) -> bool:
        """Ask all hosts, and leave out the lost ones; False where too few are left."""
        lost = self.crew.ask(folder)
        if not lost:
            return True
        crew = self.crew.without(lost, self.min_ranks)
        if crew is None:
            say(
                f"the job ends: {text}; {', '.join(lost)} did not answer, and too few hosts are left. --min-ranks lets "
                "it continue with fewer ranks"
            )
            return False
        self.crew = crew
        return True


def _ignore(_: Mapping[str, Any]) -> None:
    """Print nothing about the first start."""


def _tell_end(outcome: JobOutcome, why_not: str, *, has_signed: bool) -> None:
    """Say why the job is not started again, unless its ranks have said all of it."""
    if outcome.kind == DIED and why_not:
        say(f"the job ends: {outcome.text}; {why_not}")
    elif why_not or (outcome.text and not has_signed):
        say(f"the job ends: {why_not or outcome.text}")


def _changes(before: Crew, after: Crew) -> str:
    lost = sorted(after.lost - before.lost)
    fewer = f", with {after.ranks} ranks" if after.ranks != before.ranks else ""
    return f"; {', '.join(lost)} did not answer and is left out{fewer}" if lost else ""
