"""Waits: while the chief waits for closures, the watchdog's thread reports which ones run for long, and where.

It also reports servers that do not answer, and the loss of all workers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import NamedTuple

from mpidist.failures.peers import Key, where_are
from mpidist.failures.watchdog import WATCHDOG
from mpidist.observe.output import say
from mpidist.parameter_server.protocol.awaited_ranks import ADVICE, UNSEEN
from mpidist.parameter_server.queue.closures import Closures
from mpidist.parameter_server.queue.work import Owing, Running
from mpidist.recorder.time_limits import LIMIT_VARIABLE, limit_seconds, warn_seconds
from mpidist.strategy.parameter_server.invitation import Invitation

# The watchdog's data may be this old.
_SHOW_SECONDS = 0.2
# The number of closures that are listed in a report.
_LISTED = 8
_ADVICE = (
    "A function may need this time. ClusterCoordinator(strategy, closure_timeout=SECONDS) declares its worker lost "
    f"after so long, and {LIMIT_VARIABLE}=SECONDS ends the job"
)


_ADVICE_ALONE = f"{LIMIT_VARIABLE}=SECONDS ends the job"


class Absent(NamedTuple):
    """The lack of any worker.

    Attributes:
        since: The time at which it was noticed, by the clock of `ChiefWaits`.
    """

    since: float


_KINDS = {Running: "functions of workers", Owing: "servers", Absent: "a worker that joins"}


class ChiefWaits:
    """The waits of the chief: `with` surrounds each one.

    Args:
        closures: The closures of the coordinator, with their workers.
        place_of: The name of a rank, and its process.
        invitation: The invitation of the chief, if others may join.
        clock: The clock of the watchdog and of the closures, in seconds.
    """

    def __init__(
        self, closures: Closures, place_of: Callable[[int], tuple[str, Key]], invitation: Invitation | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._closures = closures
        self._place_of = place_of
        self._invitation = invitation
        self._clock = clock
        self._shown = 0.0
        self._absent: Absent | None = None
        # Read by the watchdog's thread: when the wait has begun, and what is done meanwhile.
        self._since: float | None = None
        self._busy: list[Running | Owing | Absent] = []
        # The time of the next report, by closure or server.
        self._next: dict[Running | Owing | Absent, float] = {}
        WATCHDOG.look_also(self.look)

    def __enter__(self) -> None:
        self._since = self._clock()

    def __exit__(self, *_: object) -> None:
        self._since, self._busy = None, []

    def show(self) -> None:
        """Local. Copy for the watchdog's thread what the workers do, so that it never reads what is being changed."""
        now = self._clock()
        if now - self._shown > _SHOW_SECONDS:
            self._absent = None if self._closures.workers else self._absent or Absent(now)
            absent = [self._absent] if self._absent else []
            self._shown, self._busy = now, [*absent, *self._closures.running(), *self._closures.owing()]

    def look(self, now: float) -> None:
        """Local. Report what runs for long. Called in the watchdog's thread.

        Args:
            now: The time.
        """
        since, limit = self._since, limit_seconds() if WATCHDOG.end is not None else 0.0
        if since is None:
            return
        seconds = {one: now - max(one.since, since) for one in self._busy}
        ends = bool(limit) and any(waited > limit for waited in seconds.values())
        patience = min(limit, warn_seconds()) if ends else warn_seconds()
        long = [one for one, waited in seconds.items() if waited > patience]
        if not ends and all(now < self._next.get(one, 0.0) for one in long):
            return
        self._next = {one: now + 2 * seconds[one] for one in long}
        listed = [one for one in long if not isinstance(one, Absent)]
        places = [self._place_of(one.rank) for one in listed[:_LISTED]]
        asked = [peer for peer in WATCHDOG.peers() if peer.key in {key for _, key in places}]
        answers = dict(zip((peer.key for peer in asked), where_are(asked), strict=True))
        if self._since != since or not set(long) & set(self._busy):
            # They have ended meanwhile.
            return
        lines = []
        for one, (name, key) in zip(listed, places, strict=False):
            what = f"has run {one}" if isinstance(one, Running) else "has not answered"
            where = f" (process {key.number} on {key.host})" if isinstance(one, Owing) else ""
            lines += [f"{name}{where} {what} for {now - (one.since or since):.0f} s:", answers.get(key, UNSEEN)]
        if len(listed) > _LISTED:
            lines.append(f"and {len(listed) - _LISTED} more")
        if len(listed) < len(long) and self._invitation is not None:
            lines.append(f"all workers are lost. Start one: {self._invitation.command}")
        stuck = self._stuck({one.rank for one in listed if isinstance(one, Owing)})
        kinds = dict.fromkeys(_KINDS[type(one)] for one in long)
        if stuck or "servers" in kinds:
            lines += [*stuck, ADVICE]
        else:
            lines.append(_ADVICE if listed else _ADVICE_ALONE)
        end = f", the limit is {limit:g} s, the job ends" if ends else ""
        told = "\n".join(f"  {line}" for one in lines for line in one.split("\n"))
        say(f"{WATCHDOG.place} has waited {now - since:.0f} s for {' and '.join(kinds)}{end}\n{told}")
        if ends and WATCHDOG.end is not None:
            WATCHDOG.end()

    def _stuck(self, told: Collection[int]) -> list[str]:
        """Report servers for which workers may wait: those that are stuck and were not reported yet."""
        places = dict(self._place_of(rank) for rank in self._closures.commits.servers if rank not in told)
        peers = {peer.key: peer for peer in WATCHDOG.peers() if peer.is_stuck()}
        return [text for name, key in places.items() if key in peers
                for text in (f"{name} (process {key.number} on {key.host}) does not respond:", peers[key].tell())]
