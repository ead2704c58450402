"""Resources: values and datasets of which each worker has a copy of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mpidist.parameter_server.protocol.messages import Build, Built, Send
from mpidist.parameter_server.queue.data_positions import Positions
from mpidist.parameter_server.queue.work import End, ResourceEnd, Work
from mpidist.parameter_server.queue.worker_table import WorkerRecord


@dataclass
class Resources:
    """Values and datasets of which each worker has its own; a worker that joins makes its own, too.

    A worker gets `Build` before every closure that may use the resource. If it could not make the resource, such a
    closure fails there; other closures continue.

    Args:
        workers: The workers that are not lost, by rank.

    Attributes:
        positions: The positions of the workers in their own data.
    """

    workers: Mapping[int, WorkerRecord]
    positions: Positions = field(default_factory=Positions)
    _works: dict[int, Work] = field(default_factory=dict)
    _number: int = 0

    def build(self, work: Work) -> tuple[int, list[Send]]:
        """Local. Let every worker make a resource. Returns its number and the messages.

        Args:
            work: The function that makes it.
        """
        self._number += 1
        self._works[self._number] = work
        return self._number, [send for worker in self.workers.values() for send in self._build(worker, self._number)]

    def build_again(self, number: int, work: Work) -> list[Send]:
        """Local. Let every worker make a resource again. No closure that uses it runs.

        Args:
            number: The number of the resource.
            work: The function that makes it.
        """
        self._works[number] = work
        for worker in self.workers.values():
            worker.ended.discard(number)
        return [send for worker in self.workers.values() for send in self._build(worker, number)]

    def is_building(self, number: int) -> bool:
        """Local. Whether some worker has not made a resource yet."""
        return any(number in worker.building for worker in self.workers.values())

    def label(self, number: int) -> str:
        """Local. The name of the function that makes a resource; empty when that is discarded."""
        work = self._works.get(number)
        return "" if work is None else work.label

    def joined(self, worker: WorkerRecord, own: Mapping[int, Work]) -> list[Send]:
        """Local. Let a new worker make all resources.

        Args:
            worker: The worker.
            own: The work that makes a resource on this worker, by the number of the resource, where other workers do
                another work.
        """
        return [send for number in self._works for send in self._build(worker, number, own.get(number))]

    def _build(self, worker: WorkerRecord, number: int, own: Work | None = None) -> list[Send]:
        work = self._works[number] if own is None else own
        worker.building.append(number)
        worker.known.add(("resource", number))
        return [*worker.define(work), Send(worker.rank, Build(number, work.function.number, work.arguments))]

    def built(self, rank: int, message: Built, now: float) -> list[ResourceEnd]:
        """Local. Note that a worker has made a resource, or could not.

        Args:
            rank: The worker.
            message: The worker's message.
            now: The time, in seconds.
        """
        worker = self.workers.get(rank)
        if worker is None:
            return []
        worker.building.remove(message.resource)
        worker.since = now
        if message.resource not in worker.building:
            error = message.traceback.rstrip().rpartition("\n")[2]
            self.positions.built(rank, message.resource, message.begun or error)
        if message.resource not in self._works:
            return []
        end = End.ERROR if message.error else End.RESULT
        return [ResourceEnd(message.resource, rank, end, message.error, message.traceback)]

    def lost(self, worker: WorkerRecord) -> list[ResourceEnd]:
        """Local. Note that a worker is lost, with its copies."""
        return [ResourceEnd(number, worker.rank, End.CANCELLED) for number in self._works]

    def discard(self, number: int) -> None:
        """Local. Forget a resource that is not needed: workers that join do not make it."""
        del self._works[number]
        self.positions.discard(number)
