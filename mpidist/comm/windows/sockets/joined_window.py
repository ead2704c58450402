"""The window of a process that has joined: it is not in the communicator of the others, and needs no MPI."""

from __future__ import annotations

import pickle
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from mpidist.comm.group.solo import SoloCommunicator
from mpidist.comm.windows.sockets.addresses import Address
from mpidist.comm.windows.sockets.listener import Door, Opened
from mpidist.comm.windows.sockets.newcomers import Introduction
from mpidist.comm.windows.sockets.window import SocketWindow
from mpidist.failures.deaths import Process

# Seconds between two looks at the ranks that have joined.
_LOOK_SECONDS = 0.05


class Neighbours(NamedTuple):
    """The ranks of a window with which a joining process communicates.

    Attributes:
        heap_sizes: The heap sizes of all ranks that have begun the window.
        processes: The processes of these ranks.
        addresses: The addresses, by rank, of those with which it communicates. All others count as lost.
    """

    heap_sizes: tuple[int, ...]
    processes: Sequence[Process]
    addresses: Mapping[int, Address]


class JoinedWindow(SocketWindow):
    """Local. A window by sockets without a heap of its own.

    Args:
        introduction: The introduction of this process.
        neighbours: The other ranks.
        door: The listener of this process; closed with the window.
        lifeline: The connection over which this process was given its rank, and the rank at the other end: the end of
            the one process is known to the other by it. It is closed with the window.
        silence_seconds: See `WindowOptions`.

    Attributes:
        has_joined: Whether the others know that it has joined. Until then they take its end for a death.
    """

    def __init__(
        self, introduction: Introduction, neighbours: Neighbours, door: Door, lifeline: Opened, silence_seconds: float
    ) -> None:
        self.has_joined = False
        self._silence_seconds = silence_seconds
        self._admits_later = False
        self.communicator = SoloCommunicator()
        first, rank = len(neighbours.heap_sizes), introduction.rank
        heap_sizes = neighbours.heap_sizes + (0,) * (rank + 1 - first)
        processes = [*neighbours.processes, *[introduction.process] * (rank + 1 - first)]
        self._begin(rank, heap_sizes, processes, door)
        self._hello = memoryview(pickle.dumps(introduction))
        for other in range(rank):
            if other not in neighbours.addresses:
                self._losses.leave(other)
        self._take_one(lifeline._replace(introduction=introduction))
        here = introduction.address.place
        self._hold(other for other, address in neighbours.addresses.items() if address.place != here)

    def meet(self) -> list[int]:
        """Local. Open the connections to all others. Returns the ranks that cannot be reached from here."""
        others = sorted(self._door.addresses.keys() - {self.rank})
        mine = [self._connection(rank) for rank in others]
        # After this time the other host answers, but its process is stopped: it gets the message when it resumes.
        end = time.monotonic() + self._silence_seconds
        while any(one.link is None and one.rank not in self._losses.gone() for one in mine) and time.monotonic() < end:
            self._turn(_LOOK_SECONDS)
        return [rank for rank in others if rank in self._losses.gone()]

    def note_joined(self) -> None:
        """Local. Note that the others are notified: from now on the end of this process is no death to them."""
        self.has_joined = True

    def lost(self) -> frozenset[int]:
        """Local. See `Window.lost`. A rank that treats this one as lost, and sends it nothing, is lost to it."""
        return super().lost() | (self._losses.gone() & self._door.addresses.keys())

    def is_given_up_by(self, rank: int, within: float = 0.0) -> bool:
        """Local. Whether a rank is alive, as far as this one knows, and has closed its connection to it.

        Args:
            rank: The rank.
            within: The seconds for which this one waits for that.
        """
        end = time.monotonic() + within
        while not (is_given_up := rank in self.lost() and rank not in super().lost()) and time.monotonic() < end:
            self._turn(_LOOK_SECONDS)
        return is_given_up

    def _is_whole(self) -> bool:
        return False

    def _end(self, *, is_collective: bool) -> None:
        del is_collective
        if not self.has_joined:
            # After a farewell message its place would stay reserved for it, which another worker may have.
            for connection in list(self._open):
                self._close(connection)
        super()._end(is_collective=False)
