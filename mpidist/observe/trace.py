"""The timeline of a job: `MPIDIST_TRACE=DIR` writes what each rank did when, in the Trace Event Format (Perfetto).

Each rank writes a file of its own, line by line. At the end the first rank puts them together in `DIR/timeline.json`,
and prints which rank waited for which, and how long. After a job that ended badly `python -m mpidist.observe.trace DIR`
does so.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TextIO

from mpidist import launch
from mpidist.observe.output import say

VARIABLE = "MPIDIST_TRACE"
TIMELINE = "timeline.json"
# Seconds between two writes of lines to the file; the last write is at the end.
_WRITE_SECONDS = 1.0
# Waits below this are not worth a line.
_SHOWN_SECONDS = 0.001
# The number for closures: no rank waits in them for another one.
_NO_COMMUNICATOR = 0


class Trace:
    """The timeline of this process. There is one object of a process, `TRACE`.

    Attributes:
        folder: Where it is written; None where no timeline is wanted.
    """

    def __init__(self) -> None:
        name = os.environ.get(VARIABLE)
        self.folder = Path(name) if name else None
        self._lines: list[str] = []
        self._file: TextIO | None = None
        self._written = 0.0
        self._process = os.getpid()
        # A monotonic clock, common to all processes of a host.
        self._offset = time.time_ns() - time.perf_counter_ns()

    def now(self) -> int:
        """Local. The time in nanoseconds since 1970."""
        return time.perf_counter_ns() + self._offset

    def add(self, **event: Any) -> None:
        """Local. Note a call that has ended."""
        self._lines.append(json.dumps({"rank": launch.world_rank(), **event}))
        if time.monotonic() - self._written > _WRITE_SECONDS:
            self.write()

    def add_closure(self, function: str, begin: int, thread: int, *, number: int, attempt: int) -> None:
        """Local. Note a closure that has ended, on its worker.

        Args:
            function: Its name.
            begin: The time.
            thread: Where it ran.
            number: The number of the closure.
            attempt: How often it was given to a worker.
        """
        self.add(
            name=function, bytes=0, begin=begin, end=self.now(), where="", thread=thread, depth=0,
            communicator=_NO_COMMUNICATOR, number=number, attempt=attempt,
        )

    def write(self) -> None:
        """Local. Write what was noted since the last time."""
        # A child, forked or not, has no part in the timeline, though it inherits the variable.
        if self.folder is None or not self._lines or os.getpid() != self._process:
            return
        self._written = time.monotonic()
        lines, self._lines = self._lines, []
        try:
            if self._file is None:
                self.folder.mkdir(parents=True, exist_ok=True)
                path = self.folder / f"rank-{launch.world_rank()}.jsonl"
                self._file = open(path, "w")  # noqa: SIM115 - until the end
            self._file.writelines(line + "\n" for line in lines)
            self._file.flush()
        except OSError as error:
            # A full disk must not end the training.
            say(f"{VARIABLE}={self.folder}: the timeline of rank {launch.world_rank()} ends here: {error}")
            self.folder = None
            if self._file is not None:
                with contextlib.suppress(OSError):
                    self._file.close()

    def finish(self) -> None:
        """Local. Once all ranks have written: the first one merges the timelines, and prints which ranks waited."""
        is_open = self._file is not None and os.getpid() == self._process
        if self.folder is not None and is_open and launch.world_rank() == 0:
            with contextlib.suppress(OSError):
                os.write(2, f"{join(self.folder)}\n".encode())


def join(folder: Path) -> str:
    """Local. Put the timelines of all ranks together.

    Args:
        folder: The one with their files.

    Returns:
        Lines about which rank waited for which, and how long.

    Raises:
        OSError: A file cannot be read or written.
    """
    events = []
    for path in sorted(folder.glob("rank-*.jsonl")):
        with open(path) as file:
            for line in file:
                # The last line of a rank that was killed may be half a line.
                with contextlib.suppress(ValueError):
                    events.append(json.loads(line))
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


def _waits(events: Iterable[dict[str, Any]]) -> list[str]:
    calls: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event["depth"] == 0 and event["communicator"] != _NO_COMMUNICATOR:
            calls[event["communicator"], event["number"]].append(event)
    waited: dict[int, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for meeting in calls.values():
        last = max(meeting, key=lambda event: event["begin"])
        for event in meeting:
            seconds = (min(event["end"], last["begin"]) - event["begin"]) / 1e9
            if event is not last and seconds > 0:
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

if __name__ == "__main__":
    sys.stdout.write(f"{join(Path(sys.argv[1]))}\n")
