"""The window of a process that has joined: it is not in the communicator of the others, and needs no MPI."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from mpidist.comm.communicator import SoloCommunicator
from mpidist.comm.deaths import Process
from mpidist.comm.windows.addresses import Address
from mpidist.comm.windows.desk import Introduction
from mpidist.comm.windows.door import Door, Opened
from mpidist.comm.windows.sockets import SocketWindow


class Neighbours(NamedTuple):
    """The ranks of a window with which one that joins has to do.

    Attributes:
        heap_sizes: Of all ranks that have begun the window.
        processes: Likewise.
        addresses: By rank, of those that it calls and is called by. All others are gone to it.
    """

    heap_sizes: tuple[int, ...]
    processes: Sequence[Process]
    addresses: Mapping[int, Address]


class JoinedWindow(SocketWindow):
    """A window by sockets without a heap of its own.

    Local. Args:
        introduction: Of this process.
        neighbours: The others.
        door: Of this process; closed with the window.
        lifeline: The connection over which this process was given its rank, and the rank at the other end: the end of
            the one process is known to the other by it. It is closed with the window.
    """

    def __init__(
        self, introduction: Introduction, neighbours: Neighbours, door: Door, lifeline: Opened
    ) -> None:
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

    def meet(self) -> None:
        """Local. Open the connections to all others, or begin to."""
        for rank in sorted(self._door.addresses.keys() - {self.rank}):
            self._connection(rank)

    def _is_whole(self) -> bool:
        return False

    def _end(self, *, is_collective: bool) -> None:
        del is_collective
        super()._end(is_collective=False)
