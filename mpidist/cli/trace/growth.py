"""A model of more ranks: Hockney's model of messages, and what slow arrivals cost by what was seen.

A message of m bytes takes a start and a time per byte. A sum over n ranks takes log2 n starts and moves 2 (n - 1) / n
of the bytes (R. Thakur, R. Rabenseifner, W. Gropp, 2005); `benchmarks/scale_model.py` has more of it, for networks
that are not at hand. The two times are fitted to the calls of the timeline. Each rank keeps its work, so that n times
the ranks do n times the work in a step. More ranks are late more often: the mean of the largest of n delays that are
drawn from those that were seen.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from mpidist.cli.trace.efficiency import Efficiency, Floats
from mpidist.cli.trace.timeline import COMMUNICATION, WAITING

FACTORS = (2, 4, 8)
# Where all calls of a name have one size: below it starts take the time, above it bytes.
_BYTES_COUNT_FROM = 1 << 16


@dataclass(frozen=True)
class Expected:
    """A prediction for a number of ranks.

    Attributes:
        ranks: Their number.
        efficiency: The share of the time in which a rank computes, from 0 to 1.
        speed: Work in a second, as a multiple of what the measured ranks do.
    """

    ranks: int
    efficiency: float
    speed: float


def expect(found: Efficiency) -> list[Expected]:
    """Local. The ranks of a timeline, 2, 4 and 8 times; empty where the ranks never meet."""
    ranks = len(found.timeline.ranks)
    if not found.meetings:
        return []
    seconds = found.seconds.mean(axis=0)
    whole = float(seconds.sum())
    # A rank that is late in every meeting is no chance: it is there once, however many ranks there are.
    now = float(found.arrivals[:, 4].mean())
    rows = []
    for factor in FACTORS:
        more = factor * ranks
        waiting = seconds[WAITING] * (max(1.0, largest_of(found.delays, more) / now) if now > 0 else 1.0)
        communication = seconds[COMMUNICATION] * _longer(found, ranks, more)
        then = whole + float(waiting - seconds[WAITING] + communication - seconds[COMMUNICATION])
        rows.append(Expected(more, found.share * whole / then, factor * whole / then))
    return rows


def largest_of(delays: Floats, count: int) -> float:
    """Local. The mean of the largest of `count` numbers that are drawn from `delays`.

    >>> largest_of(np.array([0.0, 1.0]), 1), largest_of(np.array([0.0, 1.0]), 2)
    (0.5, 0.75)
    """
    ordered = np.sort(delays)
    below = (np.arange(len(ordered) + 1) / len(ordered)) ** count
    return float(np.sum(ordered * np.diff(below)))


def _longer(found: Efficiency, ranks: int, more: int) -> float:
    """The time of all meetings on `more` ranks, as a multiple of what was seen on `ranks`."""
    before = after = 0.0
    for name in np.unique(found.arrivals[:, 0]):
        rows = found.arrivals[found.arrivals[:, 0] == name]
        starts, moved = _parts(rows[:, 2], rows[:, 3])
        before += starts + moved
        after += starts * math.log2(more) / math.log2(ranks)
        after += moved * ((more - 1) / more) / ((ranks - 1) / ranks)
    return after / before if before > 0 else 1.0


def _parts(sizes: Floats, seconds: Floats) -> tuple[float, float]:
    """Of the seconds of some calls those that starts take, and those that bytes take."""
    total = float(seconds.sum())
    different = np.unique(sizes)
    if len(different) == 1:
        return (0.0, total) if different[0] >= _BYTES_COUNT_FROM else (total, 0.0)
    medians = np.array([np.median(seconds[sizes == size]) for size in different])
    slope = max(0.0, float(np.polyfit(different, medians, 1)[0]))
    moved = min(total, slope * float(sizes.sum()))
    return total - moved, moved
