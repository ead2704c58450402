"""The places of workers: which rank has each. A worker that joins has a new rank, in the place of one that is lost."""

from __future__ import annotations

from mpidist.cluster.roles.server_roles import ServerRoles
from mpidist.cluster.spec import Task
from mpidist.failures.deaths import Process


class WorkerPlaces:
    """The places of the workers of a job.

    Args:
        roles: The roles of the ranks that have begun it.

    Attributes:
        ranks: The rank that has each place, or had it last, by the index of the worker.
    """

    def __init__(self, roles: ServerRoles) -> None:
        self.ranks = list(roles.workers)
        self._roles = roles
        # The index and the process of each rank that has a place.
        self._given: dict[int, tuple[int, Process]] = {}
        self._next = roles.group.size

    def give(self, index: int, process: Process, rank: int | None = None) -> int:
        """Local. Give a process a rank for a place, which no other process had. The place is not its own yet.

        Args:
            index: The index of the place.
            process: The process.
            rank: The rank, where that is known already.
        """
        if rank is None:
            rank, self._next = self._next, self._next + 1
        self._given[rank] = index, process
        return rank

    def take(self, rank: int) -> None:
        """Local. Let a rank have the place for which it was given."""
        self.ranks[self.index_of(rank)] = rank

    def index_of(self, rank: int) -> int:
        """Local. The index of the place for which a rank was given."""
        return self._given[rank][0]

    def all_of(self, index: int) -> list[int]:
        """Local. The ranks that were given for a place, in their order; the first one was there from the beginning."""
        return [self._roles.workers[index], *(rank for rank, (its, _) in self._given.items() if its == index)]

    def name_of(self, rank: int) -> str:
        """Local. See `ServerRoles.name_of`."""
        if rank in self._given:
            return str(Task("worker", self.index_of(rank)))
        # Servers know it only by its messages.
        return self._roles.name_of(rank) if rank < self._next else f"worker of rank {rank}, which has joined"

    def process_of(self, rank: int) -> Process:
        """Local. The process of a rank; one that is none where this rank does not know it."""
        if rank in self._given:
            return self._given[rank][1]
        processes = self._roles.group.processes
        return processes[rank] if rank < len(processes) else Process("", 0, "")
