"""One start of a job: its launcher, its ranks, and how it ends."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from mpidist.cli.run.ranks import SeenRanks
from mpidist.cli.run.rules import DIED, JobOutcome
from mpidist.cli.run.sweep import end_processes, remove_files
from mpidist.failures.job_directory import VARIABLE as JOB_DIRECTORY
from mpidist.failures.restart.notes import FAILED, FINISHED, VARIABLE, Word, make_folder, read_lines, read_word

# The launcher ends the others when a rank has died. One that does not, for instance since it waits for a lost host, is
# ended after this time.
_PATIENCE_SECONDS = 6.0
# After this time, and then again and again, it is looked whether ranks that have not signed are there at all.
_MISSING_SECONDS = 3.0
# Codes of a Python program, or of a shell's, that failed before it came to `import mpidist`; no launcher was seen to
# end with one of them after a kill.
_CODES_OF_ERRORS = (0, 1, 2)
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def adopt_orphans() -> None:
    """Local. Make processes whose parents end children of this one, as long as they are descendants of it."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


class Signals:
    """The signals by which this process is told to end the job; it hands them on, and does not end by them."""

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self.came: list[int] = []
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        for number in self.numbers:
            # A shell lets what it starts in the background ignore SIGINT, and `nohup` SIGHUP.
            if signal.getsignal(number) != signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._take)
        return self

    def _take(self, number: int, _: FrameType | None) -> None:
        # No terminal of theirs has gone.
        self.came.append(signal.SIGTERM if number == signal.SIGHUP else number)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)


