"""Waits for other processes: which look of the watchdog's reports them."""

from __future__ import annotations

import pytest

from mpidist.failures.peers import Key
from mpidist.failures.watchdog import WATCHDOG
from mpidist.parameter_server.protocol.awaited_ranks import Awaited


@pytest.fixture
def awaited(monkeypatch: pytest.MonkeyPatch) -> Awaited:
    monkeypatch.setenv("MPIDIST_WARN_SECONDS", "30")
    # Only the test looks.
    monkeypatch.setattr(WATCHDOG, "look_also", lambda _: None)
    return Awaited("ps {}".format, lambda rank: Key("a", rank, ""))


def reports(awaited: Awaited, capfd: pytest.CaptureFixture[str], *seconds: float) -> list[bool]:
    """Whether each look, so many seconds after the wait has begun, reports it."""
    assert awaited.wait is not None
    begin, told = awaited.wait.since, []
    for after in seconds:
        awaited.look(begin + after)
        text = capfd.readouterr().err
        assert not text or f"has waited {after:.0f} s for ps 3, ps 4 to apply a write" in text
        told.append(bool(text))
    return told


def test_a_wait_is_reported_ever_more_rarely_and_the_next_one_anew(
    awaited: Awaited, capfd: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        with awaited((4, 3), "apply a write"):
            assert reports(awaited, capfd, 29, 31, 32, 92, 94, 281, 283) == [
                False, True, False, False, True, False, True
            ]
    assert awaited.wait is None


def test_a_wait_inside_another_is_reported_alone_and_then_the_outer_one(
    awaited: Awaited, capfd: pytest.CaptureFixture[str]
) -> None:
    with awaited((3, 4), "apply a write"):
        outer = awaited.wait
        with awaited((3, 4), "apply a write"):
            assert awaited.wait is not outer
            assert reports(awaited, capfd, 31) == [True]
        assert awaited.wait is outer
        assert reports(awaited, capfd, 31, 32) == [True, False]


def test_a_wait_whose_last_rank_has_answered_is_not_reported(
    awaited: Awaited, capfd: pytest.CaptureFixture[str]
) -> None:
    with awaited(left := {3, 4}, "apply a write"):
        left.clear()
        assert reports(awaited, capfd, 31) == [False]
