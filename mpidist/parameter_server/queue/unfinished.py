"""The book of closures: those that have not ended, and questions about them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mpidist.parameter_server.protocol.messages import Began, Built, Message, Pong, Send, SnapshotDone
from mpidist.parameter_server.queue.commits import Commits
from mpidist.parameter_server.queue.deadlines import Deadlines
from mpidist.parameter_server.queue.resources import Resources
from mpidist.parameter_server.queue.waiting import Awaiting, Suspects, name_of, tell_deaths
from mpidist.parameter_server.queue.work import Closure, Owing, ResourceEnd, Rules, Running, Work
from mpidist.parameter_server.queue.worker_table import WorkerRecord, WorkerTable

# The number of suspected closures that an error names.
_TOLD = 3


@dataclass
class Book:
    """All closures that have not ended, and the workers.

    Args:
        commits: The order of commits.

    Attributes:
        workers: The workers that are not lost, by rank.
        resources: The resources of which each worker has a copy.
    """

    commits: Commits
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
        return self._workers.waiting.count + len(self._awaiting.inputs) + len(self._suspects.held)

    def uses(self, data: int) -> bool:
        """Local. Whether a closure that has not ended takes an iterator over workers' own data."""
        return any(data in closure.work.data for closure in self._closures.values())

    def has_work_of(self, rank: int) -> bool:
        """Local. Whether a closure that has not ended was given to this worker last, which may be lost."""
        return any(closure.worker == rank for closure in self._closures.values())

    def undecided(self) -> dict[int, tuple[Work, Rules]]:
        """Local. The closures that no commit so far holds, by number: a snapshot of now does not include them."""
        return {number: (one.work, one.rules) for number, one in self._closures.items() if not one.is_decided}

    def discard(self, kind: str, number: int) -> list[Send]:
        """Local. Let workers forget an object that the program has dropped.

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

    def _noted(self, sender: int, message: Message, now: float) -> list[ResourceEnd] | None:
        """Note a message that decides nothing; None if it is another one."""
        ends: list[ResourceEnd] = []
        if isinstance(message, Built):
            ends = self.resources.built(sender, message, now)
            self._time(sender)
        elif isinstance(message, Began):
            # A message about an attempt that another worker has got meanwhile starts no clock.
            if self._is_current(sender, message.closure, message.attempt):
                self._time(sender, is_loading=not message.is_loaded)
        elif isinstance(message, Pong):
            if self._deadlines is not None:
                self._deadlines.answered(sender, message.number, now)
        elif isinstance(message, SnapshotDone):
            self.commits.snapshot_done(sender, message)
        else:
            return None
        return ends

    def _time(self, rank: int, sends: Sequence[Send] = (), *, is_loading: bool = False) -> None:
        """Note that a worker begins work, or is sent it: its time begins now."""
        if self._deadlines is not None and rank in self.workers:
            self._deadlines.begin(rank, sends, is_loading=is_loading)

    def _is_current(self, rank: int, number: int, attempt: int) -> bool:
        """Whether a worker, if it is not lost, has this attempt before all others."""
        worker = self.workers.get(rank)
        return worker is not None and worker.running[:1] == [number] and self._closures[number].attempt == attempt

    @property
    def has_suspects(self) -> bool:
        """Local. Whether a closure waits until the loss of its last worker is settled."""
        return bool(self._suspects.held)

    def suspects(self) -> list[str]:
        """Local. The closures that have lost workers, and those workers, in words; the worst ones of many."""
        found = sorted(((one, number) for number, one in self._closures.items() if one.deaths),
                       key=lambda item: (-len(item[0].deaths), item[1]))
        return [f"{name_of(number, one)} {tell_deaths(one)}" for one, number in found[:_TOLD]]

    def running(self) -> list[Running]:
        """Local. The work of each worker that has something to do."""
        found = []
        for rank, worker in self.workers.items():
            if worker.building:
                found.append(Running(rank, 0, 0, self.resources.label(min(worker.building)), 0.0))
            elif worker.running:
                closure = self._closures[worker.running[0]]
                found.append(Running(rank, worker.running[0], closure.attempt, closure.work.label, worker.since))
        return found

    def owing(self) -> list[Owing]:
        """Local. The servers from which a finished closure awaits an answer."""
        found: dict[int, float] = {}
        for number, since in self._finished.items():
            one = self._closures[number]
            pushed = frozenset(one.finished.servers if one.finished else ())
            for server in one.unapplied if one.is_decided else pushed - one.prepared:
                found.setdefault(server, since)
        return [Owing(*one) for one in sorted(found.items())]
