"""The words of errors and logs: those of the field, and no pictures."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import mpidist

PACKAGE = Path(mpidist.__file__).parent
# What a stranger has to read twice, and what to write.
PICTURES = {
    r"takes? leave|taken leave": "end, terminate", r"in vain": "without success", r"\bfor ever\b": "hang, without end",
    r"\bwhom\b|\bwhoever\b": "a sentence with a subject", r"\blies?\b": "is, are", r"wakes? up": "resumes",
    r"\bstands? (in|on|behind|above)\b": "is, comes", r"riddle|astray|bites": "what happens",
}


@functools.cache
def texts() -> tuple[tuple[str, str], ...]:
    """All texts of the package that are no docstrings, with their places."""
    return tuple(_texts())


def _texts() -> Iterator[tuple[str, str]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text())
        docstrings = {
            id(node.body[0].value) for node in ast.walk(tree)
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
            and node.body and isinstance(node.body[0], ast.Expr)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                yield f"{path.relative_to(PACKAGE.parent)}:{node.lineno}", node.value


@pytest.mark.parametrize("picture", PICTURES)
def test_texts_have_the_words_of_the_field(picture: str) -> None:
    found = [f"{place}: {text!r}" for place, text in texts() if re.search(picture, text)]
    assert not found, f"write instead: {PICTURES[picture]}\n" + "\n".join(found)


def test_texts_are_found() -> None:
    assert sum(" " in text for _, text in texts()) > 2000
