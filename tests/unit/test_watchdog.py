"""What the watchdog decides, look by look: who never comes, who is waited for, and until when."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator

import pytest

from mpidist.observe.calls import START
from mpidist.observe.patience import TICK_SECONDS
from tests.watching import IDENTITY, World

Make = Callable[..., World]
# A look notes in which call a rank is, the next one sees it wait, and what two looks see counts.
AT_ONCE = 3
# A report waits for the answers of those it asks.
ANSWER = 2 * TICK_SECONDS


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    worlds: list[World] = []
    for name in ("MPIDIST_WARN_SECONDS", "MPIDIST_TIMEOUT"):
        monkeypatch.delenv(name, raising=False)

    def build(size: int = 2, *, ends: bool = True, numbers: dict[int, int] | None = None) -> World:
        worlds.append(World(monkeypatch, size, ends=ends, numbers=numbers))
        return worlds[-1]

    yield build
    for world in worlds:
        world.close()


@pytest.fixture
def dead() -> int:
    """The number of a process that has ended."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


@pytest.fixture
def stopped() -> Iterator[int]:
    """The number of a process that stands still."""
    process = subprocess.Popen(["sleep", "600"])
    os.kill(process.pid, signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)
    yield process.pid
    process.kill()
    process.wait()


def test_a_rank_that_has_ended_ends_the_job_at_once(make: Make) -> None:
    world = make()
    world.enter("barrier", 0)
    world.ranks[1].watchdog.note_end()
    world.run(20)
    assert (world.ended_by, world.ranks[0].ticks) == ([0], AT_ONCE)
    assert world.first_lines == ["rank 0 of 2 can never go on, the job ends: it waits for a rank that has ended"]
    assert "\n  rank 1 of 2 has come to its end\n" in world.said[0][1]


def test_a_rank_in_another_call_ends_the_job_at_once(make: Make) -> None:
    world = make(3)
    world.enter("barrier", 0, 2)
    world.enter("save", 1)
    world.run(20)
    assert (world.ended_by, world.ranks[0].ticks) == ([0], AT_ONCE)
    assert world.first_lines == ["rank 0 of 3 can never go on, the job ends: the ranks are in different calls"]
    told = world.said[0][1].split("\n")
    # Who differs comes first of the others.
    assert told[1:4] == [
        "  rank 0 of 3 waits in barrier, call 1", "  rank 1 of 3 waits in save, call 1",
        "  rank 2 of 3 waits in barrier, call 1",
    ]


def test_a_death_is_left_to_the_end_of_jobs_where_that_is_on(make: Make, dead: int) -> None:
    world = make(numbers={1: dead})
    world.stop(1)
    world.enter("barrier", 0)
    world.run(20)
    assert (world.ended_by, world.said) == ([], [])


@pytest.mark.parametrize("late", [0, 1])
def test_a_death_is_told_where_nothing_ends_the_job(make: Make, dead: int, late: int) -> None:
    """A dead rank before this one has not said anything, and does not speak first."""
    world = make(ends=False, numbers={late: dead})
    world.stop(late)
    world.enter("barrier", 1 - late)
    world.run(20)
    assert world.first_lines == [f"rank {1 - late} of 2 can never go on, and waits: it waits for a rank that has ended"]
    assert world.ranks[1 - late].ticks > AT_ONCE
    assert f"rank {late} of 2 has died" in world.said[0][1]


def test_a_second_reason_is_told_after_a_first(make: Make) -> None:
    """Once each; where nothing ends the job."""
    world = make(3, ends=False)
    world.enter("barrier", 0)
    world.ranks[2].watchdog.note_end()
    world.run(20)
    assert len(world.said) == 1
    world.ranks[1].watchdog.note_end()
    world.run(9)
    assert world.first_lines == ["rank 0 of 3 can never go on, and waits: it waits for a rank that has ended"] * 2
    assert "rank 1 of 3 has come to its end" in world.said[1][1]


def test_the_same_reason_in_a_later_call_is_told_again(make: Make) -> None:
    world = make(ends=False)
    world.ranks[1].watchdog.note_end()
    for count in (1, 2):
        world.enter("barrier", 0)
        world.run(5)
        assert len(world.said) == count
        world.leave(0)
    assert "waits in barrier, call 2" in world.said[1][1]


def test_what_is_seen_in_one_look_alone_does_not_count(make: Make) -> None:
    world = make()
    for name in ("barrier", "save"):
        world.enter(name, 0)
        world.enter("save", 1)
        # The second look sees them in different calls, the third one would end the job.
        world.run((AT_ONCE - 1) * TICK_SECONDS)
        world.leave(0, 1)
        world.run(TICK_SECONDS)
    assert (world.ended_by, world.said) == ([], [])


