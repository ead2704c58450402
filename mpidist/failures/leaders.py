"""Leaders: the lowest of a host's ranks that wait in one call leads, and checks the other ranks regularly.

The others check seldom, since they would see the same as the leader. A rank needs some checks to find its leader, and
becomes the leader if the leader is stopped, has died, or has left the call.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mpidist.failures.looks import FEW, Budget
from mpidist.failures.peers import Key, Peer, others_of
from mpidist.failures.waits import Waits
from mpidist.recorder.calls import Calls
from mpidist.recorder.time_limits import TICK_SECONDS

# Number of other ranks that a rank examines in one run of its watchdog, to find its leader.
_STEPS = 16
# A rank that does not lead doubles the time between its checks, up to this many seconds.
_LONGEST_SECONDS = 64.0


@dataclass
class _Search:
    """The search for the leader in the calls of one communicator.

    Attributes:
        before: The ranks of this host with a lower order than this rank, the lowest one first.
        near: Number of other ranks of this host.
        known: Number of ranks that were known when the search began.
        state: The state that identifies the call.
        place: Index in `before` of the next rank to examine.
        leader: The leader that was found.
        leads: Whether this rank leads, as no leader was found.
    """

    before: Sequence[Peer]
    near: int
    known: int
    state: int = -1
    place: int = 0
    leader: Peer | None = None
    leads: bool = False


class Turn(NamedTuple):
    """The decision whether a rank checks the others now.

    Attributes:
        looks: Whether it checks them.
        leaders: Its leaders: the identity of a communicator, the rank's state on it, and the leader.
        is_led: Whether it has a leader in all calls in which it waits.
    """

    looks: bool
    leaders: list[tuple[int, int, Key]]
    is_led: bool


class Leaders:
    """The leaders of the calls in which this rank waits.

    Args:
        budget: The budget of this rank's checks.
    """

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        # The calls in which this rank has checked the others although it does not lead, and the pause after that.
        self._states: list[int] = []
        self._pause = TICK_SECONDS
        self._searches: weakref.WeakKeyDictionary[Calls, _Search] = weakref.WeakKeyDictionary()

    def turn(
        self, waiting: Sequence[Calls], waits: Waits, peers: Mapping[Key, Peer], order: int, *, has_seen: bool
    ) -> Turn:
        """Local. Decide whether this rank checks the others now.

        Args:
            waiting: The communicators on which this rank waits.
            waits: This rank's waits.
            peers: The other ranks.
            order: This rank's place among the ranks: those of lower order report first.
            has_seen: Whether this rank has found a deadlock that the next checks must confirm.
        """
        if len(peers) < FEW:
            return Turn(looks=True, leaders=[], is_led=False)
        found = [(calls, self._find(calls, waits.of(calls).state, peers, order)) for calls in waiting]
        leaders = [(calls.identity, one.state, one.leader.key) for calls, one in found if one.leader is not None]
        is_led = bool(found) and len(leaders) == len(found)
        if any(one.leads for _, one in found) or has_seen:
            return Turn(self._budget.is_free(), leaders, is_led)
        # This rank may see what its leaders do not: they do not wait in all the calls in which this rank waits.
        states = [one.state for _, one in found]
        if states != self._states:
            self._states, self._pause = states, TICK_SECONDS
        sharers = 1 + max((one.near for _, one in found), default=0)
        looks = bool(found) and self._budget.is_free(sharers, after=self._pause)
        if looks:
            self._pause = min(2 * self._pause, _LONGEST_SECONDS)
        return Turn(looks, leaders, is_led)

    def _find(self, calls: Calls, state: int, peers: Mapping[Key, Peer], order: int) -> _Search:
        search = self._searches.get(calls)
        if search is None or search.known != len(peers):
            near = [peer for peer in others_of(calls, peers) if not peer.is_far]
            before = sorted((peer for peer in near if peer.order < order), key=lambda peer: peer.order)
            search = self._searches[calls] = _Search(before, len(near), len(peers))
        if search.state != state or (search.leader is not None and not _waits(search.leader, calls.identity, state)):
            search.state, search.place, search.leader, search.leads = state, 0, None, False
        if search.leader is None:
            asked = search.before[search.place : search.place + _STEPS]
            search.leader = next((peer for peer in asked if _waits(peer, calls.identity, state)), None)
            search.place += _STEPS
            if search.leader is not None:
                search.leads = False
            elif search.place >= len(search.before):
                # A lower rank may arrive later.
                search.leads, search.place = True, 0
        return search


def _waits(peer: Peer, identity: int, state: int) -> bool:
    return peer.is_fresh() and peer.state(identity) == state
