"""The examples: short programs of one kind, each listed, with a help and a plot that a test draws."""

from __future__ import annotations

import ast
import importlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.helpers.markdown import ROOT

EXAMPLES = ROOT / "examples"
PROGRAMS = sorted(path for path in EXAMPLES.rglob("*.py") if '__name__ == "__main__"' in path.read_text())
SHARED = sorted({*EXAMPLES.rglob("*.py")} - {*PROGRAMS})
# Importing them takes a framework, or starts MPI.
ALONE = [path for path in PROGRAMS if not re.search("import (torch|jax|keras)|import MPI", path.read_text())]


def names(paths: list[Path]) -> list[str]:
    return [path.relative_to(EXAMPLES).as_posix() for path in paths]


@pytest.mark.parametrize("path", PROGRAMS, ids=names(PROGRAMS))
def test_a_program_is_short_and_says_what_it_does(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) < 150
    described = ast.get_docstring(ast.parse(text)) or ""
    name = path.relative_to(ROOT).as_posix()
    assert re.search(rf"^    .*mpirun -n \d+ .*python {name}", described, re.MULTILINE)
    assert "@click.command(" in text
    assert '"--plot"' in text or "@plots.plot_option" in text


def test_all_programs_and_what_they_share_are_listed_and_drawn_by_a_test() -> None:
    assert len(PROGRAMS) >= 11
    assert names(SHARED) == ["digits.py", "plots.py"]
    page = (EXAMPLES / "README.md").read_text()
    tests = [path.read_text() for path in (ROOT / "tests" / "system").rglob("test_*.py")]
    for path in (*PROGRAMS, *SHARED):
        assert f"({path.relative_to(EXAMPLES).as_posix()})" in page, path
    for path in PROGRAMS:
        assert any(f'"{path.name}"' in text and '"--plot"' in text for text in tests), path
    # Its picture is in a cell, and its run is `test_notebook.py`.
    cells = json.loads((EXAMPLES / "notebook.ipynb").read_text())["cells"]
    assert any("plt.subplots" in "".join(cell["source"]) for cell in cells)


@pytest.fixture
def _beside_each_other(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(EXAMPLES)
    before = set(sys.modules)
    yield
    for name in {path.stem for path in (*PROGRAMS, *SHARED)} & (set(sys.modules) - before):
        del sys.modules[name]


@pytest.mark.usefixtures("_beside_each_other")
@pytest.mark.parametrize("path", ALONE, ids=names(ALONE))
def test_the_help_of_a_program_keeps_its_lines(path: Path) -> None:
    main = importlib.import_module(path.stem).main
    result = CliRunner(env={"COLUMNS": "80"}).invoke(main, ["--help"])
    assert result.exit_code == 0, result.output
    wanted = [line for line in path.read_text().split('"""')[1].splitlines() if line.startswith("    ")]
    assert wanted
    for line in wanted:
        assert line in result.output, result.output
    assert "--plot" in result.output
