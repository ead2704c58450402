"""The watchdog's patience and its limits, look by look."""

from __future__ import annotations

import pytest

from mpidist.recorder.calls import START
from mpidist.recorder.time_limits import TICK_SECONDS
from tests.helpers.watching import IDENTITY, MakeWorld

# A report waits for the answers of those it asks.
ANSWER = 2 * TICK_SECONDS


def test_a_rank_in_no_call_is_waited_for_and_told_of_ever_more_rarely(make_world: MakeWorld) -> None:
    world = make_world()
    world.enter("barrier", 0)
    world.run(300)
    assert world.ended_by == []
    assert world.times == [30 + ANSWER, 90 + ANSWER, 270 + ANSWER]
    assert world.first_lines == [f"rank 0 of 2 has waited {time} s for 1 of 2 ranks" for time in (30, 90, 270)]
    assert "\n  rank 1 of 2 is outside any call" in world.said[0][1]


def test_a_rank_that_comes_at_last_ends_the_wait(make_world: MakeWorld) -> None:
    world = make_world()
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


def test_a_rank_that_goes_from_call_to_call_waits_in_none(make_world: MakeWorld) -> None:
    """No look sees it outside."""
    world = make_world()
    for _ in range(80):
        world.enter("barrier", 0)
        world.run(TICK_SECONDS)
        world.leave(0)
    assert world.said == []
    world.enter("barrier", 0)
    world.run(40)
    assert world.times == [40 + 30 + ANSWER]


def test_a_rank_that_comes_while_it_is_asked_is_not_told_of(make_world: MakeWorld) -> None:
    world = make_world()
    world.enter("barrier", 0)
    world.run(TICK_SECONDS + 30)
    assert world.ranks[1].page.asked
    world.enter("barrier", 1)
    world.run(20)
    assert world.said == []


@pytest.mark.parametrize(
    ("text", "first"), [("0", 0.5), ("-5", 0.5), ("0.5", 0.5), ("0.51", 1.0), ("1", 1.0), ("1.01", 1.5)]
)
def test_short_patience_counts_from_the_first_look(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch, text: str, first: float
) -> None:
    monkeypatch.setenv("MPIDIST_WARN_SECONDS", text)
    world = make_world()
    world.enter("barrier", 0)
    world.run(3)
    assert world.times[0] == first + ANSWER


def test_patience_without_an_end_tells_nothing_and_sees_who_never_comes(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MPIDIST_WARN_SECONDS", "inf")
    world = make_world()
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
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    job, call, is_timed, end = LIMITS[name]
    monkeypatch.setenv("MPIDIST_WARN_SECONDS", "1000")
    if job is not None:
        monkeypatch.setenv("MPIDIST_TIMEOUT", job)
    world = make_world()
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


def test_the_limit_of_a_call_is_not_that_of_the_next_one(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MPIDIST_WARN_SECONDS", "1000")
    world = make_world()
    limited = world.calls[0].limited(2.0)
    limited.enter("save")
    world.run(1)
    limited.leave()
    world.enter("barrier", 0)
    world.run(100)
    assert world.ended_by == []


@pytest.mark.parametrize("is_first", [True, False])
def test_the_limit_of_a_call_holds_while_it_waits_in_another_one(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch, is_first: bool
) -> None:
    """On two communicators, whichever has been opened first: a look has seen both calls at once."""
    monkeypatch.setenv("MPIDIST_WARN_SECONDS", "1000")
    world = make_world()
    others = [one.open(world.ranks, IDENTITY + 1) for one in world.ranks]
    outer, inner = (world.calls[0], others[0]) if is_first else (others[0], world.calls[0])
    outer.limited(5.0).enter("save")
    inner.enter("barrier")
    world.run(10)
    assert world.ended_by == [0]
    assert "the limit is 5 s, the job ends" in world.first_lines[0]


def test_a_limit_says_nothing_where_nothing_ends_the_job(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MPIDIST_TIMEOUT", "5")
    world = make_world(ends=False)
    world.enter("barrier", 0)
    world.run(60)
    assert world.first_lines == ["rank 0 of 2 has waited 30 s for 1 of 2 ranks"]


@pytest.mark.parametrize("switch", ["0", "1"])
def test_the_start_has_the_limit_too_unless_nothing_ends_the_job(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch, switch: str
) -> None:
    """Nobody can end the job then: this rank leaves, and the launcher ends the others."""
    monkeypatch.setenv("MPIDIST_ABORT", switch)
    monkeypatch.setenv("MPIDIST_TIMEOUT", "5")
    world = make_world(ends=False)
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


def test_a_job_that_stood_still_goes_on_with_the_time_it_had(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under `scontrol suspend`: no rank has waited in this time."""
    monkeypatch.setenv("MPIDIST_TIMEOUT", "60")
    world = make_world()
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


def test_a_slow_look_is_no_standstill(make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPIDIST_TIMEOUT", "60")
    world = make_world()
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
