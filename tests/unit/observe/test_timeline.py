"""`python -m mpidist.observe.trace`: what it says where there is no timeline."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpidist.observe.trace import main


def test_wrong_words_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert (main([]), main(["a", "b"])) == (2, 2)
    assert capsys.readouterr() == ("", 2 * "usage: python -m mpidist.observe.trace DIR\n")


@pytest.mark.parametrize("name", ["", "missing"])
def test_a_folder_without_calls_gets_no_timeline(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / name
    assert main([str(folder)]) == 1
    assert f"Error: {folder} has no calls of ranks: " in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
