"""The ranks of a window that are gone: a second death, and ranks that join in any order."""

from __future__ import annotations

import pytest

from mpidist.comm.windows import lost_ranks as module
from mpidist.comm.windows.lost_ranks import Losses
from mpidist.errors import DeadRankError
from mpidist.failures.deaths import DeathWatch, Process


def process(rank: int) -> Process:
    return Process("host", 1000 + rank, "")


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> DeathWatch:
    """The deaths of this test alone."""
    watch = DeathWatch()
    monkeypatch.setattr(module, "WATCH", watch)
    return watch


def test_each_death_is_seen_and_not_the_first_one_alone(watch: DeathWatch) -> None:
    losses = Losses([process(rank) for rank in range(4)])
    assert losses.dead() == frozenset()
    for count, rank in enumerate((2, 0, 3), 1):
        watch.dead[process(rank)] = "it"
        assert len(losses.dead()) == count
        assert rank in losses.gone()
    losses.require_alive(1)
    # Of another job's process.
    watch.dead[process(9)] = "it"
    assert losses.dead() == {0, 2, 3}


@pytest.mark.parametrize("order", [(3, 4, 5), (5, 4, 3), (4, 3, 5), (5, 3, 4)])
def test_ranks_that_join_in_any_order_are_there(watch: DeathWatch, order: tuple[int, ...]) -> None:
    losses = Losses([process(rank) for rank in range(3)])
    for count, rank in enumerate(order, 1):
        losses.add(rank, process(rank))
        here = order[:count]
        assert losses.gone() == {*range(3, max(here))} - {*here}
        losses.require_alive(rank)
    watch.dead[process(4)] = "it"
    assert losses.gone() == {4}
    with pytest.raises(DeadRankError, match="rank 4 of 6 "):
        losses.require_alive(4)


def test_a_rank_that_joins_after_a_death_is_not_taken_for_the_dead_one(watch: DeathWatch) -> None:
    losses = Losses([process(rank) for rank in range(3)])
    watch.dead[process(2)] = "it"
    assert losses.gone() == {2}
    losses.forget(2)
    losses.add(3, process(3))
    assert losses.gone() == {2}
    # Another one gets no place of its own before it is added, too.
    losses.add(5, process(5))
    losses.leave(1)
    assert losses.gone() == {1, 2, 4}


def test_the_death_of_a_joiner_is_that_of_no_other(watch: DeathWatch) -> None:
    """One that has a lower rank is made known after it."""
    losses = Losses([process(0)])
    losses.add(2, process(2))
    watch.dead[process(2)] = "it"
    assert losses.dead() == {2}
    losses.add(1, process(1))
    assert losses.gone() == {2}
    losses.require_alive(1)


def test_a_joiner_that_is_dead_before_it_is_known_is_dead(watch: DeathWatch) -> None:
    losses = Losses([process(0)])
    watch.dead[process(1)] = "it"
    assert losses.dead() == frozenset()
    losses.add(1, process(1))
    assert losses.dead() == {1}
