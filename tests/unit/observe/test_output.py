"""Texts of a rank whose job may end at any moment, also where a test runner has taken its stderr away."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpidist.observe import output


@pytest.fixture
def beside(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "beside"
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY)
    output.say_also_to(output.Beside(descriptor, lambda: "in test_it"))
    yield path
    output.say_also_to(None)
    os.close(descriptor)


def test_a_text_goes_to_a_second_place_below_what_the_program_does(
    beside: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    output.say("two\nlines\n")
    output.say_also_to(None)
    output.say("later")
    assert capfd.readouterr().err == "mpidist: two\nlines\nmpidist: later\n"
    assert beside.read_text() == "\nin test_it\nmpidist: two\nlines\n"


def test_a_text_that_is_not_taken_away_comes_once(capfd: pytest.CaptureFixture[str]) -> None:
    descriptor = os.dup(2)
    output.say_also_to(output.Beside(descriptor, lambda: "in test_it"))
    output.say("once")
    output.say_also_to(None)
    os.close(descriptor)
    assert capfd.readouterr().err == "mpidist: once\n"


def test_a_place_that_is_gone_is_no_error(beside: Path, capfd: pytest.CaptureFixture[str]) -> None:
    closed = os.dup(2)
    os.close(closed)
    output.say_also_to(output.Beside(closed, lambda: "in test_it"))
    output.say("here")
    assert capfd.readouterr().err == "mpidist: here\n"
    assert beside.read_text() == ""
