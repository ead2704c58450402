"""Deadlock detection: why a rank will never reach the call that others wait in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from mpidist.failures.peers import (
    Key,
    Peer,
    circle,
    elsewhere,
    elsewhere_inside,
    has_left,
    is_left_behind,
    missing,
    others_of,
    unlike_inside,
)
from mpidist.failures.waits import Wait
from mpidist.recorder.calls import INNER, NEXT, PLACE_WORDS, START, STATE, Calls, byte_count, may_have_one_name
from mpidist.recorder.inner_calls import FAILED
from mpidist.recorder.time_limits import TICK_SECONDS, warn_seconds

_LOST = "other ranks have left this call and wait for this rank in a later one: its messages went to another call"
_NOT_HERE = "other ranks have left this call before this part of it: its messages went to another call"
_DIFFERENT = "the ranks are in different calls"
# Numbers of successive checks that must find a deadlock before it is reported. A file of another host may be a second
# old. A rank whose messages went to another call may need time to leave its own. An error on another rank explains
# more, and is printed first. Ranks in calls of one name may detect the difference themselves once all have arrived.
_LOOKS, _NAMESAKE_LOOKS, _MANY_LOOKS, _ERROR_LOOKS = 2, 4, 5, 8
# A rank that waits in a barrier of its node repeatedly notes the time. This is less than the time between two checks:
# if both find such a note, the rank has waited all the time.
_IN_BARRIER_SECONDS = 0.5 * TICK_SECONDS
# Bytes per second of the slowest network that was measured.
_SLOWEST = 1e7


# Returns, for the identity of a communicator, its ranks that have shown another call of this number, or left one in the
# middle; and a description of the difference.
Differing = Callable[[int], tuple[Sequence[int], str]]


def unknown(identity: int) -> tuple[Sequence[int], str]:
    """Local. No ranks: a `Differing` where calls are not compared."""
    del identity
    return (), ""


class Reason(NamedTuple):
    """A reason why a rank is deadlocked.

    Attributes:
        why: Text for the report.
        blamed: The ranks that cause the deadlock.
        number: A number that changes with the calls.
        looks: Number of successive checks that must find this reason.
        seen_by_all: Whether the blamed ranks can see this reason, too, where they wait.
    """

    why: str
    blamed: tuple[Key, ...]
    number: int
    looks: int
    seen_by_all: bool = True


class View(NamedTuple):
    """A rank's view of the other ranks.

    Attributes:
        me: This rank.
        peers: The other ranks.
        waits: This rank's waits by communicator: the call and its begin.
        counts_deaths: Whether a dead rank counts as one that has ended.
        differing: A function that returns the ranks that have shown another call.
        mine: The state of this rank on a communicator, by its identity.
        now: The time.
    """

    me: Key
    peers: dict[Key, Peer]
    waits: Mapping[int, Wait]
    counts_deaths: bool
    differing: Differing
    mine: Callable[[int], int | None]
    now: float


def find(view: View, waiting: Sequence[Calls], late: Mapping[Key, Peer]) -> Reason | None:
    """Local. The reason why this rank can never continue; None if this rank sees none.

    Args:
        view: The view of this rank.
        waiting: The communicators on which this rank waits, the outermost call first.
        late: The ranks that this rank waits for.
    """
    for calls in waiting:
        for reason in _reasons(view, calls):
            many = any(view.peers[key].is_far for key in reason.blamed)
            return reason._replace(looks=max(reason.looks, _MANY_LOOKS)) if many else reason
    round_trip = circle(view.me, list(late.values()), view.peers, view.mine)
    if round_trip:
        many = any(peer.is_far for peer in round_trip)
        return Reason(
            "the ranks wait for one another in different calls", tuple(one.key for one in round_trip),
            hash(tuple(wait.state for wait in view.waits.values())), _MANY_LOOKS if many else _LOOKS,
        )
    return None


def _reasons(view: View, calls: Calls) -> Iterator[Reason]:
    identity = calls.identity
    state, since, _ = view.waits[identity]
    others = others_of(calls, view.peers)
    have_all_come = not missing(state, others, identity)
    wrong = elsewhere(state, others, identity)
    others_named = [peer for peer in wrong if not may_have_one_name(state % NEXT, (peer.state(identity) or 0) % NEXT)]
    if not have_all_come:
        # Calls of one name: once the last rank has arrived, the ranks may detect the difference themselves.
        wrong = others_named
    if wrong:
        number = hash((state, *(peer.state(identity) for peer in wrong)))
        looks = _LOOKS if others_named else _NAMESAKE_LOOKS
        yield Reason(_DIFFERENT, tuple(peer.key for peer in wrong), number, looks)
    yield from _inside(calls, state, others, view.now, have_all_come=have_all_come)
    # `ending` handles deaths, unless it is switched off.
    gone = [
        peer for peer in missing(state, others, identity)
        if (peer.why_gone() if view.counts_deaths else peer.has_ended())
    ]
    if gone:
        yield Reason("it waits for a rank that has ended", tuple(peer.key for peer in gone), state, _LOOKS)
    ranks, why = view.differing(identity)
    blamed = [peer.key for rank in ranks for peer in others if peer.key == calls.members[rank]]
    if blamed:
        yield Reason(why, tuple(blamed), state, _ERROR_LOOKS)
    # This rank's data may still be in transit.
    patience = warn_seconds() + byte_count(calls.innermost) / _SLOWEST
    if view.now - since > patience and _is_lost(view, calls, state):
        gone_on = (peer for peer in others if peer.state(identity) != state)
        yield Reason(_LOST, tuple(peer.key for peer in gone_on), state, _MANY_LOOKS, seen_by_all=False)


def _inside(
    calls: Calls, state: int, others: Sequence[Peer], now: float, *, have_all_come: bool
) -> Iterator[Reason]:
    """The reasons in the calls inside the one in which this rank waits."""
    mine = calls.words[INNER:PLACE_WORDS].tolist()
    if calls.words[STATE] != state:
        # This rank has left the call meanwhile, and the words may describe another call.
        return
    different, gone_on = elsewhere_inside(state, mine, others, calls.identity)
    few = _LOOKS
    if have_all_come and not different:
        different, few = unlike_inside(state, mine, others, calls.identity), _NAMESAKE_LOOKS
    if now - calls.in_barrier < _IN_BARRIER_SECONDS:
        near = [peer for peer in others if not peer.is_far]
        if all(has_left(peer.state(calls.identity), state) for peer in near):
            gone_on = near
    for why, wrong in ((_DIFFERENT, different), (_NOT_HERE, gone_on)):
        if wrong:
            states = [peer.state(calls.identity) or 0 for peer in wrong]
            # A rank that has left a call with an exception may be about to print it.
            has_failed = any(
                not other % NEXT and (words := peer.inner(calls.identity)) and words[FAILED]
                for peer, other in zip(wrong, states, strict=True)
            )
            yield Reason(
                why, tuple(peer.key for peer in wrong), hash((state, *mine, *states)),
                _ERROR_LOOKS if has_failed else few if wrong is different else _LOOKS,
                seen_by_all=all(other // NEXT == state // NEXT for other in states),
            )


def _is_lost(view: View, calls: Calls, state: int) -> bool:
    others = others_of(calls, view.peers)
    # This rank must see all other ranks: an unseen one could still send the data.
    return (
        calls.identity != START and calls.is_exchange and len(others) == len(calls.members) - 1
        and is_left_behind(view.me, state, others, calls.identity)
    )
