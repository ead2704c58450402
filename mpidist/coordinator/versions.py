"""Versions: the updates that count, and how many of them may come between an attempt's reads and its own update.

With a bound k at most k + 1 attempts run at a time, and an update waits where it would leave another attempt that still
runs without a place: one that began earlier comes first then, or is lost. So no update that is computed is dropped, and
whoever began first can always go on. A pure state machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from mpidist.observe.recorder import Update


@dataclass
class Versions:
    """The versions of the variables of all servers: each update of a closure makes the next one.

    Args:
        staleness: So many updates may come between an attempt's reads and its update; None is any number.
        note: Takes note of each update that counts.

    Attributes:
        number: Of the updates that count.
    """

    staleness: int | None = None
    note: Callable[[Update], object] | None = None
    number: int = 0
    # By closure, in the order in which they began: what its attempt reads has at least this version. And the updates
    # that some server may not have applied yet.
    _begun: dict[int, int] = field(default_factory=dict)
    _unapplied: dict[int, int] = field(default_factory=dict)

    def may_begin(self) -> bool:
        """Local. Whether an attempt that begins now has a place behind all that run."""
        return self.staleness is None or self.number + len(self._begun) - self._readable <= self.staleness

    def begin(self, closure: int) -> None:
        """Local. An attempt begins: its worker is told."""
        self._begun[closure] = self._readable

    def may_count(self, closure: int) -> bool:
        """Local. Whether the update of an attempt may count now: all others that run still have their places then."""
        if self.staleness is None:
            return True
        others = [version for one, version in self._begun.items() if one != closure]
        return all(self.number + 1 + place - version <= self.staleness for place, version in enumerate(others))

    def count(self, closure: int, attempt: int, worker: int) -> None:
        """Local. The update of an attempt counts."""
        read = self._begun.pop(closure)
        if self.note is not None:
            self.note(Update(closure, attempt, worker, read, self.number))
        self.number += 1
        self._unapplied[closure] = self.number

    def end(self, closure: int) -> None:
        """Local. A closure has ended, or its attempt is void, or its update is applied."""
        self._begun.pop(closure, None)
        self._unapplied.pop(closure, None)

    @property
    def _readable(self) -> int:
        """The version that every server has at least."""
        # They were put there in the order of their versions.
        return next(iter(self._unapplied.values())) - 1 if self._unapplied else self.number
