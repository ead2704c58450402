"""Reasons why a rank waits in vain, and how often they are seen before they count."""

from __future__ import annotations

import numpy as np
import pytest

from mpidist.comm.calls.order import CallOrder
from mpidist.options import ReduceOp
from mpidist.recorder.time_limits import TICK_SECONDS
from tests.helpers.watching import IDENTITY, MakeWorld, World

# After the look that notes the call.
AT_ONCE, NAMESAKE_LOOKS, MANY_LOOKS, ERROR_LOOKS = 1 + 2, 1 + 4, 1 + 5, 1 + 8


def test_ranks_that_wait_for_one_another_on_two_communicators_end_the_job(make_world: MakeWorld) -> None:
    world = make_world()
    others = [one.open(world.ranks, IDENTITY + 1) for one in world.ranks]
    world.enter("barrier", 0)
    others[1].enter("barrier")
    world.run(20)
    assert world.ended_by == [0]
    # It takes a look until the other one has written for whom it waits.
    assert world.ranks[0].ticks == AT_ONCE + 1
    assert "the ranks wait for one another in different calls" in world.first_lines[0]


def test_a_rank_that_waits_for_one_that_could_come_is_in_no_circle(make_world: MakeWorld) -> None:
    world = make_world(3)
    others = [one.open(world.ranks[1:], IDENTITY + 1) for one in world.ranks[1:]]
    # Rank 0 waits for rank 1, that one for rank 2, and rank 2 computes.
    world.enter("barrier", 0)
    others[0].enter("barrier")
    world.run(20)
    assert (world.ended_by, world.said) == ([], [])
    # A second one waits: now nobody can go on.
    world.enter("barrier", 2)
    world.run(10)
    assert len(world.ended_by) == 1


def left_behind(world: World, *calls: object) -> None:
    """Rank 1 has left the call in which rank 0 is, and waits for it in the next one."""
    for rank in (0, 1):
        world.calls[rank].enter("all_reduce" if calls else "barrier", calls)
    world.leave(1)
    world.enter("barrier", 1)


def test_a_rank_whose_messages_are_lost_ends_the_job_when_patience_is_over(make_world: MakeWorld) -> None:
    world = make_world()
    left_behind(world)
    world.run(TICK_SECONDS + 30)
    assert world.said == []
    world.run(20)
    assert world.ended_by == [0]
    # That it waits is told before.
    assert "its messages went to another call" in world.first_lines[1]


def test_a_large_array_has_its_time_to_come(make_world: MakeWorld) -> None:
    world = make_world()
    # 800 MB take 80 s where a network is slow.
    left_behind(world, "all_reduce", ReduceOp.SUM, np.dtype("f8"), (100_000_000,))
    world.run(100)
    assert world.ended_by == []
    world.run(20)
    assert world.ended_by == [0]


@pytest.mark.parametrize("name", ["save", "restore"])
def test_a_call_that_does_more_than_move_messages_is_not_lost(make_world: MakeWorld, name: str) -> None:
    world = make_world()
    world.enter(name, 0, 1)
    world.leave(1)
    world.enter("barrier", 1)
    world.run(60)
    assert world.ended_by == []


def test_messages_are_not_lost_while_a_third_rank_may_still_send_them(make_world: MakeWorld) -> None:
    world = make_world(3)
    world.enter("barrier", 0, 1, 2)
    world.leave(1)
    world.enter("barrier", 1)
    # Rank 2 has left, too, and computes: it may be inside MPI.
    world.leave(2)
    world.run(60)
    assert world.ended_by == []
    world.enter("barrier", 2)
    world.run(10)
    assert world.ended_by == [0]


def test_a_rank_that_an_error_has_led_out_may_print_it_first(make_world: MakeWorld) -> None:
    world = make_world()
    world.enter("barrier", 0)
    world.enter("save", 1)
    world.calls[1].fail()
    world.run(20)
    assert (world.ended_by, world.ranks[0].ticks) == ([0], ERROR_LOOKS)


def test_a_rank_that_has_left_another_call_well_may_come(make_world: MakeWorld) -> None:
    world = make_world()
    world.enter("barrier", 0)
    world.enter("save", 1)
    world.leave(1)
    world.run(20)
    assert world.ended_by == []


def test_a_rank_that_has_shown_another_call_is_blamed_after_its_error_could_come(make_world: MakeWorld) -> None:
    world = make_world(3)
    told: list[int] = []
    world.ranks[0].let_end(lambda _: (told, "rank 2 has made another call"))
    world.enter("all_reduce", 0)
    world.run(5)
    assert not world.is_over
    told.append(2)
    looks = world.ranks[0].ticks
    world.run(20)
    assert (world.ended_by, world.ranks[0].ticks) == ([0], looks + ERROR_LOOKS - 1)
    assert world.first_lines == ["rank 0 of 3 is deadlocked, the job ends: rank 2 has made another call"]
    assert world.said[0][1].split("\n")[2].startswith("  rank 2 of 3 ")


def in_node_barrier(world: World) -> None:
    """Rank 0 waits in a barrier of its node's memory, again and again."""
    world.calls[0].in_barrier = world.clock.now()
    world.run(TICK_SECONDS / 5)


def test_who_waits_in_a_barrier_that_the_node_has_left_ends_the_job(make_world: MakeWorld) -> None:
    world = make_world()
    world.enter("all_reduce", 0, 1)
    for _ in range(20):
        in_node_barrier(world)
    assert world.ended_by == []
    world.leave(1)
    while not world.is_over and world.clock.now() - world.begin < 30:
        in_node_barrier(world)
    assert world.ended_by == [0]
    assert "other ranks have left this call before this part of it" in world.first_lines[0]


def test_who_has_left_the_barrier_of_the_node_is_not_held_for_waiting_there(make_world: MakeWorld) -> None:
    world = make_world()
    world.enter("all_reduce", 0, 1)
    for _ in range(20):
        in_node_barrier(world)
    world.leave(1)
    # It computes with what it has got.
    world.run(20)
    assert world.ended_by == []


def calls_of_one_name(world: World, *ranks: int, inside: str = "") -> None:
    """Ranks enter calls of one name that differ in the size of their arrays; under another one, if it is given."""
    for rank in ranks:
        order = CallOrder(world.calls[rank], ())
        if inside:
            world.calls[rank].enter(inside)
        order.enter("all_reduce", ReduceOp.SUM, np.ones(1 + rank))


@pytest.mark.parametrize("inside", ["", "assign"])
def test_calls_of_one_name_that_differ_end_the_job_when_the_last_rank_has_come(
    make_world: MakeWorld, inside: str
) -> None:
    """Until then all of them may meet, and say themselves that they differ."""
    world = make_world(3)
    calls_of_one_name(world, 0, 1, inside=inside)
    world.run(20)
    assert world.ended_by == []
    looks = world.ranks[0].ticks
    calls_of_one_name(world, 2, inside=inside)
    world.run(20)
    assert (world.ended_by, world.ranks[0].ticks) == ([0], looks + NAMESAKE_LOOKS - 1)
    assert "the ranks are in different calls" in world.first_lines[0]
    for rank in range(3) if not inside else ():
        assert f"(all_reduce SUM of float64 ({1 + rank},))" in world.said[0][1]


def test_the_same_call_of_another_strategy_ends_the_job(make_world: MakeWorld) -> None:
    world = make_world()
    for rank in (0, 1):
        world.calls[rank].limited(None, 1 + rank).enter("assign")
    world.run(20)
    assert world.ended_by == [0]
    assert "rank 1 of 2 waits in assign, call 1 (assign of strategy number 2)" in world.said[0][1]
