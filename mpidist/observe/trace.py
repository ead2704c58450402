"""The timeline of a job: `MPIDIST_TRACE=DIR` writes what each rank did when, in the Trace Event Format (Perfetto).

Each rank writes a file of its own, line by line. At the end the first rank puts them together in `DIR/timeline.json`,
and prints which rank waited for which, and how long. After a job that ended badly `python -m mpidist.observe.trace DIR`
does so. `mpidist trace DIR` says where the time of each rank went.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from threading import get_ident
from typing import Any, TextIO, TypeVar

from mpidist import launch
from mpidist.observe.output import say

VARIABLE = "MPIDIST_TRACE"
TIMELINE = "timeline.json"
# The name of the reads of batches.
INPUT = "input"
# Seconds between two writes of lines to the file; the last write is at the end.
_WRITE_SECONDS = 1.0
# The number of notes of which lines are made at once. One by one each takes twice as long, since the program's work has
# the caches in between; all of a second at once would let the other ranks wait.
_AT_ONCE = 128
# Waits below this are not worth a line.
_SHOWN_SECONDS = 0.001
# The number for closures and input: no rank waits in them for another one.
NO_COMMUNICATOR = 0

T = TypeVar("T")

# A text in JSON.
_quoted = functools.lru_cache(1024)(json.dumps)


class Trace:
    """The timeline of this process. There is one object of a process, `TRACE`.

    Attributes:
        folder: The folder to which it is written; None where no timeline is wanted.
    """

    def __init__(self) -> None:
        name = os.environ.get(VARIABLE)
        self.folder = Path(name) if name else None
        # Threads add notes while one of them takes them out.
        self._notes: deque[tuple[str, int, int, int, int, str, int, int, int, int | None]] = deque()
        self._lines: list[str] = []
        self._file: TextIO | None = None
        self._written = 0
        self._process = os.getpid()
        # Read once: a launcher's variables are many, and a call is noted in microseconds.
        self._rank: int | None = None
        # A monotonic clock, common to all processes of a host.
        self._offset = time.time_ns() - time.perf_counter_ns()

    def now(self) -> int:
        """Local. The time in nanoseconds since 1970."""
        return time.perf_counter_ns() + self._offset

    def add(  # noqa: PLR0913  # what a line says
        self, name: str, begin: int, *, thread: int, size: int = 0, where: str = "", depth: int = 0,
        communicator: int = NO_COMMUNICATOR, number: int = 0, attempt: int | None = None,
    ) -> None:
        """Local. Note a call that has ended now.

        Args:
            name: Its name.
            begin: The time at which it began, as `now` gives it.
            thread: Where it ran.
            size: The bytes of its array; 0 where that is not known.
            where: The line of the program; empty where that is not known.
            depth: The number of calls in which it was made.
            communicator: The number of its communicator.
            number: Its number there, or that of a closure.
            attempt: How often a closure was given to a worker.
        """
        end = self.now()
        self._notes.append((name, size, begin, end, thread, where, depth, communicator, number, attempt))
        if len(self._notes) >= _AT_ONCE or end - self._written > _WRITE_SECONDS * 1e9:
            self._make_lines()
            if end - self._written > _WRITE_SECONDS * 1e9:
                self.write()

    def _make_lines(self) -> None:
        """Local. Put what was noted into words."""
        if self._rank is None:
            self._rank = launch.world_rank()
        # Not by `json.dumps`, which takes as long as all the rest: only texts need it, and most are those of before.
        with contextlib.suppress(IndexError):
            while True:
                name, size, begin, end, thread, where, depth, communicator, number, attempt = self._notes.popleft()
                more = "" if attempt is None else f', "attempt": {attempt}'
                self._lines.append(
                    f'{{"rank": {self._rank}, "name": {_quoted(name)}, "bytes": {size}, "begin": {begin}, '
                    f'"end": {end}, "where": {_quoted(where)}, "thread": {thread}, "depth": {depth}, '
                    f'"communicator": {communicator}, "number": {number}{more}}}\n'
                )

    def add_closure(self, function: str, begin: int, thread: int, *, number: int, attempt: int) -> None:
        """Local. Note a closure that has ended, on its worker.

        Args:
            function: The name of its function.
            begin: The time at which it began, as `now` returns it.
            thread: The thread in which it ran.
            number: The number of the closure.
            attempt: How often it was given to a worker.
        """
        self.add(function, begin, thread=thread, number=number, attempt=attempt)

    def timed(self, name: str, function: Callable[[], T]) -> Callable[[], T]:
        """Local. Give the function, each of whose calls is noted; the function itself where no timeline is wanted.

        Args:
            name: A name for the timeline.
            function: The function, which communicates with nobody.
        """
        if self.folder is None:
            return function

        def noted() -> T:
            begin = self.now()
            try:
                return function()
            finally:
                self.add(name, begin, thread=get_ident())

        return noted

    def write(self) -> None:
        """Local. Write what was noted since the last time."""
        # A child, forked or not, has no part in the timeline, though it inherits the variable.
        self._make_lines()
        if self.folder is None or not self._lines or os.getpid() != self._process:
            return
        self._written = self.now()
        lines, self._lines = self._lines, []
        try:
            if self._file is None:
                self.folder.mkdir(parents=True, exist_ok=True)
                path = self.folder / f"rank-{launch.world_rank()}.jsonl"
                self._file = open(path, "w")  # noqa: SIM115 - until the end
            self._file.writelines(lines)
            self._file.flush()
        except OSError as error:
            # A full disk must not end the training.
            say(f"{VARIABLE}={self.folder}: the timeline of rank {launch.world_rank()} ends here: {error}")
            self.folder = None
            if self._file is not None:
                with contextlib.suppress(OSError):
                    self._file.close()

    def finish(self) -> None:
        """Local. On the first rank, when all ranks have written: merge the timelines, and print which ranks waited."""
        is_open = self._file is not None and os.getpid() == self._process
        if self.folder is not None and is_open and launch.world_rank() == 0:
            with contextlib.suppress(OSError, ValueError):
                os.write(2, f"{join(self.folder)}\n".encode())


def join(folder: Path) -> str:
    """Local. Put the timelines of all ranks together.

    Args:
        folder: The folder with their files.

    Returns:
        Lines about which rank waited for which, and how long.

    Raises:
        ValueError: There is no call of any rank.
        OSError: A file cannot be read or written.
    """
    events = []
    for path in sorted(folder.glob("rank-*.jsonl")):
        with open(path) as file:
            for line in file:
                # The last line of a rank that was killed may be half a line.
                with contextlib.suppress(ValueError):
                    events.append(json.loads(line))
    if not events:
        raise no_calls(folder)
    shown: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}}
        for rank in sorted({event["rank"] for event in events})
    ]
    shown += [
        {
            "name": event["name"], "cat": "mpidist", "ph": "X", "pid": event["rank"], "tid": event["thread"],
            "ts": event["begin"] / 1e3, "dur": (event["end"] - event["begin"]) / 1e3,
            "args": {name: event[name] for name in ("number", "attempt", "bytes", "where") if name in event},
        }
        for event in events
    ]
    (folder / TIMELINE).write_text(json.dumps({"traceEvents": shown, "displayTimeUnit": "ms"}))
    return "\n".join([f"mpidist: the timeline is {folder / TIMELINE} (https://ui.perfetto.dev)", *_waits(events)])


def no_calls(folder: Path) -> ValueError:
    """Local. The error for a folder without a timeline."""
    return ValueError(
        f"{folder} has no calls of ranks: expected files rank-0.jsonl, ... with lines in them. Run the program with "
        f"{VARIABLE}={folder}"
    )


def _waits(events: Iterable[dict[str, Any]]) -> list[str]:
    # By name, too: calls that open communicators all have one number.
    calls: dict[tuple[int, int, str], list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event["depth"] == 0 and event["communicator"] != NO_COMMUNICATOR:
            calls[event["communicator"], event["number"], event["name"]].append(event)
    waited: dict[int, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for meeting in calls.values():
        last = max(meeting, key=lambda event: event["begin"])
        for event in meeting:
            seconds = (min(event["end"], last["begin"]) - event["begin"]) / 1e9
            if event["rank"] != last["rank"] and seconds > 0:
                waited[event["rank"]][last["rank"]] += seconds
    lines = []
    for rank, others in sorted(waited.items()):
        listed = ", ".join(
            f"{seconds:.3f} s for rank {other}"
            for other, seconds in sorted(others.items(), key=lambda item: -item[1]) if seconds >= _SHOWN_SECONDS
        )
        if listed:
            lines.append(f"  rank {rank} waited {listed}")
    return lines or ["  no rank waited for another one"]


TRACE = Trace()


def main(words: Sequence[str]) -> int:
    """Local. Put the timeline of a job that ended badly together.

    Args:
        words: The folder.

    Returns:
        The exit code.
    """
    if len(words) != 1:
        sys.stderr.write("usage: python -m mpidist.observe.trace DIR\n")
        return 2
    try:
        sys.stdout.write(f"{join(Path(words[0]))}\n")
    except (OSError, ValueError) as error:
        sys.stderr.write(f"Error: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
