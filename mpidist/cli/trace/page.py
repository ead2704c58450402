"""The page of `mpidist trace`: one file of HTML with its data inside, which opens without a network."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Sequence
from importlib import resources
from typing import Any

import numpy as np
import numpy.typing as npt

from mpidist.cli.trace.efficiency import Efficiency, Floats
from mpidist.cli.trace.growth import Expected
from mpidist.cli.trace.summaries import Curve, Point
from mpidist.cli.trace.timeline import COMPUTE, KINDS, WAITING

# Columns of the pictures: about one for each point of a screen.
_COLUMNS = 600
# Calls that are in the page one by one; of the other ranks it has the picture.
_MOST_CALLS = 20_000
_WIDTH, _HEIGHT, _MARGIN = 420, 160, 40


def page_of(found: Efficiency, expected: Sequence[Expected], curves: Sequence[Curve], title: str) -> str:
    """Local. The page.

    Args:
        found: The shares of time.
        expected: What more ranks would give.
        curves: Losses and throughput of the program.
        title: The heading.
    """
    timeline = found.timeline
    busy = _picture(found)
    data: dict[str, Any] = {
        **found.as_dict(), "kinds": KINDS, "columns": _COLUMNS, "seconds": timeline.last / 1e9,
        "numbers": timeline.ranks, "names": timeline.names, "places": timeline.places,
        "expected": [vars(one) for one in expected],
        # A rank that has not begun, or has ended, has the number behind those of the kinds.
        "doing": _packed(np.where(busy.any(axis=2), busy.argmax(axis=2), len(KINDS)).astype(np.uint8)),
        "waiting": _packed((busy[:, :, WAITING] / max(float(busy.max()), 1e-12) * 255).astype(np.uint8)),
        "calls": _calls(found),
    }
    template = resources.files("mpidist.cli.trace").joinpath("page.html").read_text("utf-8")
    # In a script element only `</` could end it early.
    text = json.dumps(data, separators=(",", ":")).replace("</", "<\\/")
    return (
        template.replace("{{title}}", html.escape(title)).replace("{{curves}}", "".join(map(_drawn, curves)))
        .replace("{{data}}", text)
    )


def _packed(array: npt.NDArray[np.uint8]) -> str:
    return base64.b64encode(array.tobytes()).decode()


def _picture(found: Efficiency) -> Floats:
    """Seconds that each rank spends in each column of time with each kind: shape (ranks, columns, kinds)."""
    timeline = found.timeline
    width = max(timeline.last / 1e9 / _COLUMNS, 1e-12)
    picture = np.zeros((len(timeline.ranks), _COLUMNS, len(KINDS)))
    outer = np.flatnonzero(timeline.is_outer)
    begin, end = timeline.begin[outer] / 1e9, timeline.end[outer] / 1e9
    middle = begin + found.waits[outer]
    rank = timeline.rank[outer]
    _spread(picture, rank, np.full(len(outer), WAITING), begin / width, middle / width)
    _spread(picture, rank, timeline.kind[outer], middle / width, end / width)
    picture *= width
    # What is left between the first and the last call of a rank.
    edges = np.flatnonzero(np.diff(timeline.rank, prepend=-1))
    alive = np.zeros_like(picture)
    first, last = np.minimum.reduceat(timeline.begin, edges), np.maximum.reduceat(timeline.end, edges)
    ranks = np.arange(len(timeline.ranks))
    _spread(alive, ranks, np.zeros_like(ranks), first / 1e9 / width, last / 1e9 / width)
    picture[:, :, COMPUTE] += np.maximum(0, alive[:, :, 0] * width - picture.sum(axis=2))
    return picture


def _spread(
    picture: Floats, rank: npt.NDArray[np.int64], kind: npt.NDArray[np.int64], begin: Floats, end: Floats
) -> None:
    """Add the columns' shares of each interval, whose ends are in columns: by differences, whatever its length."""
    ranks, columns, kinds = picture.shape
    steps = np.zeros((ranks, columns + 2, kinds))
    for place, sign in ((begin, 1.0), (end, -1.0)):
        column = np.clip(np.floor(place).astype(np.int64), 0, columns)
        inside = place - column
        # A function that rises from 0 to 1 within a column is the sum of two steps.
        np.add.at(steps, (rank, column, kind), sign * (1 - inside))
        np.add.at(steps, (rank, column + 1, kind), sign * inside)
    picture += np.cumsum(steps, axis=1)[:, :columns]


def _calls(found: Efficiency) -> dict[str, Any]:
    """The calls of as many ranks as there is space for, those first for which the others wait the longest."""
    timeline = found.timeline
    counts = np.bincount(timeline.rank[timeline.is_outer], minlength=len(timeline.ranks))
    order = np.argsort(-found.caused, kind="stable")
    ranks = order[np.cumsum(counts[order]) <= _MOST_CALLS]
    # Of a rank with more calls than that, the longest.
    rows = np.flatnonzero(timeline.is_outer & np.isin(timeline.rank, ranks if len(ranks) else order[:1]))
    if len(rows) > _MOST_CALLS:
        rows = np.sort(rows[np.argsort(timeline.begin[rows] - timeline.end[rows], kind="stable")[:_MOST_CALLS]])
    columns = {
        "rank": timeline.rank[rows], "name": timeline.name[rows], "place": timeline.place[rows],
        "kind": timeline.kind[rows], "begin": timeline.begin[rows] // 1000,
        "length": (timeline.end - timeline.begin)[rows] // 1000, "wait": (found.waits[rows] * 1e6).astype(np.int64),
        "size": timeline.size[rows],
    }
    return {name: column.tolist() for name, column in columns.items()}


def _drawn(curve: Curve) -> str:
    """A curve as a picture of vectors."""
    points = [one for one in curve.points if np.isfinite(one.value)]
    if len(points) < 2:
        return ""
    steps, values = [one.step for one in points], [one.value for one in points]
    low, high = min(values), max(values)

    def place(one: Point) -> str:
        x = _MARGIN + (one.step - steps[0]) / max(steps[-1] - steps[0], 1) * (_WIDTH - 2 * _MARGIN)
        y = _HEIGHT - 24 - (one.value - low) / max(high - low, 1e-30) * (_HEIGHT - 48)
        return f"{x:.1f},{y:.1f}"

    name = html.escape(curve.name)
    return (
        f'<figure><figcaption>{name}</figcaption><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="{name}"><polyline points="{" ".join(map(place, points))}"/>'
        f'<text x="2" y="20">{high:.3g}</text><text x="2" y="{_HEIGHT - 22}">{low:.3g}</text>'
        f'<text x="{_MARGIN}" y="{_HEIGHT - 6}">step {steps[0]}</text>'
        f'<text x="{_WIDTH - _MARGIN}" y="{_HEIGHT - 6}" text-anchor="end">{steps[-1]}</text></svg></figure>\n'
    )
