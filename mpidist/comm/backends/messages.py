"""The wire: point-to-point messages between ranks, counted, for the algorithms that we write ourselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mpidist.arrays import AnyArray
from mpidist.comm.communicator import Communicator

# What goes in one message: large enough for the bandwidth, small enough that adding overlaps with receiving.
PIECE_BYTES = 1 << 19


@dataclass
class Traffic:
    """Bytes that this rank has moved by messages of our own.

    Attributes:
        sent: To other ranks.
        received: From other ranks.
        sent_between_nodes: That part of `sent` that left the node.
    """

    sent: int = 0
    received: int = 0
    sent_between_nodes: int = 0


class Messages:
    """Messages between the ranks of a communicator; every send has its receive in the same order.

    Args:
        communicator: An `MpiCommunicator`, whose messages are otherwise collective ones.
        piece_bytes: Size of a message; what is longer goes in several.

    Attributes:
        traffic: What was moved so far.
    """

    def __init__(self, communicator: Communicator, piece_bytes: int = 0) -> None:
        self.traffic = Traffic()
        self._mpi: Any = communicator.mpi
        self._piece_bytes = piece_bytes or PIECE_BYTES
        node_of: list[int] = communicator.all_gather_object(communicator.node_index)
        self._is_far = [node != node_of[communicator.rank] for node in node_of]

    def pieces(self, count: int, itemsize: int) -> list[slice]:
        """Local. How an array of `count` elements is cut into messages."""
        length = max(1, self._piece_bytes // itemsize)
        return [slice(begin, min(begin + length, count)) for begin in range(0, count, length)]

    def start_send(self, data: AnyArray, rank: int) -> Any:
        """Local. Begin to send; the request's `Wait` ends it, before which `data` must not change."""
        self.traffic.sent += data.nbytes
        if self._is_far[rank]:
            self.traffic.sent_between_nodes += data.nbytes
        return self._mpi.Isend(data, rank)

    def start_receive(self, data: AnyArray, rank: int) -> Any:
        """Local. Begin to receive; the request's `Wait` ends it."""
        self.traffic.received += data.nbytes
        return self._mpi.Irecv(data, rank)

    def send(self, data: AnyArray, rank: int) -> None:
        """Send an array in pieces; `receive` of `rank` takes it."""
        for request in [self.start_send(data[piece], rank) for piece in self.pieces(data.size, data.itemsize)]:
            request.Wait()

    def receive(self, data: AnyArray, rank: int) -> None:
        """Receive an array in pieces from `rank`."""
        for request in [self.start_receive(data[piece], rank) for piece in self.pieces(data.size, data.itemsize)]:
            request.Wait()

