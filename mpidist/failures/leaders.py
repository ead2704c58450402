"""Leaders: of the ranks of a host that wait in one call, the lowest one looks at the others, again and again.

The others look seldom: what the leader sees they would see, too. A rank needs a moment to find the one that looks for
it, and takes its place where that one is stopped, has died, or has come out of the call.
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

# So many others a rank asks in one look of its watchdog.
_STEPS = 16
# Who does not lead looks ever more rarely, and at last once in so many seconds.
_LONGEST_SECONDS = 64.0


@dataclass
class _Search:
    """The search for the leader in the calls of one communicator.

    Attributes:
        before: The ranks of this host that speak before this one, the lowest one first.
        near: How many ranks of this host there are besides this one.
        known: How many ranks were known then.
        state: The call.
        place: The place of the next one to ask.
        leader: The one that was found.
        leads: Whether none was found: this rank leads.
    """

    before: Sequence[Peer]
    near: int
    known: int
    state: int = -1
    place: int = 0
    leader: Peer | None = None
    leads: bool = False


class Turn(NamedTuple):
    """Whether a rank looks at the others now.

    Attributes:
        looks: Whether it does.
        leaders: The ranks that look for it: the identity of a communicator, its state there, and the rank.
        is_led: Whether one looks for it wherever it waits.
    """

    looks: bool
    leaders: list[tuple[int, int, Key]]
    is_led: bool


class Leaders:
    """The leaders of the calls in which this rank waits.

    Args:
        budget: The budget of this rank's looks.
    """

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        # In which calls it has looked though others lead, and the pause after that.
        self._states: list[int] = []
        self._pause = TICK_SECONDS
        self._searches: weakref.WeakKeyDictionary[Calls, _Search] = weakref.WeakKeyDictionary()

    def turn(
        self, waiting: Sequence[Calls], waits: Waits, peers: Mapping[Key, Peer], order: int, *, has_seen: bool
    ) -> Turn:
        """Local. Decide whether this rank looks at the others now.

        Args:
            waiting: The communicators on which it waits.
            waits: Its waits.
            peers: The other ranks.
            order: This rank's; lower ones speak first.
            has_seen: Whether it has seen something that counts if the next looks see it, too.
        """
        if len(peers) < FEW:
            return Turn(looks=True, leaders=[], is_led=False)
        found = [(calls, self._find(calls, waits.of(calls).state, peers, order)) for calls in waiting]
        leaders = [(calls.identity, one.state, one.leader.key) for calls, one in found if one.leader is not None]
        is_led = bool(found) and len(leaders) == len(found)
        if any(one.leads for _, one in found) or has_seen:
            return Turn(self._budget.is_free(), leaders, is_led)
        # What its leaders do not see, as they are in other calls besides.
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
                # A lower one may come later.
                search.leads, search.place = True, 0
        return search


def _waits(peer: Peer, identity: int, state: int) -> bool:
    return peer.is_fresh() and peer.state(identity) == state
