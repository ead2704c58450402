"""The chief's waits: what is reported, and when."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mpidist.coordinator.waits import ChiefWaits
from mpidist.failures.peers import Key
from mpidist.failures.watchdog import WATCHDOG
from mpidist.parameter_server.protocol.messages import Failed, Finished, Prepared
from mpidist.parameter_server.queue.closures import Closures
from mpidist.parameter_server.queue.commits import Commits
from mpidist.parameter_server.queue.work import Name, Rules, Work
from tests.helpers.clocks import SetClock

WORKERS = (1, 2)


def work(number: int, label: str) -> Work:
    return Work(Name("function", number, b"code"), b"arguments", label=label)


@pytest.fixture
def clock() -> SetClock:
    return SetClock()


@pytest.fixture
def closures() -> Closures:
    closures = Closures(Commits(0, (3, 4), lambda *_: 0.1))
    for rank in WORKERS:
        closures.joined(rank, 0.0)
    return closures


class Places:
    """The places of ranks. Who asks gives others the time to go on.

    Attributes:
        meanwhile: Called when somebody asks.
    """

    def __init__(self) -> None:
        self.meanwhile: Callable[[], object] = bool

    def of(self, rank: int) -> tuple[str, Key]:
        self.meanwhile()
        return f"worker {rank - 1}" if rank in WORKERS else f"server {rank - 3}", Key("a", rank, "")


@pytest.fixture
def places() -> Places:
    return Places()


@pytest.fixture
def waits(closures: Closures, clock: SetClock, places: Places, monkeypatch: pytest.MonkeyPatch) -> ChiefWaits:
    monkeypatch.setenv("MPIDIST_WARN_SECONDS", "30")
    return ChiefWaits(closures, places.of, clock=clock)


def show(waits: ChiefWaits, clock: SetClock, now: float) -> None:
    """The chief shows at this time what others do."""
    clock.now = now
    waits.show()


def reports(waits: ChiefWaits, capfd: pytest.CaptureFixture[str], *times: float) -> list[str]:
    """What each look at one of these times reports."""
    told = []
    for now in times:
        waits.look(now)
        told.append(capfd.readouterr().err)
    return told


def test_a_long_closure_is_reported_once_and_then_ever_more_rarely(
    closures: Closures, waits: ChiefWaits, clock: SetClock, capfd: pytest.CaptureFixture[str]
) -> None:
    begin = clock.now
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


def test_only_a_wait_is_reported(
    closures: Closures, waits: ChiefWaits, clock: SetClock, capfd: pytest.CaptureFixture[str]
) -> None:
    begin = clock.now
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
    closures: Closures, waits: ChiefWaits, clock: SetClock, capfd: pytest.CaptureFixture[str]
) -> None:
    begin = clock.now
    closures.schedule(work(1, "step"), Rules(on_error="keep"), begin)
    with waits:
        for number in range(1, 5):
            show(waits, clock, begin + 20 * (number - 1) + 1)
            assert reports(waits, capfd, begin + 20 * number) == [""]
            closures.take(1 + (number + 1) % 2, Failed(number, 1, b"", ""), begin + 20 * number)
            closures.schedule(work(1, "step"), Rules(on_error="keep"), begin + 20 * number)


def test_a_value_of_a_worker_that_is_made_for_long_is_reported(
    closures: Closures, waits: ChiefWaits, clock: SetClock, capfd: pytest.CaptureFixture[str]
) -> None:
    begin = clock.now
    closures.resources.build(work(1, "read_all"))
    with waits:
        waits.show()
        (told,) = reports(waits, capfd, begin + 32)
    assert "worker 1 has run read_all, which makes a value of the worker's own for 3" in told


@pytest.mark.parametrize("may_end", [True, False])
def test_a_time_limit_ends_the_job_where_that_is_not_switched_off(
    closures: Closures, waits: ChiefWaits, clock: SetClock, capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch, may_end: bool,
) -> None:
    ends: list[int] = []
    monkeypatch.setenv("MPIDIST_TIMEOUT", "10")
    monkeypatch.setattr(WATCHDOG, "end", (lambda: ends.append(1)) if may_end else None)
    begin = clock.now
    closures.schedule(work(1, "step"), Rules(), begin)
    with waits:
        waits.show()
        early, late = reports(waits, capfd, begin + 9, begin + 12)
    assert early == ""
    assert ("the limit is 10 s, the job ends\n" in late) == may_end
    assert len(ends) == may_end


def test_a_closure_that_becomes_long_later_is_reported_then(
    closures: Closures, waits: ChiefWaits, clock: SetClock, capfd: pytest.CaptureFixture[str]
) -> None:
    """Though the next report of the first one is still to come."""
    begin = clock.now
    closures.schedule(work(1, "first"), Rules(), begin)
    with waits:
        waits.show()
        assert "worker 0 has run closure 1 of first" in reports(waits, capfd, begin + 32)[0]
        closures.schedule(work(2, "second"), Rules(), begin + 40)
        show(waits, clock, begin + 41)
        early, late = reports(waits, capfd, begin + 69, begin + 71)
    assert early == ""
    assert "worker 1 has run closure 2 of second, attempt 1 for 31 s" in late


@pytest.mark.parametrize("what", ["all have ended", "one has ended", "another wait"])
def test_what_ends_while_the_report_is_made_is_not_reported(
    closures: Closures, waits: ChiefWaits, clock: SetClock, places: Places, capfd: pytest.CaptureFixture[str], what: str
) -> None:
    begin = clock.now
    for label in ("first", "second"):
        closures.schedule(work(1, label), Rules(), begin)

    def go_on() -> None:
        places.meanwhile = bool
        if what == "another wait":
            waits.__exit__()
            clock.forward(1)
            waits.__enter__()
        else:
            for number in (1, 2) if what == "all have ended" else (1,):
                closures.take(number, Finished(number, 1, (), (), b""), begin + 32)
        show(waits, clock, begin + 33)

    with waits:
        waits.show()
        places.meanwhile = go_on
        (told,) = reports(waits, capfd, begin + 32)
    assert bool(told) == (what == "one has ended"), told


def test_the_lack_of_workers_is_reported_by_its_own_time_each_time(
    closures: Closures, waits: ChiefWaits, clock: SetClock, capfd: pytest.CaptureFixture[str]
) -> None:
    begin = clock.now
    for rank in WORKERS:
        closures.lost(rank, begin)
    with waits:
        # Each look of the chief finds none.
        for now in (0, 20, 31):
            show(waits, clock, begin + now)
        assert "has waited 32 s for a worker that joins\n" in reports(waits, capfd, begin + 32)[0]
        # One joins, and is lost.
        closures.joined(5, begin + 50)
        show(waits, clock, begin + 51)
        closures.lost(5, begin + 100)
        show(waits, clock, begin + 101)
        told = reports(waits, capfd, begin + 130, begin + 132)
    assert [bool(text) for text in told] == [False, True]


def test_one_of_two_that_runs_over_the_limit_ends_the_job(
    closures: Closures, waits: ChiefWaits, clock: SetClock, capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ends: list[int] = []
    monkeypatch.setenv("MPIDIST_TIMEOUT", "10")
    monkeypatch.setattr(WATCHDOG, "end", lambda: ends.append(1))
    begin = clock.now
    closures.schedule(work(1, "first"), Rules(), begin)
    closures.schedule(work(2, "second"), Rules(), begin + 5)
    with waits:
        show(waits, clock, begin + 6)
        # The wait has begun at the same time as the first function.
        (told,) = reports(waits, capfd, begin + 12)
    assert ends == [1]
    assert "worker 0 has run" in told
    assert "worker 1 has run" not in told


def test_a_server_that_does_not_answer_is_named_and_no_other(
    closures: Closures, waits: ChiefWaits, clock: SetClock, capfd: pytest.CaptureFixture[str]
) -> None:
    begin = clock.now
    closures.schedule(work(1, "step"), Rules(), begin)
    closures.take(1, Finished(1, 1, (3, 4), (), b""), begin + 5)
    closures.take(4, Prepared(1, 1), begin + 6)
    with waits:
        show(waits, clock, begin + 6)
        (told,) = reports(waits, capfd, begin + 36)
    assert "has waited 36 s for servers\n  server 0 (process 3 on a) has not answered for 31 s:\n" in told
    assert "server 1" not in told
