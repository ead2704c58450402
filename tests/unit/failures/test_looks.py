"""What ranks that wait look at, by the number of ranks: a look costs, and few ranks of a host look."""

from __future__ import annotations

import collections

import pytest

from mpidist.failures import peers
from mpidist.failures.looks import FEW, Budget
from mpidist.recorder.rank_page import Page
from mpidist.recorder.time_limits import TICK_SECONDS
from tests.helpers.amounts import amount
from tests.helpers.watching import MakeWorld, TurnedClock, World

SECONDS = 60


class CostlyClock(TurnedClock):
    """A clock by which the core works, too, when the test says so."""

    worked = 0.0

    def cpu(self) -> float:
        """The time of the core."""
        return self.worked


def test_a_look_is_not_repeated_before_a_hundred_times_its_time_has_passed() -> None:
    clock = CostlyClock()
    budget = Budget(clock)
    assert budget.is_free()
    budget.begin()
    clock.worked += 0.02
    budget.end()
    clock.turn(1.99)
    assert not budget.is_free()
    clock.turn(0.02)
    assert budget.is_free()
    # Ten ranks look at as many.
    assert not budget.is_free(10)
    clock.turn(18)
    assert budget.is_free(10)


def test_ranks_that_have_not_looked_yet_do_not_all_look_at_once() -> None:
    clock = CostlyClock()
    budget = Budget(clock)
    assert not budget.is_free(100)
    clock.turn(9)
    assert not budget.is_free(100)
    clock.turn(2)
    assert budget.is_free(100)


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> collections.Counter[str]:
    """How often ranks read each other's words, texts and processes."""
    counts: collections.Counter[str] = collections.Counter()

    def count(owner: object, name: str, what: str) -> None:
        method = getattr(owner, name)

        def counted(*arguments: object) -> object:
            counts[what] += 1
            return method(*arguments)

        monkeypatch.setattr(owner, name, counted)

    for name in ("state", "inner"):
        count(Page, name, "words")
    count(Page, "read", "texts")
    count(peers, "_life", "files")
    return counts


def wait(make_world: MakeWorld, size: int, late: int) -> World:
    """All ranks but some of the last ones wait for a minute."""
    world = make_world(size)
    world.enter("barrier", *range(size - late))
    world.run(SECONDS)
    return world


@pytest.mark.parametrize("size", [32, amount(64, 256)])
def test_the_looks_of_a_host_grow_with_its_ranks_and_not_with_their_square(
    make_world: MakeWorld, looked: collections.Counter[str], size: int
) -> None:
    world = wait(make_world, size, late=2)
    assert world.first_lines == [f"rank 0 of {size} has waited 30 s for 2 of {size} ranks"]
    looks = SECONDS / TICK_SECONDS
    # One rank looks at all, some words of each; each other one looks at that rank, and seldom at all.
    assert looked["words"] < 30 * size * looks
    assert looked["texts"] < 10 * looks + 20 * size
    assert looked["files"] < size


def test_a_few_ranks_look_as_often_as_they_like(make_world: MakeWorld, looked: collections.Counter[str]) -> None:
    wait(make_world, FEW, late=2)
    looks = SECONDS / TICK_SECONDS
    assert looked["words"] > (FEW - 2) * (FEW - 1) * (looks - 2)


@pytest.mark.parametrize("first", [0, 5])
def test_the_next_rank_looks_where_the_first_one_is_stopped(
    make_world: MakeWorld, stopped_process: int, first: int
) -> None:
    world = make_world(20, numbers={first: stopped_process})
    world.enter("barrier", *range(first, 19))
    world.run(10)
    world.stop(first)
    world.run(30)
    assert world.first_lines == [f"rank {first + 1} of 20 has waited 30 s for {first + 1} of 20 ranks"]


@pytest.mark.parametrize("first", [0, 5])
def test_a_rank_that_never_comes_is_seen_whoever_looks(make_world: MakeWorld, first: int) -> None:
    world = make_world(20)
    world.enter("barrier", *range(first, 19))
    world.run(20)
    world.stop(first)
    world.ranks[19].watchdog.note_end()
    world.run(20)
    assert world.ended_by == [first + 1]
    assert "it waits for a rank that has ended" in world.first_lines[0]


def test_ranks_that_come_in_any_order_are_led_by_the_lowest_one(make_world: MakeWorld) -> None:
    world = make_world(40)
    for order in range(38, -1, -1):
        world.enter("barrier", order)
        world.run(TICK_SECONDS)
    world.run(5)
    assert [order for order, one in enumerate(world.ranks[:39]) if not one.watchdog._search.is_led] == [0]


def test_a_rank_waits_for_those_that_its_leader_waits_for(make_world: MakeWorld) -> None:
    """Ranks of two groups wait for one another, and only the first ones of each look."""
    world = make_world(24)
    groups = world.ranks[:12], world.ranks[11:]
    calls = [[one.open(group, 100 + number) for one in group] for number, group in enumerate(groups)]
    # All of the first group but the last one, which is also in the second group, and waits there for its last one.
    for one in calls[0][:-1]:
        one.enter("barrier")
    for one in calls[1][:-1]:
        one.enter("barrier")
    world.run(20)
    assert (world.ended_by, world.said) == ([], [])
    # That one waits for all ranks, of which none but it can come.
    world.enter("barrier", 23)
    world.run(20)
    assert len(world.ended_by) == 1
    assert "the ranks wait for one another in different calls" in world.first_lines[0]
