"""What tests of trainers in one process share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import mpidist
from tests.helpers.fitting import Line, Make, made_lines


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes lines, and ends them."""

    def line(folder: Path | None = None) -> Line:
        return Line(mpidist.MirroredStrategy(), folder)

    yield from made_lines(line)
