"""Several ranks wait: who of them reports, and who ends the job."""

from __future__ import annotations

import pytest

from tests.helpers.watching import MakeWorld


def test_the_first_of_the_waiting_ranks_tells_for_all(make_world: MakeWorld) -> None:
    world = make_world(4)
    world.enter("barrier", 1, 2, 3)
    world.run(40)
    assert world.first_lines == ["rank 1 of 4 has waited 30 s for 1 of 4 ranks"]


def test_another_one_tells_where_the_first_one_is_stopped(make_world: MakeWorld, stopped_process: int) -> None:
    world = make_world(4, numbers={0: stopped_process})
    world.enter("barrier", 0, 1, 2)
    world.run(10)
    world.stop(0)
    world.run(30)
    assert world.first_lines == ["rank 1 of 4 has waited 30 s for 1 of 4 ranks"]


@pytest.mark.parametrize("size", [2, 3, 5])
def test_one_of_several_ranks_ends_the_job_at_the_limit(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setenv("MPIDIST_TIMEOUT", "10")
    world = make_world(size)
    # The last rank has waited for the longest time.
    for order in range(size - 1, 0, -1):
        world.enter("barrier", order)
        world.run(0.7)
    world.run(40)
    assert world.ended_by == [1]
    assert len(world.said) == 1
    assert f"for 1 of {size} ranks, the limit is 10 s" in world.first_lines[0]


def test_another_rank_ends_the_job_where_the_first_one_does_not(make_world: MakeWorld) -> None:
    """The first rank has no limit, and speaks first of those that have one."""
    world = make_world(3)
    world.enter("barrier", 1)
    world.calls[2].limited(3.0).enter("barrier")
    world.run(6)
    assert world.ended_by == []
    world.run(10)
    assert world.ended_by == [2]


@pytest.mark.parametrize("is_late", [True, False])
def test_a_call_that_ends_while_a_rank_waits_for_its_turn_ends_no_job(make_world: MakeWorld, is_late: bool) -> None:
    """A rank comes at last, or all have come and go on."""
    world = make_world(3)
    world.enter("barrier", 1)
    world.calls[2].limited(3.0).enter("barrier")
    if not is_late:
        world.enter("barrier", 0)
    world.run(6)
    assert world.said == []
    if is_late:
        world.enter("barrier", 0)
    world.leave(0, 1, 2)
    world.run(40)
    assert (world.ended_by, world.said) == ([], [])


@pytest.mark.parametrize(("late", "listed"), [(7, 7), (8, 8), (9, 8), (20, 8)])
def test_a_report_lists_eight_ranks_and_counts_the_others(make_world: MakeWorld, late: int, listed: int) -> None:
    world = make_world(late + 1)
    world.enter("barrier", 0)
    world.run(40)
    text = world.said[0][1]
    assert text.startswith(f"rank 0 of {late + 1} has waited 30 s for {late} of {late + 1} ranks\n")
    assert text.count(" is outside any call") == listed
    assert (f"\n  and {late - listed} more ranks\n" in text) == (late > listed)
