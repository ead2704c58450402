"""What the watchdog decides, look by look: who can never come, and what a report says."""

from __future__ import annotations

import pytest

from mpidist.recorder.time_limits import TICK_SECONDS
from tests.helpers.watching import MakeWorld

# A look notes in which call a rank is, the next one sees it wait, and what two looks see counts.
AT_ONCE = 3


def test_a_rank_that_has_ended_ends_the_job_at_once(make_world: MakeWorld) -> None:
    world = make_world()
    world.enter("barrier", 0)
    world.ranks[1].watchdog.note_end()
    world.run(20)
    assert (world.ended_by, world.ranks[0].ticks) == ([0], AT_ONCE)
    assert world.first_lines == ["rank 0 of 2 is deadlocked, the job ends: it waits for a rank that has ended"]
    assert "\n  rank 1 of 2 has ended\n" in world.said[0][1]


def test_a_rank_in_another_call_ends_the_job_at_once(make_world: MakeWorld) -> None:
    world = make_world(3)
    world.enter("barrier", 0, 2)
    world.enter("save", 1)
    world.run(20)
    assert (world.ended_by, world.ranks[0].ticks) == ([0], AT_ONCE)
    assert world.first_lines == ["rank 0 of 3 is deadlocked, the job ends: the ranks are in different calls"]
    told = world.said[0][1].split("\n")
    # Who differs comes first of the others.
    assert told[1:4] == [
        "  rank 0 of 3 waits in barrier, call 1", "  rank 1 of 3 waits in save, call 1",
        "  rank 2 of 3 waits in barrier, call 1",
    ]


def test_a_death_is_left_to_the_end_of_jobs_where_that_is_on(make_world: MakeWorld, dead_process: int) -> None:
    world = make_world(numbers={1: dead_process})
    world.stop(1)
    world.enter("barrier", 0)
    world.run(20)
    assert (world.ended_by, world.said) == ([], [])


@pytest.mark.parametrize("late", [0, 1])
def test_a_death_is_told_where_nothing_ends_the_job(make_world: MakeWorld, dead_process: int, late: int) -> None:
    """A dead rank before this one has not said anything, and does not speak first."""
    world = make_world(ends=False, numbers={late: dead_process})
    world.stop(late)
    world.enter("barrier", 1 - late)
    world.run(20)
    assert world.first_lines == [f"rank {1 - late} of 2 is deadlocked, and waits: it waits for a rank that has ended"]
    assert world.ranks[1 - late].ticks > AT_ONCE
    assert f"rank {late} of 2 has died" in world.said[0][1]


def test_a_second_reason_is_told_after_a_first(make_world: MakeWorld) -> None:
    """Once each; where nothing ends the job."""
    world = make_world(3, ends=False)
    world.enter("barrier", 0)
    world.ranks[2].watchdog.note_end()
    world.run(20)
    assert len(world.said) == 1
    world.ranks[1].watchdog.note_end()
    world.run(9)
    assert world.first_lines == ["rank 0 of 3 is deadlocked, and waits: it waits for a rank that has ended"] * 2
    assert "rank 1 of 3 has ended" in world.said[1][1]


def test_the_same_reason_in_a_later_call_is_told_again(make_world: MakeWorld) -> None:
    world = make_world(ends=False)
    world.ranks[1].watchdog.note_end()
    for count in (1, 2):
        world.enter("barrier", 0)
        world.run(5)
        assert len(world.said) == count
        world.leave(0)
    assert "waits in barrier, call 2" in world.said[1][1]


def test_what_is_seen_in_one_look_alone_does_not_count(make_world: MakeWorld) -> None:
    world = make_world()
    for name in ("barrier", "save"):
        world.enter(name, 0)
        world.enter("save", 1)
        # The second look sees them in different calls, the third one would end the job.
        world.run((AT_ONCE - 1) * TICK_SECONDS + 0.3)
        world.leave(0, 1)
        world.run(TICK_SECONDS - 0.3)
    assert (world.ended_by, world.said) == ([], [])


def test_a_reason_that_changes_counts_anew(make_world: MakeWorld) -> None:
    world = make_world(3)
    world.enter("barrier", 0)
    world.enter("save", 1)
    world.run(2 * TICK_SECONDS)
    world.enter("restore", 2)
    world.run(TICK_SECONDS)
    assert not world.is_over
    world.run(20 * TICK_SECONDS)
    assert world.ended_by == [0]
    assert world.ranks[0].ticks == AT_ONCE + 1


@pytest.mark.parametrize("first", [1, 2])
def test_a_second_event_after_a_report_ends_the_job_at_once(make_world: MakeWorld, first: int) -> None:
    """A rank of which a report has told ends, or goes to another call."""
    world = make_world()
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
    assert "is deadlocked" in world.first_lines[1]


def test_a_stopped_rank_is_named_and_goes_on(make_world: MakeWorld, stopped_process: int) -> None:
    world = make_world(numbers={1: stopped_process})
    world.stop(1)
    world.enter("barrier", 0)
    world.run(40)
    assert len(world.said) == 1
    assert f"rank 1 of 2 is stopped: `kill -CONT {stopped_process}` resumes it" in world.said[0][1]
    world.go_on(1)
    world.enter("barrier", 1)
    world.leave(0, 1)
    world.run(100)
    assert len(world.said) == 1


def test_a_rank_that_is_stopped_in_the_call_is_named_though_all_have_come(
    make_world: MakeWorld, stopped_process: int
) -> None:
    world = make_world(3, numbers={2: stopped_process})
    world.enter("barrier", 0, 1, 2)
    world.stop(2)
    world.run(40)
    assert world.first_lines == ["rank 0 of 3 has waited 30 s though all ranks have arrived"]
    assert f"rank 2 of 3 is stopped: `kill -CONT {stopped_process}`" in world.said[0][1]
    assert "a rank is stopped in the call" in world.said[0][1]


def test_a_rank_that_holds_the_interpreter_is_told_from_one_that_is_stopped(make_world: MakeWorld) -> None:
    world = make_world()
    world.stop(1)
    world.enter("barrier", 0)
    world.run(40)
    assert "rank 1 of 2 holds the interpreter lock (GIL), or gets no core" in world.said[0][1]


def test_who_is_told_to_end_does(make_world: MakeWorld) -> None:
    world = make_world(3)
    world.run(2)
    world.ranks[1].watchdog.end_others()
    assert [one.left[:1] for one in world.ranks] == [[1], [], [1]]


def test_a_rank_answers_who_asks_and_forgets_that(make_world: MakeWorld) -> None:
    world = make_world()
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


def test_what_else_is_looked_at_is_called_at_each_look_as_long_as_it_is_there(make_world: MakeWorld) -> None:
    class Looker:
        def __init__(self) -> None:
            self.times: list[float] = []

        def look(self, now: float) -> None:
            self.times.append(now)

    world, looker, other = make_world(1), Looker(), Looker()
    for one in (looker, other):
        world.ranks[0].watchdog.look_also(one.look)
    world.run(1)
    times = looker.times
    del looker, one
    world.run(1)
    assert len(times) == 2
    assert len(other.times) == 4
