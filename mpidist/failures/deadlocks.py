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
# What is seen in so many looks counts. On another host a file may be a second old. A rank whose messages went to
# another call may need time to come out of its own. An error on another rank tells more, and is printed first.
# Ranks in calls of one name may be about to find out by themselves, where all of them have come.
_LOOKS, _NAMESAKE_LOOKS, _MANY_LOOKS, _ERROR_LOOKS = 2, 4, 5, 8
# A rank that waits in a barrier of its node notes that again and again. This is less than the time between two looks:
# if both find it there, it has waited all the time.
_IN_BARRIER_SECONDS = 0.5 * TICK_SECONDS
# No network was seen to move fewer bytes in a second.
_SLOWEST = 1e7


# Gives, for the identity of a communicator, its ranks that have shown another call of this number, or left one in the
# middle; and what is known of that.
Differing = Callable[[int], tuple[Sequence[int], str]]


def unknown(identity: int) -> tuple[Sequence[int], str]:
    """Local. Nothing: a `Differing` where calls are not compared."""
    del identity
    return (), ""


class Reason(NamedTuple):
    """A reason why a rank is deadlocked.

    Attributes:
        why: In words.
        blamed: The ranks that are to blame.
        number: Changes with the calls.
        looks: In so many looks it must be the same.
        seen_by_all: Whether those to blame see it, too, where they wait.
    """

    why: str
    blamed: tuple[Key, ...]
    number: int
    looks: int
    seen_by_all: bool = True


class View(NamedTuple):
    """A rank's view of the others.

    Attributes:
        me: This rank.
        peers: The others.
        waits: By communicator: in what this rank waits, and since when.
        counts_deaths: Whether a dead rank counts as one that has ended.
        differing: The ranks that have shown another call.
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
    """Local. The reason why this rank can never continue; None if there is none, as far as it sees.

    Args:
        view: The view of this rank.
        waiting: The communicators on which it waits, the outermost call first.
        late: The ranks that it waits for.
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
        # Calls of one name: where the last rank has come, all may find out by themselves that they differ.
        wrong = others_named
    if wrong:
        number = hash((state, *(peer.state(identity) for peer in wrong)))
        looks = _LOOKS if others_named else _NAMESAKE_LOOKS
        yield Reason(_DIFFERENT, tuple(peer.key for peer in wrong), number, looks)
    yield from _inside(calls, state, others, view.now, have_all_come=have_all_come)
    # Of deaths `ending` takes care, if it may.
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
    # Its data may still be on their way.
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
        # It has come out meanwhile, and the words may be of another call.
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
            # A rank that an exception has led out of a call may be about to print it.
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
    # All of them must be seen.
    return (
        calls.identity != START and calls.is_exchange and len(others) == len(calls.members) - 1
        and is_left_behind(view.me, state, others, calls.identity)
    )
