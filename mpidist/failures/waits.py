"""Waits: the calls in which a rank has been for some time, their begin, the time of the next report, and its advice."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from mpidist.failures.peers import LISTED, STALE_SECONDS, Peer, where_are
from mpidist.recorder.calls import NEXT, STATE, Calls
from mpidist.recorder.time_limits import LIMIT_VARIABLE, limit_seconds, warn_seconds

RULE = (
    "All ranks must make the same calls in the same order: look for a call under `if rank == 0`, a loop that ends "
    "earlier on one rank, or an early exit"
)
ENDS = f"{LIMIT_VARIABLE}=SECONDS ends a job that waits longer"
PATIENCE = f"A rank that still computes arrives later. {ENDS}"
HELD_UP = "Their messages do not arrive: a rank is stopped in the call, or the network between hosts is down"
UNSEEN = (
    "Ranks on other hosts are not visible: they may be late, stopped, or cut off from the network. "
    "MPIDIST_JOB_DIR=DIRECTORY, on a file system that all hosts share, makes them visible"
)
SOME_SEEN = "In a large job a rank sees its own host and the hosts before it: other reports may say who is late"

FORKED = (
    "this process was forked from a rank and is not a rank itself: its calls would be taken for its parent's. Let the "
    "parent make all collective calls, or start the child with the method \"spawn\" of `multiprocessing`"
)
LEFT = (
    "the program has ended on all ranks. An exit function that makes collective calls must be registered "
    "after `import mpidist`; a `__del__` at the end of the interpreter can make none"
)


def limit_of(calls: Calls) -> float:
    """Local. The time limit of the current call on a communicator: its own limit and the job's both hold."""
    own = None if calls.is_timed else calls.limit_seconds
    return min((one for one in (limit_seconds(), own) if one), default=math.inf)


def may_end_at_start() -> bool:
    """Local. Whether a rank that waits at the start may end: nothing else could end the job there."""
    return os.environ.get("MPIDIST_ABORT") != "0"


class Wait(NamedTuple):
    """A wait on one communicator.

    Attributes:
        state: The state in which this rank waits.
        since: Time at which the rank was first seen in this state.
        warn_at: Time of the next report.
    """

    state: int
    since: float
    warn_at: float


class Waits:
    """The calls in which a rank waits, updated at each look of its watchdog.

    Attributes:
        by_identity: The waits by communicator.
    """

    def __init__(self) -> None:
        self.by_identity: dict[int, Wait] = {}
        self._noted = math.inf

    def note_time(self, now: float) -> None:
        """Local. Note that the watchdog runs. If it has not run, its process was stopped: that time counts as no wait.

        Args:
            now: The time.
        """
        gap, self._noted = now - self._noted, now
        if gap > STALE_SECONDS:
            # The whole job may have been stopped for hours, as by `scontrol suspend`.
            for identity, (state, since, warn_at) in self.by_identity.items():
                self.by_identity[identity] = Wait(state, since + gap, warn_at + gap)

    def look(self, opened: Iterable[Calls], now: float) -> list[Calls]:
        """Local. Communicators on which a rank has been in the same call since the last look, the outermost call first.

        Args:
            opened: The rank's calls on all communicators.
            now: The time.
        """
        before, self.by_identity = self.by_identity, {}
        waiting = []
        for calls in opened:
            state = int(calls.words[STATE])
            if state % NEXT == 0:
                continue
            known = before.get(calls.identity)
            if known is not None and known.state == state:
                waiting.append(calls)
                self.by_identity[calls.identity] = known
            else:
                self.by_identity[calls.identity] = Wait(state, now, now + warn_seconds())
        return sorted(waiting, key=lambda calls: self.of(calls).since)

    def of(self, calls: Calls) -> Wait:
        """Local. The wait on a communicator that `look` has seen."""
        return self.by_identity[calls.identity]

    def is_same(self, calls: Calls) -> bool:
        """Local. Whether the rank is still in the same call."""
        return int(calls.words[STATE]) == self.of(calls).state

    def tell_later(self, calls: Calls, now: float) -> None:
        """Local. Report a wait again when it has lasted three times as long as now."""
        state, since, _ = self.of(calls)
        self.by_identity[calls.identity] = Wait(state, since, now + 2 * (now - since))


def advice(*, are_late: bool, are_seen: bool, sees_some: bool, ends: bool) -> str:
    """Local. The advice about a long wait, the last line of its report.

    Args:
        are_late: Whether ranks have not arrived. If all have, one of them may have been stopped in the call.
        are_seen: Whether this rank sees all ranks.
        sees_some: Whether the job directory shows only some of the ranks.
        ends: Whether the job ends.
    """
    if are_late:
        return RULE if ends else PATIENCE
    way_out = HELD_UP if are_seen else SOME_SEEN if sees_some else UNSEEN
    return way_out if ends else f"{way_out}. {ENDS}"


def where_late(peers: Sequence[Peer]) -> list[str]:
    """Local. Descriptions of the first `LISTED` ranks whose program has not ended; see `peers.where_are`."""
    late = itertools.islice((peer for peer in peers if not peer.why_gone()), LISTED)
    return where_are(list(late))
