"""The tables of the documents' blocks: each block has an answer, and each test that they name is there."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from tests.helpers.markdown import ROOT

PAGE = ROOT / "docs" / "tensorflow-tutorials.md"
FOLDER = ROOT / "tests" / "parallel" / "documented_examples"
ANSWERS = ("unchanged", "changed: ", "not here: ")


def rows(page: Path) -> list[list[str]]:
    """The cells of all tables, without the heads."""
    lines = page.read_text().splitlines()
    return [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for before, line in itertools.pairwise(lines) if line.startswith("| ") and before.startswith("|")
    ]


def test_each_block_has_an_answer_and_those_that_run_have_a_test() -> None:
    found = rows(PAGE)
    assert len(found) > 70
    for block, answer, _ in found:
        assert answer.startswith(ANSWERS), block
    tested = [row for row in found if row[2]]
    assert len(tested) > 55
    assert not [block for block, answer, test in tested if answer.startswith("not here") and "server" not in test]


@pytest.mark.parametrize("page", [PAGE, FOLDER / "README.md"], ids=["guide", "table"])
def test_the_tests_that_a_table_names_are_there(page: Path) -> None:
    named = re.findall(r"`((?:\w+/)*test_\w+)(?:::(\w+))?`", page.read_text())
    assert len(named) > 20
    for module, test in named:
        places = [FOLDER / f"{module}.py", ROOT / "tests" / f"{module}.py"]
        text = next((path.read_text() for path in places if path.exists()), None)
        if text is None:
            # The name of a test alone, in a module that the page names elsewhere.
            text = "".join(path.read_text() for path in (*FOLDER.glob("*.py"), *ROOT.glob("tests/unit/data/*.py")))
            test = test or module  # noqa: PLW2901
        assert not test or f"def {test}(" in text, f"{module}::{test}"
