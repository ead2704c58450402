"""The search for the reason why this rank can never continue; few ranks of a host search (`leaders.py`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mpidist.failures import deadlocks
from mpidist.failures.deadlocks import Differing, Reason, View, unknown
from mpidist.failures.leaders import Leaders
from mpidist.failures.looks import Budget
from mpidist.failures.peers import Key, Peer, missing, others_of
from mpidist.failures.waits import Waits
from mpidist.observe.output import flush
from mpidist.recorder.calls import Calls
from mpidist.recorder.time_limits import Clock


class Search:
    """The search of this rank.

    Args:
        clock: By which it looks.
        thread: The program's.

    Attributes:
        late: The ranks that this rank was seen to wait for last, in the calls of the program's thread.
        looks: Whether it looks at the others now.
        is_led: Whether other ranks look for this one wherever it waits.
    """

    def __init__(self, clock: Clock, thread: int) -> None:
        self._clock, self._thread = clock, thread
        self.late: dict[Key, Peer] = {}
        self.looks = self.is_led = False
        self._peers: dict[Key, Peer] = {}
        self._budget = Budget(clock)
        self._leaders = Leaders(self._budget)
        self._waited_in: list[tuple[int, int]] = []
        self._seen: Reason | None = None
        self._seen_times = 0
        self._told: Reason | None = None

    def begin(
        self, waiting: Sequence[Calls], waits: Waits, peers: dict[Key, Peer], order: int
    ) -> dict[str, Any]:
        """Local. Decide whether this rank looks at the others now, and see who is late.

        Args:
            waiting: The communicators on which it waits.
            waits: Its waits.
            peers: The other ranks.
            order: This rank's; lower ones speak first.

        Returns:
            The calls in which it waits and its leaders there, for the text of its page (`peers.WaitsOfOthers`).
        """
        self._peers = peers
        has_seen = self._seen is not None and self._seen != self._told
        self.looks, leaders, self.is_led = self._leaders.turn(waiting, waits, peers, order, has_seen=has_seen)
        own = [calls for calls in waiting if calls.thread == self._thread]
        waits_in = [(calls.identity, waits.of(calls).state) for calls in own]
        if self.looks:
            self._budget.begin()
            self.late = {}
            for calls in own:
                late = missing(waits.of(calls).state, others_of(calls, peers), calls.identity)
                self.late.update((peer.key, peer) for peer in late)
        elif self._waited_in != waits_in:
            self.late = {}
        self._waited_in = waits_in
        return {"on": [identity for identity, _ in waits_in], "leaders": leaders}

    def look(
        self, me: Key, waiting: Sequence[Calls], waits: Waits, differing: Differing | None,
        mine: Callable[[int], int | None], *, counts_deaths: bool,
    ) -> Reason | None:
        """Local. Look for a reason that has not been told yet, and was seen so often that it counts.

        Args:
            me: This rank.
            waiting: The communicators on which it waits, the outermost call first.
            waits: See `begin`.
            differing: See `deadlocks.View`.
            mine: See `deadlocks.View`.
            counts_deaths: See `deadlocks.View`.
        """
        view = View(me, self._peers, waits.by_identity, counts_deaths, differing or unknown, mine, self._clock.now())
        seen = deadlocks.find(view, waiting, self.late)
        self._budget.end()
        self._seen_times = self._seen_times + 1 if seen == self._seen else 1
        self._seen = seen
        if seen is not None and self._seen_times == 1:
            flush()
        if seen is None or self._seen_times < seen.looks or seen == self._told:
            return None
        self._told = seen
        return seen
