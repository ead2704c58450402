"""The chief's waits: what is reported, and when."""

from __future__ import annotations

import time

import pytest

from mpidist.coordinator.closures import Closures
from mpidist.coordinator.waits import Waits
from mpidist.coordinator.work import Name, Rules, Work
from mpidist.observe.peers import Key
from mpidist.observe.watchdog import WATCHDOG
from mpidist.serving.commits import Commits
from mpidist.serving.messages import Failed

WORKERS = (1, 2)


def work(number: int, label: str) -> Work:
    return Work(Name("function", number, b"code"), b"arguments", label=label)


@pytest.fixture
def closures() -> Closures:
    closures = Closures(Commits(0, (3,), lambda *_: 0.1))
    for rank in WORKERS:
        closures.joined(rank, 0.0)
    return closures


@pytest.fixture
def waits(closures: Closures, monkeypatch: pytest.MonkeyPatch) -> Waits:
    monkeypatch.setenv("MPIDIST_WARN_SECONDS", "30")
    monkeypatch.setattr("mpidist.coordinator.waits._SHOW_SECONDS", 0.0)
    return Waits(closures, lambda rank: (f"worker {rank - 1}", Key("a", rank, "")))


def reports(waits: Waits, capfd: pytest.CaptureFixture[str], *times: float) -> list[str]:
    """What each look at one of these times reports."""
    told = []
    for now in times:
        waits.look(now)
        told.append(capfd.readouterr().err)
    return told


def test_a_long_closure_is_reported_once_and_then_ever_more_rarely(
    closures: Closures, waits: Waits, capfd: pytest.CaptureFixture[str]
) -> None:
    begin = time.monotonic()
    closures.schedule(work(1, "train.step"), Rules(), begin)
    with waits:
        waits.show()
        times = 29, 32, 33, 90, 100, 101, 290
        told = reports(waits, capfd, *(begin + seconds for seconds in times))
    assert [bool(text) for text in told] == [False, True, False, False, True, False, False]
    assert "has waited 32 s for functions of workers\n" in told[1]
    assert "  worker 0 has run closure 1 of train.step, attempt 1 for 32 s:\n" in told[1]
    assert "worker 1 has run" not in told[1]
    assert "MPIDIST_JOB_DIR" in told[1], "nothing is seen of a rank that is not known"


def test_only_a_wait_is_reported(closures: Closures, waits: Waits, capfd: pytest.CaptureFixture[str]) -> None:
    begin = time.monotonic()
    # It has run for an hour, and the chief did something else.
    closures.schedule(work(1, "step"), Rules(), begin - 3600)
    assert reports(waits, capfd, begin + 100) == [""]
    with waits:
        waits.show()
        first, second = reports(waits, capfd, begin + 29, begin + 32)
    assert first == ""
    assert "closure 1 of step, attempt 1 for 3632 s" in second
    assert reports(waits, capfd, begin + 10000) == [""]


def test_short_closures_are_not_reported_however_many(
    closures: Closures, waits: Waits, capfd: pytest.CaptureFixture[str]
) -> None:
    begin = time.monotonic()
    closures.schedule(work(1, "step"), Rules(on_error="keep"), begin)
    with waits:
        for number in range(1, 5):
            waits.show()
            assert reports(waits, capfd, begin + 20 * number) == [""]
            closures.take(1 + (number + 1) % 2, Failed(number, 1, b"", ""), begin + 20 * number)
            closures.schedule(work(1, "step"), Rules(on_error="keep"), begin + 20 * number)


def test_a_value_of_a_worker_that_is_made_for_long_is_reported(
    closures: Closures, waits: Waits, capfd: pytest.CaptureFixture[str]
) -> None:
    begin = time.monotonic()
    closures.resources.build(work(1, "read_all"))
    with waits:
        waits.show()
        (told,) = reports(waits, capfd, begin + 32)
    assert "worker 1 has run read_all, which makes a value of the worker's own for 3" in told


@pytest.mark.parametrize("may_end", [True, False])
def test_a_time_limit_ends_the_job_where_that_is_not_switched_off(
    closures: Closures, waits: Waits, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, may_end: bool
) -> None:
    ends: list[int] = []
    monkeypatch.setenv("MPIDIST_TIMEOUT", "10")
    monkeypatch.setattr(WATCHDOG, "end", (lambda: ends.append(1)) if may_end else None)
    begin = time.monotonic()
    closures.schedule(work(1, "step"), Rules(), begin)
    with waits:
        waits.show()
        early, late = reports(waits, capfd, begin + 9, begin + 12)
    assert early == ""
    assert ("the limit is 10 s, the job ends\n" in late) == may_end
    assert len(ends) == may_end
