"""The ranks of a window that are dead or gone: of several, one after another, and beside ranks that join."""

from __future__ import annotations

import errno

import pytest

from mpidist.comm.windows import lost_ranks as module
from mpidist.comm.windows.lost_ranks import Losses
from mpidist.errors import DeadRankError
from mpidist.failures.deaths import IS_SILENT, DeathWatch, Process, this_process

HERE = this_process("here")
THERE = [HERE._replace(host="there", number=number) for number in range(5)]


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> DeathWatch:
    watch = DeathWatch()
    watch.start(lambda: None, lambda _: [])
    monkeypatch.setattr(module, "WATCH", watch)
    return watch


def test_each_death_is_seen(watch: DeathWatch) -> None:
    losses = Losses([HERE, *THERE[:3]])
    assert losses.dead() == frozenset()
    for number, dead in ((2, {3}), (0, {1, 3}), (4, {1, 3}), (1, {1, 2, 3})):
        watch.note(THERE[number], f"process {number}")
        assert losses.dead() == losses.gone() == dead


def test_a_death_that_a_connection_tells_is_told_by_the_first_name(watch: DeathWatch) -> None:
    losses = Losses([HERE, *THERE[:2]])
    losses.note(1, TimeoutError(errno.ETIMEDOUT, "Connection timed out"))
    losses.note(1, ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"))
    losses.note(2, ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"))
    names = [f"rank {rank} of 3 (process {rank - 1} on there)" for rank in (1, 2)]
    assert list(watch.dead.values()) == [names[0] + IS_SILENT, names[1]]
    with pytest.raises(DeadRankError, match=r"rank 1 of 3 .* cannot be reached"):
        losses.require_alive(1)
    with pytest.raises(DeadRankError, match=r"rank 2 of 3 .* is dead"):
        losses.require_alive(2)


def test_a_rank_of_this_host_that_drops_its_window_lives(watch: DeathWatch, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel would tell of its end. Of one on another host it does not."""
    watched = HERE._replace(number=-1)
    monkeypatch.setattr(watch, "_known", {watched})
    losses = Losses([HERE, watched, THERE[0]])
    losses.cut(1)
    assert losses.dead() == frozenset()
    assert losses.gone() == {1}
    assert watch.dead == {}
    losses.cut(2)
    assert losses.dead() == {2}
    assert losses.gone() == {1, 2}
    assert list(watch.dead) == [THERE[0]]


def test_ranks_that_join_in_any_order(watch: DeathWatch) -> None:
    """One that is not known yet is gone, until it is added, too."""
    losses = Losses([HERE, THERE[0]])
    losses.add(3, THERE[3])
    assert losses.gone() == {2}
    assert losses.processes[3] == THERE[3]
    losses.add(2, THERE[2])
    assert losses.gone() == frozenset()
    assert losses.processes == [HERE, THERE[0], THERE[2], THERE[3]]
    watch.note(THERE[2], "process 2")
    assert losses.gone() == {2}


def test_a_rank_that_has_died_before_it_is_added_is_dead(watch: DeathWatch) -> None:
    losses = Losses([HERE, THERE[0]])
    dead: Process = THERE[2]
    watch.note(dead, "process 2")
    assert losses.dead() == frozenset()
    losses.add(2, dead)
    assert losses.dead() == {2}
