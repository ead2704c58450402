"""Membership: the coordinator gives the work of lost workers to others, and work to those that have joined."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from mpidist.coordinator.worker_datasets import DataSets
from mpidist.failures.peers import Key
from mpidist.parameter_server.protocol.endpoint import Station
from mpidist.parameter_server.queue.closures import Action, Closures
from mpidist.strategy.parameter_server.invitation import Invitation, require_more
from mpidist.strategy.parameter_server.strategy import ParameterServerStrategy

logger = logging.getLogger("mpidist")


class Membership:
    """The workers that are lost, and those that join.

    Args:
        strategy: The strategy of the chief.
        closures: The closures of the coordinator.
        data_sets: Likewise.
        station: The station of the chief.
        do: Does what the closures ask for.
    """

    def __init__(
        self, strategy: ParameterServerStrategy, closures: Closures, data_sets: DataSets, station: Station,
        do: Callable[[Sequence[Action]], None],
    ) -> None:
        self._strategy = strategy
        self._closures = closures
        self._data_sets = data_sets
        self._station = station
        self._do = do

    def place_of(self, rank: int) -> tuple[str, Key]:
        """Local. The name of a rank, and its process."""
        return self._station.name_of(rank), Key(*self._strategy.places.process_of(rank))

    def look(self) -> None:
        """Local. Take note of workers that are lost, and of workers that join.

        Raises:
            DeadRankError: There is no worker any more, and none can join.
        """
        now, workers = time.monotonic(), self._closures.workers
        lost = {rank for gone in (self._station.window.lost(), self._station.left) for rank in gone if rank in workers}
        lost.update(self._closures.overdue(now))
        for rank in sorted(lost):
            self._lose(rank, now)
        if lost and not self._closures.workers:
            require_more(self._strategy.invitation)
        if self._strategy.invitation is not None:
            self._let_join(self._strategy.invitation, now)

    def _lose(self, rank: int, now: float) -> None:
        (name, (host, process, _)), left = self.place_of(rank), len(self._closures.workers) - 1
        logger.warning(
            "%s (rank %d, process %d on %s) is lost; its work goes to the other %d worker%s",
            name, rank, process, host, left, "s" * (left != 1),
        )
        with self._station.whole:
            self._do(self._closures.lost(rank, now))
            self._strategy.give_up(rank)

    def _let_join(self, invitation: Invitation, now: float) -> None:
        """Let those work that have joined, and answer those that ask for a place."""
        with self._station.whole:
            for rank in invitation.arrived():
                own = self._data_sets.joined(rank, invitation.before(rank))
                self._do(self._closures.joined(rank, now, own))
            invitation.look(self._closures.workers.keys(), self._closures.has_work_of)
