"""Which tests a run takes, and what it tells at its end."""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import run_all
from tests.helpers import selection, times

TESTS = run_all.ROOT / "tests"


class Case(SimpleNamespace):
    """What a selection looks at of a test."""

    __hash__ = object.__hash__  # type: ignore[assignment]


def case(name: str, marker: Any = None, file: str = "parallel/test_one.py", **params: object) -> Any:
    return Case(
        nodeid=f"tests/{file}::{name}[{params}]", path=TESTS / file, callspec=SimpleNamespace(params=params),
        get_closest_marker=lambda _: marker,
    )


@pytest.fixture(autouse=True)
def a_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(selection.SEED, "7")


WIDE = [{"a": a, "b": b, "c": c, "d": d} for a in range(5) for b in range(4) for c in range(3) for d in range(2)]


def values(cases: Iterable[Any], *names: str) -> set[tuple[object, ...]]:
    return {tuple(one.callspec.params[name] for name in names) for one in cases}


@pytest.mark.parametrize("number", range(5))
def test_a_cover_has_all_pairs_of_values_and_is_small(number: int) -> None:
    cases = [case("test_wide", None, "parallel/a.py", **one) for one in random.Random(number).sample(WIDE, 100)]
    kept = list(selection.cover(cases, random.Random(number)))
    assert len(kept) < 35
    for first, second in itertools.combinations("abcd", 2):
        assert values(kept, first, second) == values(cases, first, second)


def test_functions_with_few_cases_are_covered_by_all_of_them() -> None:
    cases = [case("test_few", a=number, b=number % 2, c=0) for number in range(selection.WIDE - 1)]
    assert selection.select(["cover"], cases) == cases


def test_a_seed_chooses_the_same_on_all_ranks_and_another_one_others(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [case(f"test_{number}") for number in range(400)]
    chosen = selection.select(["quarter"], cases)
    assert 50 < len(chosen) < 150
    assert selection.select(["quarter"], cases) == chosen
    monkeypatch.setenv(selection.SEED, "8")
    assert selection.select(["quarter"], cases) != chosen


def test_a_quarter_has_something_of_each_file() -> None:
    cases = [case("test_alone", file=f"parallel/test_{number}.py") for number in range(50)]
    assert selection.select(["quarter"], cases) == cases


def test_a_selection_keeps_what_is_in_other_folders() -> None:
    others = [case("test_a", file="unit/test_layers.py"), case("test_b", file="system/comm/test_windows.py")]
    assert selection.select(["many", "quarter"], others) == others
    assert selection.select(["dependent", "launcher"], others) == others[1:]
    assert selection.select(["pages"], others) == others[:1]


def test_many_ranks_are_more_than_four() -> None:
    cases = [case("test_a"), *(case("test_a", marker=SimpleNamespace(kwargs={"min_size": n})) for n in (4, 5))]
    assert selection.select(["many"], cases) == cases[2:]


def test_a_name_that_is_none_is_an_error() -> None:
    with pytest.raises(pytest.UsageError, match="'nonsense'"):
        selection.select(["nonsense"], [])


@pytest.mark.parametrize(("folder", "names"), [
    ("unit", selection.ONCE), ("system", selection.LAUNCHER), ("system", selection.PAGES),
])
def test_every_file_that_a_selection_names_is_there(folder: str, names: tuple[str, ...]) -> None:
    assert [name for name in names if len([*(TESTS / folder).rglob(f"{name}.py")]) != 1] == []


def test_the_slowest_tests_are_told_with_all_their_phases(tmp_path: Path) -> None:
    place = tmp_path / "times"
    place.write_text("".join(f"0.5 tests/a.py::test_{number}\n" for number in range(99)) + "2.25 b\n1.5 b\n")
    lines = times.slowest(place).splitlines()
    assert lines[1:3] == ["the 30 slowest of 100 tests, seconds:", "     3.8 b"]
    assert len(lines) == 2 + 30


def test_a_run_without_a_time_tells_of_none(tmp_path: Path) -> None:
    assert "0 slowest of 0" in times.slowest(tmp_path / "none")


def test_a_run_that_is_cut_off_tells_what_has_run(tmp_path: Path) -> None:
    """It is ended while it is in the middle of a part; by then the first has ended."""
    program = tmp_path / "cut.py"
    program.write_text(
        "import sys\n"
        "from tests import run_all\n"
        f"first = [sys.executable, '-m', 'pytest', '-q', {str(TESTS / 'unit/helpers/test_amounts.py')!r}]\n"
        "second = [sys.executable, '-c', 'print(\"under way\", flush=True); input()']\n"
        "run_all.parts_of = lambda *_: [run_all.Part('first', first), run_all.Part('second', second),\n"
        "    run_all.Part('third', second)]\n"
        "sys.exit(run_all.main(['--select', 'quarter']))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(run_all.ROOT), selection.SEED: "42"}
    # This one's controller would note the times.
    environment.pop("PYTEST_XDIST_WORKER", None)
    seen = ""
    with subprocess.Popen(
        [sys.executable, str(program)], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as run:
        for line in run.stdout or ():
            seen += line
            if line == "under way\n":
                run.send_signal(signal.SIGTERM)
    assert run.returncode == 1
    assert "===== first: passed in" in seen
    assert "tests/unit/helpers/test_amounts.py::" in seen
    assert "selected: quarter; seed 42" in seen
    rows = {line.split()[0]: line for line in seen.rpartition("part ")[2].splitlines()[1:]}
    assert rows["first"].endswith("  passed")
    assert rows["second"].endswith("  CUT OFF")
    assert rows["third"].endswith("  not run")


def test_quick_is_a_selection_on_two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPIDIST_TEST_SELECTION", "quick")
    options, others = run_all.parse(["-x"])
    assert (options.ranks, others) == ([2], ["-x"])
    assert set(selection.QUICK) <= set(selection.SELECTIONS)
