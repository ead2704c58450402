"""The farewell of ranks, with barriers that others reach at their times."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest

from mpidist.failures import farewell
from mpidist.failures.deaths import DISCOVERY_SECONDS, DeathWatch, this_process
from mpidist.failures.farewell import Farewell, await_survivors, leave_together
from mpidist.failures.peers import Key, Peer
from mpidist.recorder.rank_page import PAGE_BYTES, Page
from tests.unit.failures.settable_clock import Clock

OTHER = this_process("there")


class Others:
    """An MPI communicator of ranks that come to a barrier after some seconds, or never.

    Args:
        clock: The time.
        seconds: After which the barrier is done.
        error: What MPI raises from then on instead.
    """

    def __init__(self, clock: Clock, seconds: float, error: Exception | None = None) -> None:
        self._clock, self._at, self._error = clock, clock.now + seconds, error

    def Ibarrier(self) -> Others:
        return self

    def Test(self) -> bool:
        if self._clock.now >= self._at and self._error is not None:
            raise self._error
        return self._clock.now >= self._at


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    clock.put_into(monkeypatch, farewell)
    return clock


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[DeathWatch]:
    watch = DeathWatch()
    watch.start(lambda: None, lambda error: ["rank 1 of 2"] if isinstance(error, ConnectionError) else [])
    monkeypatch.setattr(farewell, "WATCH", watch)
    yield watch
    watch.stop()


def leave(clock: Clock, *seconds: float, error: Exception | None = None) -> tuple[bool, list[float]]:
    """Leave with others that come after so many seconds; what comes of it, and the times of waiting that were told."""
    waited: list[float] = []
    return leave_together([Farewell(Others(clock, one, error), ()) for one in seconds], waited.append), waited


def test_all_groups_are_waited_for(clock: Clock, watch: DeathWatch) -> None:
    begin = clock.now
    left, waited = leave(clock, 7, 0, 3)
    assert left
    assert 7 <= clock.now - begin == waited[-1]
    assert waited == sorted(waited)
    assert leave(clock) == (True, [])


def test_nobody_waits_for_one_without_whom_all_go_on(clock: Clock, watch: DeathWatch) -> None:
    watch.spared[OTHER] = lambda _: None
    clock.after(5, lambda: watch.note(OTHER, "rank 2 of 3"))
    for _ in range(2):
        # It dies while the others wait, and has died before.
        all_ranks, training = (Others(clock, one) for one in (math.inf, 9))
        assert leave_together([Farewell(all_ranks, [OTHER]), Farewell(training, ())], lambda _: None)
    assert watch.dead == {}


@pytest.mark.parametrize("then", [None, 1.0])
def test_who_waits_for_a_dead_rank_does_not_wait_for_ever(clock: Clock, watch: DeathWatch, then: float | None) -> None:
    """Another one that dies meanwhile does not make it longer."""
    clock.after(5, lambda: watch.note(OTHER, "rank 1 of 3"))
    if then is not None:
        clock.after(5 + then, lambda: watch.note(OTHER._replace(number=2), "rank 2 of 3"))
    begin = clock.now
    left, waited = leave(clock, math.inf)
    assert not left
    assert 5 + DISCOVERY_SECONDS < clock.now - begin < 5 + DISCOVERY_SECONDS + 0.2
    # Meanwhile this rank tells why it waits.
    assert waited[-1] > 5


def test_who_is_done_may_be_gone_before_this_rank_sees_it(clock: Clock, watch: DeathWatch) -> None:
    clock.after(5, lambda: watch.note(OTHER, "rank 1 of 2"))
    assert leave(clock, 5 + DISCOVERY_SECONDS - 0.5)[0]


def test_an_error_of_mpi_may_be_a_death(clock: Clock, watch: DeathWatch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "_wait_for_news", lambda _: False)
    with pytest.raises(ValueError, match="of the program"):
        leave(clock, 1, error=ValueError("of the program"))
    assert not leave(clock, 1, error=ConnectionError("of MPI"))[0]
    assert list(watch.dead.values()) == ["rank 1 of 2"]


@pytest.mark.parametrize("error_after", [0.0, 2.0])
def test_survivors_end_at_one_time_however_they_hear_of_a_death(
    clock: Clock, watch: DeathWatch, monkeypatch: pytest.MonkeyPatch, error_after: float
) -> None:
    """The launcher ends the others with the first one, maybe before they have said why they end."""
    monkeypatch.setattr(watch, "_wait_for_news", lambda _: bool(watch.dead))
    clock.after(5, lambda: watch.note(OTHER, "rank 1 of 2"))
    begin = clock.now
    assert not leave(clock, 5 + error_after, error=ConnectionError("of MPI"))[0]
    assert 5 + DISCOVERY_SECONDS <= clock.now - begin < 5 + DISCOVERY_SECONDS + 0.2


def page() -> Page:
    return Page(memoryview(bytearray(PAGE_BYTES)))


def peer(number: int, *, is_seen: bool = True) -> Peer:
    """Another rank of this host."""
    return Peer(Key(*OTHER._replace(number=number)), f"rank {number}", number, page() if is_seen else None, "")


@pytest.mark.parametrize(("says_at", "dies_at", "until"), [
    (0.5, math.inf, 0.5), (math.inf, 1.0, 1.0), (math.inf, math.inf, DISCOVERY_SECONDS + 2), (0.0, 4.0, 0.0),
])
def test_a_survivor_ends_when_the_others_have_spoken(
    clock: Clock, watch: DeathWatch, says_at: float, dies_at: float, until: float
) -> None:
    """The launcher may end them with it. One that dies, or is stuck, keeps no other for long."""
    begin, own, other = clock.now, page(), peer(7)
    # A watch counts what it does not know as ended.
    watch._known.add(OTHER._replace(number=7))
    acts: list[tuple[float, Callable[[], None]]] = [
        (says_at, lambda: setattr(other.page, "said", True)), (dies_at, lambda: watch.note(other.key, other.name)),
    ]
    for seconds, act in acts:
        if seconds == 0:
            act()
        elif seconds < math.inf:
            clock.after(seconds, act)
    await_survivors(own, [other, peer(8, is_seen=False), peer(9)])
    assert own.said
    assert until <= clock.now - begin <= until + 0.1


def test_a_rank_that_others_cannot_see_waits_for_nobody(clock: Clock) -> None:
    await_survivors(None, [peer(7)])
    assert clock.slept == []