def test_a_reason_that_changes_counts_anew(make: Make) -> None:
    world = make(3)
    world.enter("barrier", 0)
    world.enter("save", 1)
    world.run(2 * TICK_SECONDS)
    world.enter("restore", 2)
    world.run(TICK_SECONDS)
    assert not world.is_over
    world.run(20 * TICK_SECONDS)
    assert world.ended_by == [0]
    assert world.ranks[0].ticks == AT_ONCE + 1


def test_a_rank_in_no_call_is_waited_for_and_told_of_ever_more_rarely(make: Make) -> None:
    world = make()
    world.enter("barrier", 0)
    world.run(300)
    assert world.ended_by == []
    assert world.times == [30 + ANSWER, 90 + ANSWER, 270 + ANSWER]
    assert world.first_lines == [f"rank 0 of 2 has waited {time} s for 1 of 2 ranks" for time in (30, 90, 270)]
    assert "\n  rank 1 of 2 is outside any call" in world.said[0][1]


def test_a_rank_that_comes_at_last_ends_the_wait(make: Make) -> None:
    world = make()
    world.enter("barrier", 0)
    world.run(40)
    assert world.ranks[0].page.read()["missing"]
    world.enter("barrier", 1)
    world.leave(0, 1)
    world.run(2 * TICK_SECONDS)
    # Others do not go by what it was in.
    assert world.ranks[0].page.read() == {}
    world.enter("barrier", 0)
    begin = world.clock.now() - world.begin
    world.run(100)
    # The next wait has a time of its own.
    assert len(world.said) == 3
    assert 30 <= world.said[1][0] - begin <= 30 + ANSWER + 2 * TICK_SECONDS
    assert world.first_lines[1].startswith("rank 0 of 2 has waited 30 s")


def test_a_rank_that_comes_while_it_is_asked_is_not_told_of(make: Make) -> None:
    world = make()
    world.enter("barrier", 0)
    world.run(TICK_SECONDS + 30)
    assert world.ranks[1].page.asked
    world.enter("barrier", 1)
    world.run(20)
    assert world.said == []


@pytest.mark.parametrize("first", [1, 2])
def test_a_second_event_after_a_report_ends_the_job_at_once(make: Make, first: int) -> None:
    """A rank of which a report has told ends, or goes to another call."""
    world = make()
    world.enter("barrier", 0)
    world.run(40)
    looks = world.ranks[0].ticks
    if first == 1:
        world.ranks[1].watchdog.note_end()
    else:
        world.enter("save", 1)
    world.run(20)
    assert world.ended_by == [0]
    # It waits already, and the number of looks is what counts.
    assert world.ranks[0].ticks == looks + 2
    assert "can never go on" in world.first_lines[1]


@pytest.mark.parametrize(
    ("text", "first"), [("0", 0.5), ("-5", 0.5), ("0.5", 0.5), ("0.51", 1.0), ("1", 1.0), ("1.01", 1.5)]
)
def test_short_patience_counts_from_the_first_look(
    make: Make, monkeypatch: pytest.MonkeyPatch, text: str, first: float
) -> None:
    monkeypatch.setenv("MPIDIST_WARN_SECONDS", text)
    world = make()
    world.enter("barrier", 0)
    world.run(3)
    assert world.times[0] == first + ANSWER


