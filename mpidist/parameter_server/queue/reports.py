"""Reports: what workers do, and which servers have not answered, as the closures that have not ended tell it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from mpidist.parameter_server.queue.work import Closure, Owing, Running
from mpidist.parameter_server.queue.worker_table import WorkerRecord


def running(
    workers: Mapping[int, WorkerRecord], closures: Mapping[int, Closure], label: Callable[[int], str]
) -> list[Running]:
    """Local. The work of each worker that has something to do.

    Args:
        workers: By rank.
        closures: That have not ended, by number.
        label: The name of what makes a resource.
    """
    found = []
    for rank, worker in workers.items():
        if worker.building:
            found.append(Running(rank, 0, 0, label(min(worker.building)), 0.0))
        elif worker.running:
            closure = closures[worker.running[0]]
            found.append(Running(rank, worker.running[0], closure.attempt, closure.work.label, worker.since))
    return found


def owing(finished: Mapping[int, float], closures: Mapping[int, Closure]) -> list[Owing]:
    """Local. The servers from which a finished closure awaits something.

    Args:
        finished: When the function of a closure returned, by number.
        closures: That have not ended, by number.
    """
    found: dict[int, float] = {}
    for number, since in finished.items():
        one = closures[number]
        pushed = frozenset(one.finished.servers if one.finished else ())
        for server in one.unapplied if one.is_decided else pushed - one.prepared:
            found.setdefault(server, since)
    return [Owing(*one) for one in sorted(found.items())]
