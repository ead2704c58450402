"""The book of closures: those that have not ended, and what others ask of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mpidist.parameter_server.protocol.messages import Send
from mpidist.parameter_server.queue.awaiting_inputs import Awaiting
from mpidist.parameter_server.queue.deadlines import Deadlines
from mpidist.parameter_server.queue.reports import owing, running
from mpidist.parameter_server.queue.resources import Resources
from mpidist.parameter_server.queue.suspects import Suspects, name_of, tell_deaths
from mpidist.parameter_server.queue.work import Closure, Owing, Rules, Running, Work
from mpidist.parameter_server.queue.worker_table import WorkerRecord, WorkerTable

# Of closures under suspicion.
_TOLD = 3


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
    _suspects: Suspects = field(init=False, default_factory=Suspects)
    # When the current attempt of a closure was finished.
    _finished: dict[int, float] = field(init=False, default_factory=dict)
    _deadlines: Deadlines | None = field(init=False, default=None)
    _number: int = field(init=False, default=0)

    def counts(self) -> tuple[int, int]:
        """Local. The number of closures so far, and of those that have not ended."""
        return self._number, len(self._closures)

    @property
    def is_done(self) -> bool:
        """Local. Whether every closure has ended."""
        return not self._closures

    def is_at_end(self, data: int) -> bool:
        """Local. Whether an iterator over workers' own data has ended on every worker."""
        return not self._workers.have_left((data,))

    @property
    def in_flight(self) -> int:
        """Local. The number of closures that some worker has, or has finished, and that have not ended."""
        return len(self._closures) - self._not_begun

    @property
    def _not_begun(self) -> int:
        return len(self._workers.waiting) + len(self._awaiting) + len(self._suspects)

    def uses(self, data: int) -> bool:
        """Local. Whether a closure that has not ended takes an iterator over workers' own data."""
        return any(data in closure.work.data for closure in self._closures.values())

    def has_work_of(self, rank: int) -> bool:
        """Local. Whether a closure that has not ended was given to this worker last, which may be lost."""
        return any(closure.worker == rank for closure in self._closures.values())

    def undecided(self) -> dict[int, tuple[Work, Rules]]:
        """Local. The closures that no commit so far holds, by number: what a cut of this moment leaves to be done."""
        return {number: (one.work, one.rules) for number, one in self._closures.items() if not one.is_decided}

    def discard(self, kind: str, number: int) -> list[Send]:
        """Local. Let workers forget what the program has dropped.

        Args:
            kind: See `Discard`.
            number: The number of this kind.
        """
        if kind == "resource":
            self.resources.discard(number)
        return [send for worker in self.workers.values() for send in worker.discard(kind, number)]

    def overdue(self) -> list[int]:
        """Local. The workers whose closure runs longer than the time limit: to be reported as `lost`."""
        return [] if self._deadlines is None else self._deadlines.overdue(self.workers)

    def _time(self, rank: int, sends: Sequence[Send] = (), *, is_loading: bool = False) -> None:
        """A worker begins something, or is sent it: the time for it begins now."""
        if self._deadlines is not None and rank in self.workers:
            self._deadlines.begin(rank, sends, is_loading=is_loading)

    def _is_current(self, rank: int, number: int, attempt: int) -> bool:
        """Whether a worker, if it is not lost, has this attempt before all others."""
        worker = self.workers.get(rank)
        return worker is not None and worker.running[:1] == [number] and self._closures[number].attempt == attempt

    @property
    def has_suspects(self) -> bool:
        """Local. Whether a closure waits until the loss of its last worker is settled."""
        return len(self._suspects) > 0

    def suspects(self) -> list[str]:
        """Local. The closures that have lost workers, and those workers, in words; the worst ones of many."""
        found = sorted(((one, number) for number, one in self._closures.items() if one.deaths),
                       key=lambda item: (-len(item[0].deaths), item[1]))
        return [f"{name_of(number, one)} {tell_deaths(one)}" for one, number in found[:_TOLD]]

    def running(self) -> list[Running]:
        """Local. The work of each worker that has something to do."""
        return running(self.workers, self._closures, self.resources.label)

    def owing(self) -> list[Owing]:
        """Local. The servers from which a finished closure awaits something."""
        return owing(self._finished, self._closures)