def test_patience_without_an_end_tells_nothing_and_sees_who_never_comes(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MPIDIST_WARN_SECONDS", "inf")
    world = make()
    world.enter("barrier", 0)
    world.run(200)
    assert world.said == []
    world.ranks[1].watchdog.note_end()
    world.run(20)
    assert world.ended_by == [0]


LIMITS = {
    # Of the job, of the call, whether the call watches the time itself; when the job ends.
    "the job's": ("10", None, False, 10),
    "the call's": (None, 7.0, False, 7),
    "the call's before the job's": ("10", 7.0, False, 7),
    "the job's before the call's": ("5", 7.0, False, 5),
    "the job's beside a call that watches the time": ("10", 7.0, True, 10),
    "none in a call that watches the time": (None, 7.0, True, None),
    "none": ("0", None, False, None),
    "0 of a call": (None, 0.0, False, None),
}


@pytest.mark.parametrize("name", LIMITS)
def test_a_wait_has_the_limit_of_the_job_and_of_the_call(
    make: Make, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    job, call, is_timed, end = LIMITS[name]
    monkeypatch.setenv("MPIDIST_WARN_SECONDS", "1000")
    if job is not None:
        monkeypatch.setenv("MPIDIST_TIMEOUT", job)
    world = make()
    calls = world.calls[0]
    calls.limited(call).enter("save")
    calls.is_timed = is_timed
    if end is None:
        world.run(200)
        assert (world.ended_by, world.said) == ([], [])
        return
    # A wait of just so long is none that is longer.
    world.run(TICK_SECONDS + end)
    assert not world.ranks[1].page.asked
    world.run(3)
    assert world.ended_by == [0]
    assert world.first_lines == [
        f"rank 0 of 2 has waited {end + TICK_SECONDS:.0f} s for 1 of 2 ranks, the limit is {end:g} s, the job ends"
    ]


def test_the_limit_of_a_call_is_not_that_of_the_next_one(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPIDIST_WARN_SECONDS", "1000")
    world = make()
    limited = world.calls[0].limited(2.0)
    limited.enter("save")
    world.run(1)
    limited.leave()
    world.enter("barrier", 0)
    world.run(100)
    assert world.ended_by == []


@pytest.mark.parametrize("is_first", [True, False])
def test_the_limit_of_a_call_holds_while_it_waits_in_another_one(
    make: Make, monkeypatch: pytest.MonkeyPatch, is_first: bool
) -> None:
    """On two communicators, whichever has been opened first: a look has seen both calls at once."""
    monkeypatch.setenv("MPIDIST_WARN_SECONDS", "1000")
    world = make()
    others = [one.open(world.ranks, IDENTITY + 1) for one in world.ranks]
    outer, inner = (world.calls[0], others[0]) if is_first else (others[0], world.calls[0])
    outer.limited(5.0).enter("save")
    inner.enter("barrier")
    world.run(10)
    assert world.ended_by == [0]
    assert "the limit is 5 s, the job ends" in world.first_lines[0]


def test_a_limit_says_nothing_where_nothing_ends_the_job(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPIDIST_TIMEOUT", "5")
    world = make(ends=False)
    world.enter("barrier", 0)
    world.run(60)
    assert world.first_lines == ["rank 0 of 2 has waited 30 s for 1 of 2 ranks"]


@pytest.mark.parametrize("switch", ["0", "1"])
def test_the_start_has_the_limit_too_unless_nothing_ends_the_job(
    make: Make, monkeypatch: pytest.MonkeyPatch, switch: str
) -> None:
    """Nobody can end the job then: this rank leaves, and the launcher ends the others."""
    monkeypatch.setenv("MPIDIST_ABORT", switch)
    monkeypatch.setenv("MPIDIST_TIMEOUT", "5")
    world = make(ends=False)
    calls = world.ranks[0].open(world.ranks, START)
    calls.enter("opening a communicator")
    world.run(5.5)
    assert world.said == []
    world.run(40)
    if switch == "0":
        assert (world.ranks[0].left, world.first_lines) == ([], ["rank 0 of 2 has waited 30 s for all ranks"])
    else:
        assert world.ranks[0].left == [1]
        assert world.first_lines == ["rank 0 of 2 has waited 6 s for all ranks, the job ends"]


def test_a_stopped_rank_is_named_and_goes_on(make: Make, stopped: int) -> None:
    world = make(numbers={1: stopped})
    world.stop(1)
    world.enter("barrier", 0)
    world.run(40)
    assert len(world.said) == 1
    assert f"rank 1 of 2 is stopped: `kill -CONT {stopped}` lets it go on" in world.said[0][1]
    world.go_on(1)
    world.enter("barrier", 1)
    world.leave(0, 1)
    world.run(100)
    assert len(world.said) == 1


def test_a_rank_that_is_stopped_in_the_call_is_named_though_all_have_come(make: Make, stopped: int) -> None:
    world = make(3, numbers={2: stopped})
    world.enter("barrier", 0, 1, 2)
    world.stop(2)
    world.run(40)
    assert world.first_lines == ["rank 0 of 3 has waited 30 s though all ranks have come"]
    assert f"rank 2 of 3 is stopped: `kill -CONT {stopped}`" in world.said[0][1]
    assert "a rank is stopped in the call" in world.said[0][1]


def test_a_rank_that_holds_the_interpreter_is_told_from_one_that_is_stopped(make: Make) -> None:
    world = make()
    world.stop(1)
    world.enter("barrier", 0)
    world.run(40)
    assert "rank 1 of 2 holds the interpreter, or gets no core" in world.said[0][1]


def test_the_first_of_the_waiting_ranks_tells_for_all(make: Make) -> None:
    world = make(4)
    world.enter("barrier", 1, 2, 3)
    world.run(40)
    assert world.first_lines == ["rank 1 of 4 has waited 30 s for 1 of 4 ranks"]


def test_another_one_tells_where_the_first_one_is_stopped(make: Make, stopped: int) -> None:
    world = make(4, numbers={0: stopped})
    world.enter("barrier", 0, 1, 2)
    world.run(10)
    world.stop(0)
    world.run(30)
    assert world.first_lines == ["rank 1 of 4 has waited 30 s for 1 of 4 ranks"]


@pytest.mark.parametrize("size", [2, 3, 5])
def test_one_of_several_ranks_ends_the_job_at_the_limit(
    make: Make, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setenv("MPIDIST_TIMEOUT", "10")
    world = make(size)
    # The last rank has waited for the longest time.
    for order in range(size - 1, 0, -1):
        world.enter("barrier", order)
        world.run(0.7)
    world.run(40)
    assert world.ended_by == [1]
    assert len(world.said) == 1
    assert f"for 1 of {size} ranks, the limit is 10 s" in world.first_lines[0]


def test_another_rank_ends_the_job_where_the_first_one_does_not(make: Make) -> None:
    """The first rank has no limit, and speaks first of those that have one."""
    world = make(3)
    world.enter("barrier", 1)
    world.calls[2].limited(3.0).enter("barrier")
    world.run(6)
    assert world.ended_by == []
    world.run(10)
    assert world.ended_by == [2]


def test_a_rank_that_comes_while_another_waits_for_its_turn_ends_nothing(make: Make) -> None:
    world = make(3)
    world.enter("barrier", 1)
    world.calls[2].limited(3.0).enter("barrier")
    world.run(6)
    world.enter("barrier", 0)
    world.leave(0, 1, 2)
    world.run(40)
    assert (world.ended_by, world.said) == ([], [])


@pytest.mark.parametrize(("late", "listed"), [(7, 7), (8, 8), (9, 8), (20, 8)])
def test_a_report_lists_eight_ranks_and_counts_the_others(make: Make, late: int, listed: int) -> None:
    world = make(late + 1)
    world.enter("barrier", 0)
    world.run(40)
    text = world.said[0][1]
    assert text.startswith(f"rank 0 of {late + 1} has waited 30 s for {late} of {late + 1} ranks\n")
    assert text.count(" is outside any call") == listed
    assert (f"\n  and {late - listed} more ranks\n" in text) == (late > listed)


def test_a_job_that_stood_still_goes_on_with_the_time_it_had(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """As under `scontrol suspend`: no rank has waited in this time."""
    monkeypatch.setenv("MPIDIST_TIMEOUT", "60")
    world = make()
    world.enter("barrier", 0)
    world.run(10)
    for count in (1, 2):
        for order in (0, 1):
            world.stop(order)
        world.run(3600)
        for order in (0, 1):
            world.go_on(order)
        world.run(5)
        assert (world.ended_by, world.said) == ([], []), count
    # 20 of 60 seconds are over.
    world.run(39)
    assert world.ended_by == []
    world.run(4)
    assert world.ended_by == [0]


def test_who_is_told_to_end_does(make: Make) -> None:
    world = make(3)
    world.run(2)
    world.ranks[1].watchdog.end_others()
    assert [one.left[:1] for one in world.ranks] == [[1], [], [1]]


def test_a_rank_answers_who_asks_and_forgets_that(make: Make) -> None:
    world = make()
    world.run(2)
    assert world.ranks[1].page.read() == {}
    world.ranks[1].peer.ask()
    world.run(2 * TICK_SECONDS)
    assert world.ranks[1].page.read()["stack"]
    world.run(2.5)
    assert world.ranks[1].page.read()
    world.run(TICK_SECONDS)
    assert world.ranks[1].page.read() == {}
    # A second question is answered like the first one.
    world.ranks[1].peer.ask()
    world.run(2 * TICK_SECONDS)
    assert world.ranks[1].page.read()["stack"]


def test_what_else_is_looked_at_is_called_at_each_look_as_long_as_it_is_there(make: Make) -> None:
    class Looker:
        def __init__(self) -> None:
            self.times: list[float] = []

        def look(self, now: float) -> None:
            self.times.append(now)

    world, looker, other = make(1), Looker(), Looker()
    for one in (looker, other):
        world.ranks[0].watchdog.look_also(one.look)
    world.run(1)
    times = looker.times
    del looker, one
    world.run(1)
    assert len(times) == 2
    assert len(other.times) == 4


def test_a_slow_look_is_no_standstill(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPIDIST_TIMEOUT", "60")
    world = make()
    world.enter("barrier", 0)
    for _ in range(22):
        # The rank gets its core for half a second in two.
        world.stop(0)
        world.run(1.5)
        world.go_on(0)
        world.run(TICK_SECONDS)
    assert world.first_lines[0].startswith("rank 0 of 2 has waited 30 s")
    world.run(20)
    assert world.ended_by == [0]
