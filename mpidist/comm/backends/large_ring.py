"""The ring of AUTO: for large arrays between nodes of one rank each."""

from __future__ import annotations

from typing_extensions import override

from mpidist.arrays import AnyArray
from mpidist.comm.backend import Backend
from mpidist.comm.backends.ring import RingBackend
from mpidist.comm.group.communicator import Communicator
from mpidist.options import CommunicationOptions


class LargeRing(RingBackend):
    """A ring that leaves broadcasts to MPI: its chain takes a step for every rank, and MPI a logarithm of them.

    Args:
        communicator: An `MpiCommunicator`.
        options: `bytes_per_pack` is the size of a message.
        mpi: Broadcasts over the same ranks. It is not closed with this one.
    """

    def __init__(self, communicator: Communicator, options: CommunicationOptions, mpi: Backend) -> None:
        super().__init__(communicator, options)
        self._mpi = mpi

    @override
    def broadcast(self, data: AnyArray, root: int) -> None:
        """Collective. See `Backend.broadcast`."""
        self._mpi.broadcast(data, root)
