"""Markdown pages as tests see them: their fenced blocks, headings and links."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

_FENCE = re.compile(r"^(?P<fence>```+)(?P<info>.*)$")
_LINK = re.compile(r"!?\[[^\]]*\]\((?P<target>[^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        language: First word after the fence.
        words: What follows it: how a test treats the block.
        text: The lines inside.
        line: Number of the first line inside, from 1.
        follows: Number of the first line of the block right before it, with nothing but empty lines between; else None.
    """

    language: str
    words: str
    text: str
    line: int
    follows: int | None


def blocks_of(page: str) -> list[Block]:
    """The fenced blocks of a page, in their order."""
    found: list[Block] = []
    inside: list[str] | None = None
    fence, info, line, before = "", "", 0, None
    for number, text in enumerate(page.splitlines(), start=1):
        match = _FENCE.match(text)
        if inside is None:
            if match is not None:
                inside, fence, info, line = [], match["fence"], match["info"].strip(), number + 1
            elif text.strip():
                before = None
        elif text.strip() == fence:
            language, _, words = info.partition(" ")
            found.append(Block(language, words.strip(), "".join(f"{one}\n" for one in inside), line, before))
            inside, before = None, line
        else:
            inside.append(text)
    if inside is not None:
        raise ValueError(f"the block that begins in line {line - 1} has no end")
    return found


def prose_of(page: str) -> list[str]:
    """The lines of a page outside of fenced blocks."""
    lines: list[str] = []
    is_inside = False
    for text in page.splitlines():
        if _FENCE.match(text):
            is_inside = not is_inside
        elif not is_inside:
            lines.append(text)
    return lines


def links_of(page: str) -> Iterator[str]:
    """The targets of links and images, in their order."""
    for text in prose_of(page):
        # Code spans show brackets that are no links.
        yield from (match["target"] for match in _LINK.finditer(re.sub(r"`[^`]*`", "", text)))


def anchors_of(page: str) -> set[str]:
    """The names under which a page's headings are linked, as GitHub makes them."""
    headings = [match[1] for text in prose_of(page) if (match := re.match(r"#+ (.*)", text))]
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


def all_pages() -> list[Path]:
    """Every Markdown file of the project."""
    folders = ("docs", "benchmarks", "tests", "examples")
    return sorted([*ROOT.glob("*.md"), *(page for folder in folders for page in ROOT.glob(f"{folder}/**/*.md"))])


def documentation() -> list[Path]:
    """The pages whose Python blocks are programs: the front page and the guides."""
    return [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("docs/*/*.md"))]
