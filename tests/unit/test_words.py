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
    r"\bstands? (in|on|behind|above|still)\b": "is, comes, is stopped", r"riddle|astray|bites": "what happens",
    r"\banew\b": "again, from the beginning", r"(come|comes|coming) to (its|their) end": "end, finish",
    r"\b(go|goes|gone|going) on\b": "continue, resume", r"\bliv(e|es) on\b|outlives? (it|the death)": "survive",
    r"\b(is|are) (there|not there)\b": "exists, is not supported", r"heard? of|hears of": "is notified, responds",
    r"queue[sd]? (the job )?again": "requeue", r"data sets?\b": "dataset", r"must be a text\b(?! file)": "a string",
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


# Also what the documentation, docstrings and comments say in other words; of these a "who" may be the subject.
WRITTEN = (
    r"takes? leave|taken leave|in vain|\bfor ever\b|\blies?\b|riddle|astray|bites|\banew\b|\b(?i:whoever)\b|\bwhom\b"
    r"|(come|comes|coming) to (its|their) end\b|\b(go|goes|gone) on\b(?! all)|\bdata sets?\b"
    r"|\bstands? for\b|\b[Ww]ay out\b|\bwithout a word\b|\bname for people\b|\bNobody\b|\bmends?\b|chief's counts?\b"
    r"|\bknows? nothing of\b|\b[Ss]omebody\b|\bthreads? of ours\b|\b[Ss]o many looks\b|\bTake note of\b"
)


def written() -> list[tuple[str, str]]:
    """All lines of the package and of the pages, with their places."""
    root = PACKAGE.parent
    files = [*PACKAGE.rglob("*.py"), *root.glob("*.md"), *root.glob("*/*.md"), *root.glob("examples/*.py")]
    return [
        (f"{path.relative_to(root)}:{number}", line)
        for path in sorted(files) for number, line in enumerate(path.read_text().splitlines(), 1)
    ]


def test_pages_and_docstrings_have_the_words_of_the_field() -> None:
    lines = written()
    assert any(place.startswith("docs/") for place, _ in lines)
    found = [f"{place}: {line.strip()}" for place, line in lines if re.search(WRITTEN, line)]
    assert not found, "\n".join(found)


def test_summaries_begin_with_a_verb_or_a_noun() -> None:
    question = re.compile(r'\s*"""((Local|Collective|Root only)[.,:] )?(What|Who|Where|When|How|Which|Whose) ')
    found = [f"{place}: {line.strip()}" for place, line in written() if question.match(line)]
    assert not found, "\n".join(found)


def test_lines_of_arguments_have_a_noun() -> None:
    no_noun = re.compile(
        r"\s+\*{0,2}[a-z_]\w*(, \*{0,2}\w+)*: "
        r"(Of |Whose |Those |So many |As (given|of|for) |As `|What to call |By which it |(Theirs|In words|To show)\.$"
        r"|Likewise\b|Called |Gives |Makes |Says |Takes |Hears |Held |The same\.$|(Its|The) (user's|chief's)\.$)"
    )
    found = [f"{place}: {line.strip()}" for place, line in written() if ".py:" in place and no_noun.match(line)]
    assert not found, "\n".join(found)


def test_texts_are_found() -> None:
    assert sum(" " in text for _, text in texts()) > 2000
