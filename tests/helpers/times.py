"""How long each test takes: noted in a file while tests run, told at the end."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

from mpidist import launch

# The environment variable that names the file.
PLACE = "MPIDIST_TEST_TIMES"
COUNT = 30


def note(report: pytest.TestReport) -> None:
    """Add the seconds of a phase of a test, at once: a run may be cut off. Of several processes one does it."""
    file_name = os.environ.get(PLACE)
    rank = launch.read()
    if file_name and "PYTEST_XDIST_WORKER" not in os.environ and (rank is None or rank.rank == 0):
        with open(file_name, "a", encoding="utf-8") as file:
            file.write(f"{report.duration:.3f} {report.nodeid}\n")


def slowest(place: Path) -> str:
    """A table of the slowest tests in that file, with the seconds of all their phases and runs."""
    seconds: Counter[str] = Counter()
    for line in place.read_text(encoding="utf-8").splitlines() if place.exists() else ():
        took, _, name = line.partition(" ")
        seconds[name] += float(took)  # type: ignore[assignment]  # a Counter adds any numbers
    rows = [f"{took:8.1f} {name}" for name, took in seconds.most_common(COUNT)]
    return "\n".join([f"\nthe {len(rows)} slowest of {len(seconds)} tests, seconds:", *rows])
