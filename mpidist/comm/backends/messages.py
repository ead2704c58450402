"""Messages: point-to-point messages between ranks, whose bytes are counted, for the library's own algorithms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mpidist.arrays import AnyArray
from mpidist.comm.arithmetic.slices import cut_by_length
from mpidist.comm.group.communicator import Communicator

# The size of a message: large enough for the full bandwidth, small enough that adding overlaps with receiving.
PIECE_BYTES = 1 << 19


@dataclass
class Traffic:
    """The bytes that this rank has moved by the library's own messages.

    Attributes:
        sent: Bytes sent to other ranks.
        received: Bytes received from other ranks.
        sent_between_nodes: The bytes of `sent` that left the node.
    """

    sent: int = 0
    received: int = 0
    sent_between_nodes: int = 0


class Messages:
    """Messages between the ranks of a communicator.

    Messages carry no tags: those between two ranks must be received in the order in which they are sent, which MPI then
    keeps (MPI 4.1, section 3.5).

    Args:
        communicator: An `MpiCommunicator`. Others may use it, too, but not at the same time, and in the same order on
            every rank.
        piece_bytes: The largest size of a message; longer arrays go in several.

    Attributes:
        traffic: The bytes moved so far.
    """

    def __init__(self, communicator: Communicator, piece_bytes: int = 0) -> None:
        self.traffic = Traffic()
        self._mpi: Any = communicator.mpi
        self._piece_bytes = piece_bytes or PIECE_BYTES
        self._is_far = [node != communicator.node_index for node in communicator.nodes]

    def pieces(self, count: int, itemsize: int) -> list[slice]:
        """Local. The slices of an array of `count` elements that go in one message each."""
        return cut_by_length(count, max(1, self._piece_bytes // itemsize))

    def start_send(self, data: AnyArray, rank: int) -> Any:
        """Local. Begin to send an array, and return the request; its `Wait` ends the sending.

        The caller keeps the request until `Wait`, and does not change `data` before (MPI 4.1, section 3.7.2): MPI may
        read it until then, and only the request holds a reference to it.
        """
        self.traffic.sent += data.nbytes
        if self._is_far[rank]:
            self.traffic.sent_between_nodes += data.nbytes
        return self._mpi.Isend(data, rank)

    def start_receive(self, data: AnyArray, rank: int) -> Any:
        """Local. Begin to receive into an array, and return the request; its `Wait` ends the receiving.

        The caller keeps the request until `Wait`, and neither reads nor changes `data` before.
        """
        self.traffic.received += data.nbytes
        return self._mpi.Irecv(data, rank)

    def send(self, data: AnyArray, rank: int) -> None:
        """Collective over two ranks. Send an array in pieces; the other rank calls `receive`."""
        for request in [self.start_send(data[piece], rank) for piece in self.pieces(data.size, data.itemsize)]:
            request.Wait()

    def receive(self, data: AnyArray, rank: int) -> None:
        """Collective over two ranks. Receive an array in pieces; the other rank calls `send`."""
        for request in [self.start_receive(data[piece], rank) for piece in self.pieces(data.size, data.itemsize)]:
            request.Wait()
