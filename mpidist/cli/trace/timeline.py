"""A timeline as arrays: what `MPIDIST_TRACE` has written, read and sorted out.

Each rank has written its calls. A call of a communicator has a number there: all ranks' calls of that number and name
are one meeting, in which the ranks wait for the one that arrives last. Only calls of the main thread that are inside no
other one count: what runs in the background, beside the program, delays nobody until the program asks for it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mpidist.observe.trace import INPUT, NO_COMMUNICATOR, no_calls

Integers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

# What a rank does at a time. Where two apply, the one with the larger number counts.
COMPUTE, READING, COMMUNICATION, CHECKPOINT, WAITING = range(5)
KINDS = ("compute", "input", "communication", "checkpoint", "waiting")
_CHECKPOINT_CALLS = (
    "save", "restore", "restoring", "reading an optimizer's state", "reading a split variable",
    "looking for preemption",
)


@dataclass(frozen=True)
class Timeline:
    """Calls of all ranks, one in each place of the arrays; times are nanoseconds since the first one began.

    Attributes:
        ranks: The numbers of the ranks, ascending.
        names: The names of calls.
        places: The lines of programs.
        rank: The place in `ranks`.
        name: The place in `names`.
        place: The place in `places`.
        kind: One of the constants of this module.
        begin: When the call began.
        end: When it ended.
        size: Bytes of this rank's array; 0 where there is none.
        is_outer: Whether the call is in the main thread, and inside no other one.
        meeting: The number of the meeting; -1 where nobody waits.
        clipped: How many lines could not be read.
    """

    ranks: tuple[int, ...]
    names: tuple[str, ...]
    places: tuple[str, ...]
    rank: Integers
    name: Integers
    place: Integers
    kind: Integers
    begin: Integers
    end: Integers
    size: Integers
    is_outer: Flags
    meeting: Integers
    clipped: int

    def __len__(self) -> int:
        return len(self.begin)

    @property
    def last(self) -> int:
        """Local. The end of the last call."""
        return int(self.end.max())


class _Numbers(dict[Any, int]):
    """A number for each key, in the order of their coming."""

    def __missing__(self, key: Any) -> int:
        self[key] = number = len(self)
        return number


def read_timeline(folder: Path) -> Timeline:
    """Local. Read what all ranks have written.

    Args:
        folder: The folder of `MPIDIST_TRACE`.

    Returns:
        The calls, those of each rank in the order of their beginnings.

    Raises:
        ValueError: The folder has no call of any rank.
        OSError: A file cannot be read.
    """
    names, places, meetings, threads = _Numbers(), _Numbers(), _Numbers(), _Numbers()
    rows: list[tuple[int, ...]] = []
    clipped = 0
    for event in _events(folder):
        if event is None:
            clipped += 1
            continue
        is_meeting = event["communicator"] != NO_COMMUNICATOR and event["depth"] == 0
        rows.append((
            event["rank"], names[event["name"]], places[event["where"]], _kind_of(event), event["begin"], event["end"],
            event["bytes"], threads[event["rank"], event["thread"]],
            meetings[event["communicator"], event["number"], event["name"]] if is_meeting else -1,
        ))
    if not rows:
        raise no_calls(folder)
    table = np.array(rows, np.int64)
    # Of calls that begin at one time the longer one is the outer one.
    table = table[np.lexsort((-table[:, 5], table[:, 4], table[:, 0]))]
    ranks, rank = np.unique(table[:, 0], return_inverse=True)
    name, place, kind, begin, end, size, thread, meeting = table[:, 1:].T
    first = int(begin.min())
    is_outer = _are_outer(rank, thread, begin, end)
    return Timeline(
        tuple(int(one) for one in ranks), tuple(names), tuple(places), rank.astype(np.int64), name, place, kind,
        begin - first, end - first, size, is_outer, np.where(is_outer, meeting, -1), clipped,
    )


def _events(folder: Path) -> Iterator[dict[str, Any] | None]:
    for path in sorted(folder.glob("rank-*.jsonl")):
        with open(path) as file:
            for line in file:
                event = None
                # The last line of a rank that was killed may be half a line.
                with contextlib.suppress(ValueError):
                    event = json.loads(line)
                yield event


def _kind_of(event: dict[str, Any]) -> int:
    if event["communicator"] == NO_COMMUNICATOR:
        return READING if event["name"] == INPUT and "attempt" not in event else COMPUTE
    return CHECKPOINT if event["name"].startswith(_CHECKPOINT_CALLS) else COMMUNICATION


def _are_outer(rank: Integers, thread: Integers, begin: Integers, end: Integers) -> Flags:
    """The calls in the main thread of a rank, that of its first call, that begin when those before have ended."""
    is_outer = np.zeros(len(rank), np.bool_)
    edges = np.flatnonzero(np.diff(rank, prepend=-1, append=-1))
    for first, behind in itertools.pairwise(edges):
        rows = first + np.flatnonzero(thread[first:behind] == thread[first])
        ended = np.maximum.accumulate(end[rows])
        is_outer[rows] = np.concatenate([[True], begin[rows][1:] >= ended[:-1]])
    return is_outer
