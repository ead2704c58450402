"""Waits: while the chief waits for closures, the watchdog's thread tells which ones run for long, and where."""

from __future__ import annotations

import time
from collections.abc import Callable

from mpidist.coordinator.closures import Closures
from mpidist.coordinator.work import Running
from mpidist.observe.output import say
from mpidist.observe.patience import LIMIT_VARIABLE, limit_seconds, warn_seconds
from mpidist.observe.peers import Key, where_are
from mpidist.observe.watchdog import WATCHDOG

# What the watchdog sees may be so old.
_SHOW_SECONDS = 0.2
# So many closures are listed in a report.
_LISTED = 8
_UNSEEN = "its host shows nothing of it here: MPIDIST_JOB_DIR=DIRECTORY, of all hosts, lets ranks see each other"
_ADVICE = (
    "A function may take its time. ClusterCoordinator(strategy, closure_timeout=SECONDS) gives its worker up, and "
    f"{LIMIT_VARIABLE}=SECONDS ends the job"
)


class Waits:
    """The waits of the chief: `with` surrounds each one.

    Args:
        closures: Theirs are the workers.
        place_of: The name of a rank, and its process.
    """

    def __init__(self, closures: Closures, place_of: Callable[[int], tuple[str, Key]]) -> None:
        self._closures = closures
        self._place_of = place_of
        self._shown = 0.0
        # Read by the watchdog's thread: when the wait has begun, and what is done meanwhile.
        self._since: float | None = None
        self._running: list[Running] = []
        # By closure: when to tell of it again.
        self._next: dict[Running, float] = {}
        WATCHDOG.look_also(self.look)

    def __enter__(self) -> None:
        self._since = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self._since, self._running = None, []

    def show(self) -> None:
        """Local. Show the watchdog's thread what workers do; it must not look itself, while things change."""
        now = time.monotonic()
        if now - self._shown > _SHOW_SECONDS:
            self._shown, self._running = now, self._closures.running()

    def look(self, now: float) -> None:
        """Local. Report what runs for long. Called in the watchdog's thread.

        Args:
            now: The time.
        """
        since, limit = self._since, limit_seconds() if WATCHDOG.end is not None else 0.0
        if since is None:
            return
        seconds = {one: now - max(one.since, since) for one in self._running}
        ends = bool(limit) and any(waited > limit for waited in seconds.values())
        patience = min(limit, warn_seconds()) if ends else warn_seconds()
        long = [one for one, waited in seconds.items() if waited > patience]
        if not ends and all(now < self._next.get(one, 0.0) for one in long):
            return
        self._next = {one: now + 2 * seconds[one] for one in long}
        places = [self._place_of(one.rank) for one in long[:_LISTED]]
        asked = [peer for peer in WATCHDOG.peers() if peer.key in {key for _, key in places}]
        answers = dict(zip((peer.key for peer in asked), where_are(asked), strict=True))
        if self._since != since or not set(long) & set(self._running):
            # They have ended meanwhile.
            return
        lines = []
        for one, (name, key) in zip(long, places, strict=False):
            lines += [f"{name} has run {one} for {now - (one.since or since):.0f} s:", answers.get(key, _UNSEEN)]
        if len(long) > _LISTED:
            lines.append(f"and {len(long) - _LISTED} more workers")
        end = f", the limit is {limit:g} s, the job ends" if ends else ""
        told = "\n".join(f"  {line}" for one in [*lines, _ADVICE] for line in one.split("\n"))
        say(f"{WATCHDOG.place} has waited {now - since:.0f} s for functions of workers{end}\n{told}")
        if ends and WATCHDOG.end is not None:
            WATCHDOG.end()
