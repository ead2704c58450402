"""How long each test takes, and what it costs: noted in a file while tests run, told at the end."""

from __future__ import annotations

import os
import resource
from collections import Counter
from pathlib import Path

import pytest

from mpidist import launch

# The environment variable that names the file.
PLACE = "MPIDIST_TEST_TIMES"
COUNT = 30
FILES = 20
# What a report is given, which xdist's workers send on.
_CPU = "cpu_seconds"
# By when this process had used how much; a phase of a test begins where the last one has ended.
_used = [0.0]


def begin() -> None:
    """What has been used by now belongs to no test."""
    _used[0] = _cpu_seconds()


def measure(report: pytest.TestReport) -> None:
    """Give a report what the phase has cost: this process, and those that it has started and that have ended."""
    before, _used[0] = _used[0], _cpu_seconds()
    setattr(report, _CPU, _used[0] - before)


def note(report: pytest.TestReport) -> None:
    """Add the seconds of a phase of a test, at once: a run may be cut off. Of several processes one does it."""
    file_name = os.environ.get(PLACE)
    rank = launch.read()
    if file_name and "PYTEST_XDIST_WORKER" not in os.environ and (rank is None or rank.rank == 0):
        with open(file_name, "a", encoding="utf-8") as file:
            file.write(f"{report.duration:.3f} {getattr(report, _CPU, 0.0):.3f} {report.nodeid}\n")


def slowest(place: Path) -> str:
    """Tables of the slowest tests in that file, with all their phases and runs, and of the files that cost most.

    Of ranks it has the CPU of the first.
    """
    tests: tuple[Counter[str], Counter[str]] = Counter(), Counter()
    files: tuple[Counter[str], Counter[str]] = Counter(), Counter()
    for line in place.read_text(encoding="utf-8").splitlines() if place.exists() else ():
        took, cost, name = line.split(" ", 2)
        for of_tests, of_files, seconds in zip(tests, files, (took, cost), strict=True):
            of_tests[name] += float(seconds)  # type: ignore[assignment]  # a Counter adds any numbers
            of_files[name.partition("::")[0]] += float(seconds)  # type: ignore[assignment]  # the same
    return "\n".join([
        f"\nthe {min(COUNT, len(tests[0]))} slowest of {len(tests[0])} tests, seconds and CPU seconds:",
        *_rows(tests, tests[0].most_common(COUNT)),
        f"\nthe {min(FILES, len(files[0]))} of {len(files[0])} files that cost most CPU:",
        *_rows(files, files[1].most_common(FILES)),
    ])


def _rows(seconds: tuple[Counter[str], Counter[str]], chosen: list[tuple[str, int]]) -> list[str]:
    return [f"{seconds[0][name]:8.1f} {seconds[1][name]:8.1f} {name}" for name, _ in chosen]


def _cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)
