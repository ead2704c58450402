"""The search for a deadlock of this rank; few ranks of a host search (`leaders.py`)."""

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
    """The search of this rank for a reason why it can never continue.

    Args:
        clock: The clock for the times of looks.
        thread: The program's own thread.

    Attributes:
        late: The ranks for which this rank waited at the last look, in the calls of the program's own thread.
        looks: Whether this rank checks the others now.
        is_led: Whether this rank has a leader in all calls in which it waits.
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
        """Local. Decide whether this rank checks the others now, and find the late ranks.

        Args:
            waiting: The communicators on which this rank waits.
            waits: This rank's waits.
            peers: The other ranks.
            order: This rank's place among the ranks: those of lower order report first.

        Returns:
            The calls in which this rank waits and its leaders in them, for its page (`peers.WaitsOfOthers`).
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
        """Local. Look for a reason that was not reported yet, and was found in enough successive looks.

        Args:
            me: This rank.
            waiting: The communicators on which this rank waits, the outermost call first.
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
