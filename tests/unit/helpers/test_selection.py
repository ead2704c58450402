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
    name = f"tests/{file}::{name}" + (f"[{params}]" if params else "")
    return Case(
        nodeid=name, path=TESTS / file, callspec=SimpleNamespace(params=params), get_closest_marker=lambda _: marker
    )


class NoText:
    """An object of which there is no text."""

    def __repr__(self) -> str:
        raise ValueError("no text")


def marked(name: str, **keywords: int) -> Any:
    """What a test says that has this marker alone."""
    return lambda asked: SimpleNamespace(kwargs=keywords) if asked == name else None


@pytest.fixture(autouse=True)
def a_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(selection.SEED, "7")


WIDE = [{"a": a, "b": b, "c": c, "d": d} for a in range(5) for b in range(4) for c in range(3) for d in range(2)]


def values(cases: Iterable[Any], *names: str) -> set[tuple[object, ...]]:
    return {tuple(one.callspec.params[name] for name in names) for one in cases}


@pytest.mark.parametrize("number", range(5))
def test_a_cover_has_all_pairs_of_values_and_is_small(number: int) -> None:
    cases = [case("test_wide", None, "parallel/a.py", **one) for one in random.Random(number).sample(WIDE, 100)]
    kept = selection.select(["cover"], cases)
    assert len(kept) < 35
    for first, second in itertools.combinations("abcd", 2):
        assert values(kept, first, second) == values(cases, first, second)


@pytest.mark.parametrize("folder", ["unit", "parallel", "system"])
def test_as_few_cases_as_have_every_value(folder: str) -> None:
    cases = [case("test_wide", file=f"{folder}/a.py", **one) for one in WIDE]
    name = {"unit": "unit-values", "parallel": "values", "system": "program-values"}[folder]
    kept = selection.select([name], cases)
    assert len(kept) == 5
    for one in "abcd":
        assert values(kept, one) == values(cases, one)
    # Other functions change nothing, nor do values without a text.
    more = [case("test_other", file=f"{folder}/a.py", a=number) for number in range(3)]
    more[0].callspec.params["a"] = NoText()
    assert selection.select([name], [*more, *cases]) == [*more, *kept]


@pytest.mark.parametrize("file", ["parallel/test_one.py", "system/failures/test_deaths.py"])
def test_two_halves_are_all_cases_and_each_has_every_function_with_one(file: str) -> None:
    cases = [case("test_wide", file=file, **one) for one in WIDE[:9]]
    alone = [case("test_alone", file=file), case("test_one", file=file, a=3)]
    half, other = (selection.select([name], [*cases, *alone]) for name in ("half", "other-half"))
    assert half[-2:] == other[-2:] == alone
    assert sorted(half[:-2] + other[:-2], key=cases.index) == cases
    assert {len(half), len(other)} == {4 + 2, 5 + 2}


def test_the_half_of_a_program_has_none_that_mpich_skips(monkeypatch: pytest.MonkeyPatch) -> None:
    file = "system/coordinator/test_worker_deaths.py"
    cases = [case("test_at_each_step", file=file, way=way) for way in ("RMA", "SOCKETS")]
    cases[0].get_closest_marker = marked("long_on_mpich")
    seen = set()
    for number in range(20):
        monkeypatch.setenv(selection.SEED, str(number))
        half = selection.select(["half"], cases)
        assert selection.select(["other-half"], cases) == [one for one in cases if one not in half]
        seen.add(tuple(cases.index(one) for one in half))
    assert seen == {(), (1,)}


def test_what_one_run_takes_alone_is_not_halved() -> None:
    many = [case("test_many", a=number) for number in range(4)]
    for one in many:
        one.get_closest_marker = marked("mpi", min_size=4)
    cases = [*many, *(case("test", file=file, a=number) for number in range(4)
                      for file in ("unit/launch/test_slurm.py", "system/comm/test_call_order.py"))]
    assert selection.select(["half"], cases) == selection.select(["other-half"], cases) == cases


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


def test_some_have_one_of_each_file() -> None:
    cases = [case("test_a", number=number, file=f"parallel/test_{number % 3}.py") for number in range(60)]
    kept = selection.select(["some"], cases)
    assert [len(kept), len({one.path for one in kept})] == [3, 3]


def test_a_selection_keeps_what_is_in_other_folders() -> None:
    others = [case("test_a", file="unit/test_layers.py"), case("test_b", file="system/comm/test_windows.py")]
    assert selection.select(["many", "quarter"], others) == others
    assert selection.select(["dependent", "launcher"], others) == others[1:]
    assert selection.select(["pages"], others) == others[:1]


def test_many_ranks_are_more_than_four() -> None:
    cases = [case("test_a"), *(case("test_a", marker=SimpleNamespace(kwargs={"min_size": n})) for n in (4, 5))]
    assert selection.select(["many"], cases) == cases[2:]


@pytest.mark.parametrize(("name", "file", "is_needed"), [
    ("many", "parallel/comm/test_many_ranks.py", True), ("many", "parallel/serving/test_cut.py", True),
    ("many", "parallel/serving/test_ahead.py", False), ("many", "parallel/conftest.py", True),
    ("many", "unit/test_layers.py", True), ("cover", "parallel/serving/test_ahead.py", True),
    ("frameworks", "parallel/keras/test_fit.py", True), ("frameworks", "parallel/serving/test_ahead.py", False),
    ("frameworks", "system/test_documentation.py", True), ("nonsense", "unit/test_layers.py", True),
])
def test_a_file_of_which_nothing_is_kept_is_not_needed(name: str, file: str, is_needed: bool) -> None:
    assert (TESTS / file).exists()
    assert selection.needs_file(name, TESTS / file) == is_needed


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
    many = "".join(f"0.5 0.25 tests/a.py::test_{number}\n" for number in range(99))
    place.write_text(f"{many}2.25 1 b.py::b c\n1.5 .5 b.py::b c\n")
    lines = times.slowest(place).splitlines()
    assert lines[1:3] == ["the 30 slowest of 100 tests, seconds and CPU seconds:", "     3.8      1.5 b.py::b c"]
    assert lines[-3] == "the 2 of 2 files that cost most CPU:"
    assert lines[-2:] == ["    49.5     24.8 tests/a.py", "     3.8      1.5 b.py"]
    assert len(lines) == 2 + 30 + 4


@pytest.mark.parametrize("ends_in", ["this process", "a program"])
def test_a_phase_is_noted_with_what_it_and_its_programs_cost(
    ends_in: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(times.PLACE, str(tmp_path / "times"))
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    work = "import time\nend = time.process_time() + 0.2\nwhile time.process_time() < end: pass"
    times.begin()
    if ends_in == "a program":
        subprocess.run([sys.executable, "-c", work], check=True)
    else:
        exec(work, {})
    for name in ("first", "second"):
        report = pytest.TestReport(name, (name, 1, name), {}, "passed", None, "call", duration=1.5)
        times.measure(report)
        times.note(report)
    first, second = (line.split() for line in (tmp_path / "times").read_text().splitlines())
    assert first[::2] == ["1.500", "first"]
    assert second[::2] == ["1.500", "second"]
    assert float(first[1]) >= 0.2 > float(second[1])


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


@pytest.mark.parametrize("name", ["quick", "glance"])
def test_some_selections_stand_together_on_two_ranks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPIDIST_TEST_SELECTION", name)
    options, others = run_all.parse(["-x"])
    assert (options.ranks, others) == ([2], ["-x"])
    assert set(selection.TOGETHER[name]) <= set(selection.SELECTIONS)