class JobStart:
    """One start of a job.

    Args:
        line: The words of the launcher and the program.
        folder: The folder of this start, which does not exist yet.
        signals: The signals that this process gets.
        tick: Seconds between two looks at the folder.
        on_event: A function that is called with each event that the ranks note.
        is_here: Whether all ranks are on this host.
        is_shared: Whether the folder is in a directory that the user has chosen for files of jobs, or Slurm has.

    Raises:
        OSError: The folder cannot be made.
    """

    def __init__(
        self, line: Sequence[str], folder: Path, signals: Signals, tick: float,
        on_event: Callable[[Mapping[str, Any]], None], *, is_here: bool = True, is_shared: bool = False,
    ) -> None:
        self._is_here = is_here
        # What ranks leave there when they are killed goes with the folder.
        self._variables = {JOB_DIRECTORY: str(folder)} if is_shared else {}
        self._line, self._folder, self._signals, self._tick, self._on_event = line, folder, signals, tick, on_event
        make_folder(folder)
        self.ranks = SeenRanks(folder)
        self.ended = 0.0
        self._position = 0
        self._events: list[Mapping[str, Any]] = []
        self._passed: list[int] = []
        self._has_killed = False
        # Files of dead ranks in /dev/shm, for the next one to remove beside its own start.
        self.left: set[str] = set()
        self._counted = time.monotonic()

    def run(self, left: Iterable[str] = ()) -> JobOutcome:
        """Local. Start the job, and wait until it has ended and no process of it is left on this host.

        Args:
            left: The files in /dev/shm that the ranks of an earlier start have left.

        Raises:
            OSError: The launcher cannot be started.
        """
        if self._signals.came:
            # The job before it was ended by it, or has ended before it came.
            return JobOutcome(DIED, 128 + self._signals.came[0], "", was_told_to_end=self._signals.came[0])
        # In a session of its own: a terminal's Ctrl-C must not reach the ranks a second time.
        launcher = subprocess.Popen(
            self._line, env={**os.environ, VARIABLE: str(self._folder), **self._variables}, start_new_session=True,
            preexec_fn=_end_with_parent,  # noqa: PLW1509  # this process has no other threads
        )
        try:
            remove_files(left)
            self._wait(launcher)
        finally:
            self._has_killed = launcher.poll() is None
            launcher.kill()
            launcher.wait()
            self._look()
            # Before others are ended: what they do then is no news.
            dead = self.ranks.dead()
            self.ended = dead[0].ended or time.time() if dead else time.time()
            # What a program that has finished leaves behind may be meant to stay.
            is_over = launcher.returncode == 0 and (word := self._word()) is not None and word.kind == FINISHED
            is_clean = is_over or end_processes(self._folder, owns_children=True)
        self.ranks.wait(0)
        outcome = self._judge(launcher.returncode)
        self.left = self.ranks.mapped_here()
        self.ranks.close()
        if not is_clean:
            text = f"{outcome.text}; a process of it does not end, and the job cannot be started beside it"
            return outcome._replace(kind=FAILED if outcome.kind == DIED else outcome.kind, text=text)
        return outcome

    def _wait(self, launcher: subprocess.Popen[bytes]) -> None:
        """Wait until the launcher has ended, or is to be ended."""
        looked = 0.0
        while launcher.poll() is None:
            if time.monotonic() - looked >= self._tick:
                looked = time.monotonic()
                if self._is_over(launcher.pid):
                    return
            while len(self._passed) < len(self._signals.came):
                number = self._signals.came[len(self._passed)]
                self._passed.append(number)
                if len(self._passed) > 2:
                    return  # Who asks a third time does not want to wait.
                # A rank that was interrupted tells the others; one that is ended ends them.
                if not self.ranks.send(number):
                    launcher.send_signal(signal.SIGTERM)
            self.ranks.wait(min(self._tick, 0.02))

    def _is_over(self, launcher: int) -> bool:
        """Look around; whether a rank has died long ago, and the launcher does not end the others."""
        self._look()
        self._bury(launcher)
        if self._is_here and time.monotonic() - self._counted > _MISSING_SECONDS:
            self._counted = time.monotonic()
            self.ranks.find_missing()
        dead = self.ranks.dead()
        return bool(dead) and time.time() - (dead[0].ended or 0) > _PATIENCE_SECONDS and self._word() is None

    def _bury(self, launcher: int) -> None:
        """Take the exit codes of processes whose parents have ended, which are children of this process now."""
        with contextlib.suppress(ChildProcessError):
            while True:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if ended is None or ended.si_pid == launcher:
                    return
                os.waitpid(ended.si_pid, os.WNOHANG)

    def _look(self) -> None:
        self.ranks.look()
        news, self._position = read_lines(self._folder / "events", self._position)
        self._events += news
        for event in news or [{"event": "none"}]:
            self._on_event(event)

    def _word(self) -> Word | None:
        with contextlib.suppress(OSError):
            return read_word(self._folder)
        return None

    def _judge(self, code: int) -> JobOutcome:
        """The end of the job; `code` is the launcher's, which counts only where no rank has signed."""
        word, told = self._word(), self._passed[0] if self._passed else 0
        events = [event["event"] for event in self._events]
        saved = {"has_saved": "saved" in events, "knows_saves": bool({"saved", "restored"} & {*events})}
        if word is not None and word.kind == FINISHED and not self.ranks.dead(word.time):
            codes = [rank.left for rank in self.ranks.by_number.values() if rank.left]
            return JobOutcome(FINISHED, word.code or (codes[0] if codes else 0), "", **saved)
        if word is not None and word.kind != FINISHED:
            return JobOutcome(word.kind, word.code or 1, (word.text.splitlines() or [""])[-1], **saved)
        if told:
            return JobOutcome(DIED, 128 + told, "", was_told_to_end=told, **saved)
        if 0 not in self.ranks.by_number and code in _CODES_OF_ERRORS:
            text = f"{self._line[0]} ended with {code} before rank 0 had reached `import mpidist`"
            if not self._is_here:
                text += (
                    f", or rank 0 does not see {self._folder.parent}. In the second case set {JOB_DIRECTORY} to a "
                    "directory that all hosts share"
                )
            return JobOutcome(FAILED, code or 1, text, **saved)
        return JobOutcome(DIED, 1, self._how(code), **saved)

    def _how(self, code: int) -> str:
        if code < 0 and not self._has_killed:
            return f"the launcher {self._line[0]} was ended by {signal.Signals(-code).name}"
        hung = next((event for event in self._events if event["event"] == "hung"), None)
        if hung is not None and hung.get("rank") in self.ranks.by_number:
            return f"{self.ranks.by_number[hung['rank']].name} has reported that the ranks wait without end"
        dead = self.ranks.dead()
        told = next((event["name"] for event in self._events if event["event"] == "died"), "")
        if told and not self._is_here:
            return f"{told} died"
        if dead:
            how = dead[0].how
            between = " of" if how.startswith("signal") else " with" if how.startswith("exit") else ""
            first = "" if self._is_here else ", the first one that is seen from here"
            return f"{dead[0].name} died{between} {how}".rstrip() + first
        return f"{told} died" if told else f"a rank or a host was lost ({self._line[0]} ended with {code})"
