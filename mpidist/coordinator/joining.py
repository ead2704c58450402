"""Joining: the coordinator gives places to workers that join the running job, and work to those that have joined."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mpidist.coordinator.closures import Action, Closures
from mpidist.coordinator.data_sets import DataSets
from mpidist.serving.station import Station
from mpidist.strategy.joining import Invitation


class Joining:
    """The workers that join.

    Args:
        closures: Of the coordinator.
        data_sets: Likewise.
        station: Of the chief.
        do: Does what the closures ask for.
    """

    def __init__(
        self, closures: Closures, data_sets: DataSets, station: Station, do: Callable[[Sequence[Action]], None]
    ) -> None:
        self._closures = closures
        self._data_sets = data_sets
        self._station = station
        self._do = do

    def look(self, invitation: Invitation, now: float) -> None:
        """Local. Let those work that have joined, and answer those that ask for a place.

        Args:
            invitation: Of the chief.
            now: The time.
        """
        with self._station.whole:
            for rank in invitation.arrived():
                own = self._data_sets.joined(rank, invitation.before(rank))
                self._do(self._closures.joined(rank, now, own))
            invitation.look(self._closures.workers.keys(), self._closures.has_work_of)
