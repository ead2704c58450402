"""Versions: the updates that count, and how many of them may come between an attempt's reads and its own update.

With a bound k at most k + 1 attempts run at a time, and an update waits where it would leave another attempt that still
runs without a place: one that began earlier comes first then, or is lost. So no update that is computed is dropped, and
the one that began first can always continue. A pure state machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from mpidist.parameter_server.queue.commits import Attempt
from mpidist.recorder.recorder import Update


@dataclass
class Versions:
    """The versions of the variables of all servers: each update of a closure makes the next one.

    Args:
        staleness: The number of updates that may come between an attempt's reads and its update; None: any number.
        note: A function that notes each update that counts.

    Attributes:
        number: The number of the updates that count.
        late: The attempts that came too late to count.
        is_synchronous: Whether updates wait for one another, and count together.
    """

    is_synchronous: ClassVar[bool] = False

    staleness: int | None = None
    note: Callable[[Update], object] | None = None
    number: int = 0
    late: int = 0
    # For each closure, in the order of their begin: the least version that its attempt reads. And the updates
    # that some server may not have applied yet.
    _begun: dict[int, int] = field(default_factory=dict)
    _unapplied: dict[int, int] = field(default_factory=dict)

    def may_begin(self, *, is_owing: bool) -> bool:
        """Local. Whether an attempt that begins now has a place after all that run.

        Args:
            is_owing: Whether its worker has finished a closure that is not decided.
        """
        del is_owing
        return self.staleness is None or self.number + len(self._begun) - self._readable <= self.staleness

    def begin(self, closure: int) -> None:
        """Local. Note that an attempt begins: its message is sent to the worker."""
        self._begun[closure] = self._readable

    def offer(self, attempt: Attempt) -> list[Attempt]:
        """Local. Note that an attempt is complete, and has pushed an update. Return it if the update may count now.

        All other running attempts must still have their places then.
        """
        others = [version for one, version in self._begun.items() if one != attempt.closure]
        if self.staleness is not None and not all(
            self.number + 1 + place - version <= self.staleness for place, version in enumerate(others)
        ):
            return []
        return [attempt]

    def full(self, workers: int) -> list[Attempt]:
        """Local. The attempts that have waited for one another, and count now.

        Args:
            workers: Number of workers that are not lost.
        """
        del workers
        return []

    def rest(self, in_flight: int) -> list[Attempt]:
        """Local. The attempts that wait for others that will not come, while the program waits.

        Args:
            in_flight: The number of closures that have begun and not ended.
        """
        del in_flight
        return []

    def counting(self, attempt: Attempt) -> Attempt:
        """Local. An attempt with the steps that count."""
        return attempt

    def count(self, attempts: Sequence[Attempt]) -> None:
        """Local. Count the updates of attempts together."""
        for one in attempts:
            self._note(one, self._begun.pop(one.closure))
            self.number += 1
            self._unapplied[one.closure] = self.number

    def _note(self, attempt: Attempt, read: int, *, is_late: bool = False) -> None:
        if self.note is not None:
            self.note(Update(attempt.closure, attempt.attempt, attempt.worker, read, self.number, is_late))

    def end(self, closure: int) -> None:
        """Local. Note that a closure has ended, its attempt is void, or its update is applied."""
        self._begun.pop(closure, None)
        self._unapplied.pop(closure, None)

    @property
    def _readable(self) -> int:
        """The version that every server has at least."""
        # They were put there in the order of their versions.
        return next(iter(self._unapplied.values())) - 1 if self._unapplied else self.number
