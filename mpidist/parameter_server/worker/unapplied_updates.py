"""The updates that a worker has finished: before it reads from a server, it waits until they are applied there."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mpidist.errors import DeadRankError
from mpidist.parameter_server.heap.push_slot import is_free
from mpidist.parameter_server.protocol.endpoint import Station


class OwnUpdates:
    """The updates of this worker that are not known to be applied.

    Args:
        station: The station of this process.
        servers: The ranks of the servers.
        is_fenced: Whether the coordinator counts this worker as lost.
    """

    def __init__(self, station: Station, servers: Sequence[int], is_fenced: Callable[[], bool]) -> None:
        self._station = station
        self._is_fenced = is_fenced
        # By server: where the slots of closures begin that are not known to be applied.
        self._unapplied: dict[int, set[int]] = {server: set() for server in servers}

    def begin(self, slot: int) -> None:
        """Local. A closure begins that has this slot: it is free, though this worker may not have looked."""
        for unapplied in self._unapplied.values():
            unapplied.discard(slot)

    def note(self, server: int, slot: int) -> None:
        """Local. A closure has ended, and a server is to apply what is in this slot."""
        self._unapplied[server].add(slot)

    def wait(self, server: int) -> None:
        """Local. Wait until a server has applied what this worker has finished: a closure sees what came before it.

        Raises:
            DeadRankError: The server is dead, or this worker counts as lost.
        """
        unapplied = self._unapplied[server]
        if not unapplied:
            return
        with self._station.awaited((server,), "apply what this worker has finished"):
            while unapplied:
                unapplied -= {offset for offset in unapplied if is_free(self._station.window, server, offset)}
                if unapplied:
                    self._station.step()
                if self._is_fenced():
                    raise DeadRankError("the coordinator has declared this worker lost and drops what it has finished")
