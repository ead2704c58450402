"""Workers: the coordinator's state of each worker, and the choice of a free worker for each closure."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from mpidist.parameter_server.protocol.messages import SLOTS, Define, Discard, Send
from mpidist.parameter_server.queue.staleness import Versions
from mpidist.parameter_server.queue.waiting import Waiting
from mpidist.parameter_server.queue.work import Rules, Work


@dataclass
class WorkerRecord:
    """A worker that is not lost.

    Attributes:
        rank: The rank of the worker. The rank of a lost worker is never used again.
        known: The objects that were sent to it and not discarded: kinds and numbers.
        slots: The closure in each of its slots, until that is applied or has failed.
        running: The closures that it was sent and has not returned, in their order.
        finished: The closures that it has finished and that are not decided, in their order.
        building: The resources that it was asked to make and has not made.
        ended: The iterators over its own data that have ended, as resources.
        since: The time at which it began its present work.
    """

    rank: int
    known: set[tuple[str, int]] = field(default_factory=set)
    slots: list[int | None] = field(default_factory=lambda: [None] * SLOTS)
    running: list[int] = field(default_factory=list)
    finished: list[int] = field(default_factory=list)
    building: list[int] = field(default_factory=list)
    ended: set[int] = field(default_factory=set)
    since: float = 0.0

    def define(self, work: Work) -> list[Send]:
        """Local. The messages with all objects that this worker needs for some work and does not have."""
        names = work.named
        if work.function[:2] not in self.known:
            # A worker that has a function has what the function names.
            names = (*names, *work.captured, work.function)
        missing = dict.fromkeys(name for name in names if name[:2] not in self.known)
        self.known.update(name[:2] for name in missing)
        return [Send(self.rank, Define(*name)) for name in missing]

    def discard(self, kind: str, number: int) -> list[Send]:
        """Local. Let this worker forget an object, if it has it."""
        if (kind, number) not in self.known:
            return []
        self.known.remove((kind, number))
        if kind == "resource":
            self.ended.discard(number)
        return [Send(self.rank, Discard(kind, number))]

    def begin(self, closure: int, now: float) -> int:
        """Local. Note a closure that is sent to this worker; returns the slot for it."""
        slot = self.slots.index(None)
        self.slots[slot] = closure
        if not self.running:
            self.since = now
        self.running.append(closure)
        return slot

    def runs(self) -> int | None:
        """Local. The closure that it runs, or is about to; None if it runs none, or makes a resource before that."""
        return self.running[0] if self.running and not self.building else None


@dataclass
class FreeWorkers:
    """The workers that can be given a closure; the one that is free for the longest time is first.

    Attributes:
        by_running: The ranks of the workers that run no closure, and of those that run one.
    """

    by_running: tuple[dict[int, None], dict[int, None]] = field(default_factory=lambda: ({}, {}))

    def note(self, worker: WorkerRecord) -> None:
        """Local. Put a worker into the right list, after a change of it."""
        running = len(worker.running) if None in worker.slots else len(self.by_running)
        for number, ranks in enumerate(self.by_running):
            if number == running:
                ranks[worker.rank] = None
            else:
                ranks.pop(worker.rank, None)

    def remove(self, rank: int) -> None:
        """Local. Forget a worker that is lost."""
        for ranks in self.by_running:
            ranks.pop(rank, None)


class Start(NamedTuple):
    """A closure that is to be sent to a worker, which has a slot for it."""

    worker: WorkerRecord
    closure: int
    slot: int


@dataclass
class WorkerTable:
    """The workers that are not lost, and the closures that wait for one.

    Attributes:
        by_rank: The workers.
        waiting: The closures.
    """

    by_rank: dict[int, WorkerRecord] = field(default_factory=dict)
    waiting: Waiting = field(default_factory=Waiting)
    _free: FreeWorkers = field(default_factory=FreeWorkers)

    def join(self, rank: int) -> WorkerRecord:
        """Local. Add a worker."""
        worker = self.by_rank[rank] = WorkerRecord(rank)
        self._free.note(worker)
        return worker

    def lose(self, rank: int) -> WorkerRecord | None:
        """Local. Remove and return a worker, None if it is unknown; any other one may take closures bound to it."""
        self._free.remove(rank)
        self.waiting.unbind(rank)
        return self.by_rank.pop(rank, None)

    def put(self, closure: int, rules: Rules, data: tuple[int, ...]) -> None:
        """Local. Let a closure wait for a worker, or for its own worker while that is alive."""
        self.waiting.put(closure, rules.priority, rules.worker if rules.worker in self.by_rank else None, data)

    def have_left(self, data: tuple[int, ...]) -> bool:
        """Local. Whether some worker is not known to be at the end of any of this data."""
        return any(worker.ended.isdisjoint(data) for worker in self.by_rank.values())

    def _may_take(self, worker: WorkerRecord, data: tuple[int, ...]) -> bool:
        """Whether a worker's own data continues; it may also try where no other one's does."""
        return worker.ended.isdisjoint(data) or not self.have_left(data)

    def start(self, now: float, versions: Versions, *, prefetch: bool) -> list[Start]:
        """Local. Give waiting closures to free workers: first to those that run none, in the order of their last end.

        Args:
            now: The time.
            versions: The rules by which attempts may begin.
            prefetch: See `Closures`.
        """
        starts: list[Start] = []
        if not self.waiting.count:
            return starts
        for running in range(1 + prefetch):
            for rank in list(self._free.by_running[running]):
                worker = self.by_rank[rank]
                if not versions.may_begin(is_owing=bool(worker.finished)):
                    continue
                closure = self.waiting.take(rank, partial(self._may_take, worker))
                if closure is not None:
                    versions.begin(closure)
                    starts.append(Start(worker, closure, worker.begin(closure, now)))
                    self._free.note(worker)
        return starts

    def returned(self, worker: WorkerRecord, now: float) -> None:
        """Local. Note that a worker has ended the closure that it ran; the slot is still in use."""
        worker.running.pop(0)
        worker.since = now
        self._free.note(worker)

    def release(self, rank: int | None, closure: int) -> None:
        """Local. Free the slot of a closure, unless its worker is lost."""
        worker = None if rank is None else self.by_rank.get(rank)
        if worker is not None:
            worker.slots[worker.slots.index(closure)] = None
            self._free.note(worker)
