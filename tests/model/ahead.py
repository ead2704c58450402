"""Pulling ahead, explored: the product's `Ahead` in all orders of a function's acts, pulls, commits and messages.

A worker runs a function again and again, or two in turns. It reads two variables, and may assign to the second one;
then its update waits until it is applied. While the function runs, its next closure may come, as soon as all updates
before are applied; a piece may be pulled for it; an update may be applied; another worker may change a variable; and
the worker may be called lost. `AHEAD_MUTANTS` break a rule each.

Rules of each read:

    sent       it holds all updates of functions that ran here, but those of the one before
    own        of that one it holds what it has assigned
    version    it is no older than a read before it
    shards     shards of one variable are of one moment
    lost       nothing that was pulled counts once the worker is lost
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from mpidist.comm.windows.window import SoloWindow
from mpidist.failures.peers import Key
from mpidist.parameter_server.heap.dense import HeapVariable
from mpidist.parameter_server.heap.versioned_read import Value
from mpidist.parameter_server.protocol.endpoint import Station
from mpidist.parameter_server.protocol.messages import Do
from mpidist.parameter_server.worker.prefetch import Ahead
from mpidist.variables.kinds.served import ServedPlace
from tests.model.parties import BrokenError
from tests.model.ways import go_all_ways

_SIZE = 4
_SURPRISING = 3


class AheadJob(NamedTuple):
    """The job that is explored.

    Attributes:
        closures: Their number.
        first: Nobody comes between the acts of those before this one.
        pulls: So many pieces at most are pulled in a function.
        assigns: Functions assign to the second variable, and change nothing else.
        is_sharded: The variables are shards of one.
        is_mixed: Two functions take turns. The one that runs first reads the first variable alone, but both in the
            third closure, where nobody expects it.
        others: So many changes another worker makes.
        losses: Whether the worker may be called lost.
        ahead: The class of what pulls ahead.
    """

    closures: int = 3
    first: int = 2
    pulls: int = 3
    assigns: bool = False
    is_sharded: bool = False
    is_mixed: bool = False
    others: int = 0
    losses: int = 0
    ahead: type[Ahead] = Ahead


class _Walk:
    """One way through a job.

    Args:
        job: The job.
        choices: What happens where several things can, by number; the first one when these are used up.
    """

    def __init__(self, job: AheadJob, choices: list[int]) -> None:
        self.job, self.choices = job, choices
        self.counts: list[int] = []
        window = SoloWindow(1 << 10)
        window.memory[:] = 0
        self.places = [
            ServedPlace(number, 0, 512 * number, (512 * number + 64, 512 * number + 256), (_SIZE,), "float64")
            for number in range(2)
        ]
        self.variables = [HeapVariable(window.memory, place) for place in self.places]
        # Of each variable the closures that have changed it; 0 is another worker. Its value is the length of this.
        self.changes: list[list[int]] = [[], []]
        self.known: dict[int, Value] = {}
        self.waiting: list[Do] = []
        self.unapplied: list[int] = []
        self.seen = [0, 0]
        self.others, self.losses = job.others, job.losses
        station = Station(window, str, lambda rank: Key("", rank, ""), frozenset())
        self.ahead = job.ahead(station, self.known, lambda: self.waiting[0] if self.waiting else None)
        # One process has nobody to share its window with: no thread begins.
        self.ahead._is_possible = True
        self.ahead.lock.share = lambda act: None  # type: ignore[method-assign]
        if job.is_sharded:
            self.ahead.note_shards((0, 1))

    def go(self) -> None:
        """Go to the end.

        Raises:
            BrokenError: A rule does not hold.
        """
        for closure in range(1, 1 + self.job.closures):
            self.waiting.clear()
            self.pulls = self.job.pulls
            with self.ahead.during(self._do(closure)):
                for act in self._acts(closure):
                    self._let_others(closure)
                    act()
                self._let_others(closure)
            self.unapplied.append(closure)

    def _do(self, closure: int) -> Do:
        return Do(closure, 1, closure % 2, closure % 2 if self.job.is_mixed else 0, b"", True)

    def _acts(self, closure: int) -> Iterator[Callable[[], object]]:
        found: list[int] = []
        yield lambda: found.append(self._read(closure, 0))
        if not self.job.is_mixed or not closure % 2 or closure == _SURPRISING:
            yield lambda: found.append(self._read(closure, 1))
        if self.job.assigns:
            yield lambda: self.ahead.note_change(1)
        if self.job.is_sharded and found[0] != found[1]:
            raise BrokenError(f"shards: closure {closure} reads {found} of one variable")

    def _let_others(self, closure: int) -> None:
        while closure >= self.job.first:
            can = ["go on"]
            if self.waiting and self.pulls:
                can.append("pull")
            may_come = closure < self.job.closures and all(one >= closure for one in self.unapplied)
            if may_come and not self.waiting:
                can.append("send")
            can += ["apply"] * bool(self.unapplied) + ["other"] * bool(self.others) + ["lose"] * bool(self.losses)
            place = len(self.counts)
            self.counts.append(len(can))
            chosen = can[self.choices[place] if place < len(self.choices) else 0]
            if chosen == "go on":
                return
            if chosen == "pull":
                self.pulls -= 1
                self.ahead._go_on()
            elif chosen == "send":
                self.waiting.append(self._do(closure + 1))
            elif chosen == "apply":
                self._apply()
            elif chosen == "other":
                self.others -= 1
                self._change(1, 0)
            else:
                self.losses = 0
                self.ahead.stop()

    def _apply(self) -> None:
        closure = self.unapplied.pop(0)
        for number in (1,) if self.job.assigns else (0, 1):
            self._change(number, closure)

    def _change(self, number: int, closure: int) -> None:
        self.changes[number].append(closure)
        self.variables[number].change(lambda _, new: new.fill(len(self.changes[number])))

    def _read(self, closure: int, number: int) -> int:
        """As `Worker.pull`; returns how many changes the value holds."""
        value = self.ahead.take(self.places[number])
        if value is None:
            # Who reads now waits until its own updates are applied.
            while self.unapplied:
                self._apply()
            variable = self.variables[number]
            value = Value(int(variable.words[0]), np.array(variable.current))
        elif self.job.losses and not self.losses:
            raise BrokenError(f"lost: closure {closure} takes what was pulled ahead")
        self.known[number] = value
        count = int(value.array[0])
        if not (value.array == count).all():
            raise BrokenError(f"version: closure {closure} reads {value.array}")
        if count < self.seen[number]:
            raise BrokenError(f"version: closure {closure} reads version {count} after {self.seen[number]}")
        self.seen[number] = count
        held = self.changes[number][:count]
        changing = range(1, closure) if number or not self.job.assigns else range(0)
        for before in changing:
            if before not in held and before < closure - 1:
                raise BrokenError(f"sent: closure {closure} misses closure {before} in {held}")
            if before not in held and self.job.assigns:
                raise BrokenError(f"own: closure {closure} misses what closure {before} has assigned")
        return count


def explore_ahead(job: AheadJob) -> tuple[str, int]:
    """Go all ways through a job; returns as `go_all_ways`."""
    return go_all_ways(lambda choices: _Walk(job, choices))


class MissesChanges(Ahead):
    """Keeps what it has pulled of a variable that the running function assigns to."""

    def note_change(self, number: int) -> None:
        return


class PullsChanged(Ahead):
    """Drops what is changed, and pulls it again at once."""

    def note_change(self, number: int) -> None:
        self._drop(number)


class KeepsPartOfGroups(Ahead):
    """Pulls the rest of a group when the function has ended."""

    def _settle(self) -> None:
        return


class KeepsOlder(Ahead):
    """Keeps what it has pulled of a variable that the running function reads afterwards."""

    def take(self, place: ServedPlace) -> Value | None:
        pulls, self._next = self._next, None
        try:
            return super().take(place)
        finally:
            self._next = pulls


class GoesOnWhenLost(Ahead):
    """Does not stop."""

    def stop(self) -> None:
        return


MIXED = AheadJob(closures=4, first=3, pulls=2, is_mixed=True, others=1)

AHEAD_MUTANTS = {
    "misses-changes": ("own", AheadJob(assigns=True, ahead=MissesChanges)),
    "pulls-changed": ("own", AheadJob(assigns=True, ahead=PullsChanged)),
    "keeps-part-of-groups": ("shards", AheadJob(is_sharded=True, ahead=KeepsPartOfGroups)),
    "keeps-older": ("version", MIXED._replace(ahead=KeepsOlder)),
    "goes-on-when-lost": ("lost", AheadJob(losses=1, ahead=GoesOnWhenLost)),
}
