"""The book of closures: those that have not ended, and what others ask of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from mpidist.parameter_server.queue.awaiting_inputs import Awaiting
from mpidist.parameter_server.queue.reports import owing, running
from mpidist.parameter_server.queue.resources import Resources
from mpidist.parameter_server.queue.work import Closure, Owing, Rules, Running, Work
from mpidist.parameter_server.queue.worker_table import WorkerRecord, WorkerTable


@dataclass
class Book:
    """All closures that have not ended, and the workers.

    Attributes:
        workers: The workers that are not lost, by rank.
        resources: What each worker has a copy of.
    """

    workers: dict[int, WorkerRecord] = field(init=False)
    resources: Resources = field(init=False)
    _workers: WorkerTable = field(init=False)
    _closures: dict[int, Closure] = field(init=False, default_factory=dict)
    _awaiting: Awaiting = field(init=False, default_factory=Awaiting)
    # When the current attempt of a closure was finished.
    _finished: dict[int, float] = field(init=False, default_factory=dict)

    @property
    def is_done(self) -> bool:
        """Local. Whether every closure has ended."""
        return not self._closures

    def is_at_end(self, data: int) -> bool:
        """Local. Whether an iterator over workers' own data has come to its end on every worker."""
        return not self._workers.have_left((data,))

    @property
    def in_flight(self) -> int:
        """Local. The number of closures that some worker has, or has finished, and that have not ended."""
        return len(self._closures) - self._not_begun

    @property
    def _not_begun(self) -> int:
        return len(self._workers.waiting) + len(self._awaiting)

    def uses(self, data: int) -> bool:
        """Local. Whether a closure that has not ended takes an iterator over workers' own data."""
        return any(data in closure.work.data for closure in self._closures.values())

    def has_work_of(self, rank: int) -> bool:
        """Local. Whether a closure that has not ended was given to this worker last, which may be lost."""
        return any(closure.worker == rank for closure in self._closures.values())

    def undecided(self) -> dict[int, tuple[Work, Rules]]:
        """Local. The closures that no commit so far holds, by number: what a cut of this moment leaves to be done."""
        return {number: (one.work, one.rules) for number, one in self._closures.items() if not one.is_decided}

    def running(self) -> list[Running]:
        """Local. The work of each worker that has something to do."""
        return running(self.workers, self._closures, self.resources.label)

    def owing(self) -> list[Owing]:
        """Local. The servers from which a finished closure awaits something."""
        return owing(self._finished, self._closures)
