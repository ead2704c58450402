"""The shares of the time of each rank, as a timeline shows them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mpidist.cli.trace.timeline import COMPUTE, KINDS, WAITING, Integers, Timeline

Floats = npt.NDArray[np.float64]
# Calls whose array goes over each link twice, but for a rank's own share: bytes of the bus are counted as benchmarks of
# all-reduce count them.
_SUMS = ("all_reduce", "reduce", "apply_gradients", "run", "merge_call")
# A rank that is later than the others' mean by less than this is not late: clocks and schedulers differ by as much.
LATE_SECONDS = 1e-3


@dataclass(frozen=True)
class Operation:
    """Meetings of one name.

    Attributes:
        name: Their name.
        meetings: Their number.
        size: Median of the bytes of a rank's array.
        seconds: Median of the seconds from the last arrival to the last departure.
        total: Sum of these seconds.
        bandwidth: Bytes on the bus in a second; None without an array.
    """

    name: str
    meetings: int
    size: int
    seconds: float
    total: float
    bandwidth: float | None


@dataclass(frozen=True)
class Efficiency:
    """The shares of time of all ranks.

    Attributes:
        timeline: The timeline from which the shares were read.
        seconds: Shape (ranks, kinds): seconds of each rank in each of `timeline.KINDS`.
        waits: Shape (calls,): seconds of each call before its last rank arrives.
        meetings: The number of meetings of two ranks or more.
        late: Shape (ranks,): how often a rank was the last, and late.
        caused: Shape (ranks,): seconds that the other ranks waited for it then.
        operations: Operations by name, the longest first.
        arrivals: Shape (meetings, 5): of each meeting the place of its name, its ranks, its bytes, the seconds after
            the last arrival, and those by which that is later than the mean arrival.
        delays: Seconds by which each arrival is later than the mean of its meeting.
    """

    timeline: Timeline
    seconds: Floats
    waits: Floats
    meetings: int
    late: Integers
    caused: Floats
    operations: tuple[Operation, ...]
    arrivals: Floats
    delays: Floats

    @property
    def share(self) -> float:
        """Local. The share of the time of all ranks in which they compute, from 0 to 1."""
        return float(self.seconds[:, COMPUTE].sum() / max(self.seconds.sum(), 1e-12))

    def as_dict(self) -> dict[str, Any]:
        """Local. The figures, for programs; seconds and bytes."""
        return {
            "ranks": len(self.timeline.ranks), "meetings": self.meetings, "efficiency": self.share,
            "by_rank": [
                {
                    "rank": rank, **dict(zip(KINDS, map(float, self.seconds[number]), strict=True)),
                    "late": int(self.late[number]), "others_waited": float(self.caused[number]),
                }
                for number, rank in enumerate(self.timeline.ranks)
            ],
            "operations": [vars(one) for one in self.operations],
        }


def look_at(timeline: Timeline) -> Efficiency:
    """Local. Read the shares out of a timeline."""
    met = np.flatnonzero(timeline.meeting >= 0)
    # By meetings, and in each the arrivals in their order.
    met = met[np.lexsort((timeline.begin[met], timeline.meeting[met]))]
    edges = np.flatnonzero(np.diff(timeline.meeting[met], prepend=-1))
    sizes = np.diff(edges, append=len(met))
    many = sizes > 1
    waits = np.zeros(len(timeline))
    late, caused = np.zeros(len(timeline.ranks), np.int64), np.zeros(len(timeline.ranks))
    if not many.any():
        nothing = np.zeros((0, 5))
        return Efficiency(timeline, _seconds(timeline, waits), waits, 0, late, caused, (), nothing, np.zeros(0))
    number = np.repeat(np.arange(len(edges)), sizes)
    begin, end = timeline.begin[met] / 1e9, timeline.end[met] / 1e9
    last = begin[edges + sizes - 1]
    waits[met] = np.maximum(0, np.minimum(end, last[number]) - begin)
    means = np.add.reduceat(begin, edges) / sizes
    waited = np.add.reduceat(waits[met], edges)
    is_late = many & (last - means > LATE_SECONDS)
    latest = timeline.rank[met][edges + sizes - 1]
    np.add.at(late, latest[is_late], 1)
    np.add.at(caused, latest[many], waited[many])
    arrivals = np.stack([
        timeline.name[met][edges], sizes, np.maximum.reduceat(timeline.size[met], edges),
        np.maximum(0, np.maximum.reduceat(end, edges) - last), last - means,
    ], 1)[many]
    return Efficiency(
        timeline, _seconds(timeline, waits), waits, int(many.sum()), late, caused,
        _operations(timeline.names, arrivals), arrivals, (begin - means[number])[many[number]],
    )


def _seconds(timeline: Timeline, waits: Floats) -> Floats:
    """Seconds by rank and kind. Outer calls have no time in common, and a call's wait is at its beginning."""
    count = len(timeline.ranks)
    outer = timeline.is_outer
    rank, kind = timeline.rank[outer], timeline.kind[outer]
    lengths = (timeline.end - timeline.begin)[outer] / 1e9 - waits[outer]
    places = rank * len(KINDS) + kind
    seconds: Floats = np.bincount(places, lengths, count * len(KINDS)).astype(np.float64).reshape(count, len(KINDS))
    seconds[:, WAITING] = np.bincount(rank, waits[outer], count)
    edges = np.flatnonzero(np.diff(timeline.rank, prepend=-1))
    whole = np.maximum.reduceat(timeline.end, edges) - np.minimum.reduceat(timeline.begin, edges)
    left = np.maximum(0, whole / 1e9 - seconds.sum(axis=1))
    # A worker that runs functions waits for the next one between them; other ranks compute between calls.
    is_worker = np.bincount(rank[kind == COMPUTE], minlength=count) > 0
    seconds[:, WAITING] += np.where(is_worker, left, 0)
    seconds[:, COMPUTE] += np.where(is_worker, 0, left)
    return seconds


def _operations(names: Sequence[str], arrivals: Floats) -> tuple[Operation, ...]:
    found = []
    for name in np.unique(arrivals[:, 0]):
        rows = arrivals[arrivals[:, 0] == name]
        ranks, size, seconds = (float(np.median(rows[:, column])) for column in (1, 2, 3))
        bandwidth = None
        if size and seconds:
            bandwidth = on_bus(names[int(name)], size, ranks) / seconds
        found.append(Operation(names[int(name)], len(rows), int(size), seconds, float(rows[:, 3].sum()), bandwidth))
    return tuple(sorted(found, key=lambda one: -one.total))


def on_bus(name: str, size: float, ranks: float) -> float:
    """Local. Bytes that a call moves over the slowest link where all links are used alike.

    Args:
        name: The name of the call.
        size: Bytes of a rank's array.
        ranks: The number of ranks.
    """
    return size * 2 * (ranks - 1) / ranks if name in _SUMS else size
