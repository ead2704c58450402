"""Waits of a process for others of the group: the watchdog's thread reports ranks that do not answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from mpidist.failures.peers import Key, where_are
from mpidist.failures.watchdog import WATCHDOG
from mpidist.observe.output import flush, say
from mpidist.recorder.time_limits import LIMIT_VARIABLE, limit_seconds, warn_seconds

# The number of processes that are listed in a report.
_LISTED = 8
UNSEEN = (
    "its host shows nothing of it here: MPIDIST_JOB_DIR=DIRECTORY, on a file system that all hosts share, lets ranks "
    "see each other"
)
ADVICE = (
    f"Training cannot continue without a server. {LIMIT_VARIABLE}=SECONDS ends a job that waits longer; the next one "
    "resumes from the last checkpoint"
)


class _Wait(NamedTuple):
    """A wait of this process for other ranks.

    Attributes:
        ranks: The ranks that it waits for. They may become fewer meanwhile.
        what: The action that is awaited: "apply a write".
        since: The time at which it began.
    """

    ranks: Collection[int]
    what: str
    since: float


class Awaited:
    """The waits of this process: `with awaited(ranks, what)` surrounds each one.

    Args:
        name_of: A function that returns the name of a rank: "ps 1".
        key_of: The process of a rank.

    Attributes:
        wait: The wait in progress, if there is one. The watchdog's thread reads it.
    """

    def __init__(self, name_of: Callable[[int], str], key_of: Callable[[int], Key]) -> None:
        self._name_of = name_of
        self._key_of = key_of
        self.wait: _Wait | None = None
        # Those that surround it, and itself; and the one that `with` is about to begin.
        self._waits: list[_Wait] = []
        self._next: _Wait | None = None
        # The wait that was reported, and the time of its next report.
        self._told: tuple[_Wait | None, float] = (None, 0.0)
        WATCHDOG.look_also(self.look)

    def __call__(self, ranks: Collection[int], what: str) -> Awaited:
        """Local. Inside, this process waits for some ranks.

        Args:
            ranks: The ranks that it waits for; a set may become smaller meanwhile.
            what: The action that is awaited.
        """
        self._next = _Wait(ranks, what, time.monotonic())
        return self

    def __enter__(self) -> None:
        # Only here: an interrupt before it would leave a wait without an end.
        if self._next is not None:
            self._waits.append(self._next)
            self.wait = self._next

    def __exit__(self, *_: object) -> None:
        self._waits.pop()
        self.wait = self._waits[-1] if self._waits else None

    def look(self, now: float) -> None:
        """Local. Report a long wait, and end the job where a limit is set. Called in the watchdog's thread.

        Args:
            now: The time.
        """
        wait, limit = self.wait, limit_seconds() if WATCHDOG.end is not None else 0.0
        if wait is None:
            return
        seconds = now - wait.since
        ends = bool(limit) and seconds > limit
        told, again = self._told
        if not ends and now < (again if told is wait else wait.since + warn_seconds()):
            return
        self._told = wait, now + 2 * seconds
        ranks = sorted(wait.ranks)
        lines = self._tell(ranks)
        if self.wait is not wait or not wait.ranks:
            return
        names = ", ".join(map(self._name_of, ranks[:_LISTED])) + (", ..." if len(ranks) > _LISTED else "")
        end = f", the limit is {limit:g} s, the job ends" if ends else ""
        text = "".join(f"\n  {line}" for one in [*lines, ADVICE] for line in one.split("\n"))
        if ends:
            flush()
        say(f"{WATCHDOG.place} has waited {seconds:.0f} s for {names} to {wait.what}{end}{text}")
        if ends and WATCHDOG.end is not None:
            WATCHDOG.end()

    def _tell(self, ranks: Sequence[int]) -> list[str]:
        """Say where some ranks are: two texts for each, its name and its call."""
        keys = {rank: self._key_of(rank) for rank in ranks}
        seen = {peer.key: peer for peer in WATCHDOG.peers()}
        # Those that are stuck come first: the others may wait for them, too.
        chosen = sorted(ranks, key=lambda rank: keys[rank] in seen and not seen[keys[rank]].is_stuck())[:_LISTED]
        asked = [seen[keys[rank]] for rank in chosen if keys[rank] in seen]
        answers = dict(zip((peer.key for peer in asked), where_are(asked), strict=True))
        return [text for rank in chosen for text in (
            f"{self._name_of(rank)} is process {keys[rank].number} on {keys[rank].host}:",
            answers.get(keys[rank], UNSEEN),
        )]
