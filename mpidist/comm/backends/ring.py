"""The ring: every rank sends to its right neighbour and receives from its left one, as much as the others do.

All-reduce is a reduce-scatter and an all-gather around the ring: each rank sends 2(n - 1)/n of its array, whatever n
(P. Patarasuk, X. Yuan: Bandwidth optimal all-reduce algorithms for clusters of workstations, 2009). A piece is added
while the next ones are on their way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpidist import arrays
from mpidist.arrays import AnyArray, as_bytes
from mpidist.comm.arithmetic.combine import FUNCTIONS
from mpidist.comm.arithmetic.slices import cut_evenly, slices_of
from mpidist.comm.backend import Backend
from mpidist.comm.backends.messages import Messages, Traffic
from mpidist.comm.communicator import Communicator
from mpidist.options import CommunicationOptions, ReduceOp

# Receives that are posted ahead of the piece that is being added.
_AHEAD = 2


class RingBackend(Backend):
    """Rings over point-to-point messages.

    Args:
        communicator: An `MpiCommunicator`.
        options: `bytes_per_pack` is the size of a message.
    """

    def __init__(self, communicator: Communicator, options: CommunicationOptions) -> None:
        self.communicator = communicator
        self._messages = Messages(communicator, options.bytes_per_pack)
        self._rank, self._size = communicator.rank, communicator.size
        self._right, self._left = (self._rank + 1) % self._size, (self._rank - 1) % self._size

    @property
    def traffic(self) -> Traffic:
        """Local. The bytes that this rank has moved so far."""
        return self._messages.traffic

    def all_reduce(self, source: AnyArray, total: AnyArray, op: ReduceOp) -> None:
        """Collective. See `Backend.all_reduce`."""
        if total is not source:
            total[...] = source
        parts = cut_evenly(total.size, self._size)
        # After it this rank has the sum of the part after its own.
        self._reduce_around(total, parts, op, first=self._rank)
        self._gather_around(total, parts, first=self._rank + 1)

    def reduce_scatter(self, source: AnyArray, mine: AnyArray, counts: Sequence[int], op: ReduceOp) -> None:
        """Collective. See `Backend.reduce_scatter`."""
        total = source.copy()
        parts = slices_of(counts)
        # Begun one part earlier, it ends with this rank's own.
        self._reduce_around(total, parts, op, first=self._rank - 1)
        mine[...] = total[parts[self._rank]]

    def reduce(self, source: AnyArray, total: AnyArray, op: ReduceOp, root: int) -> None:
        """Collective. See `Backend.reduce`."""
        summed = source.copy()
        parts = cut_evenly(summed.size, self._size)
        self._reduce_around(summed, parts, op, first=self._rank - 1)
        if self._rank != root:
            self._messages.send(summed[parts[self._rank]], root)
            return
        total[parts[root]] = summed[parts[root]]
        for rank in range(self._size):
            if rank != root:
                self._messages.receive(total[parts[rank]], rank)

    def broadcast(self, data: AnyArray, root: int) -> None:
        """Collective. See `Backend.broadcast`."""
        data = as_bytes(data)
        # A chain: each piece goes on to the right as soon as it is here.
        messages = self._messages
        is_last = self._right == root
        sends: list[Any] = []
        receives: list[Any] = []
        pieces = messages.pieces(data.size, data.itemsize)
        if self._rank != root:
            receives = [messages.start_receive(data[piece], self._left) for piece in pieces]
        for number, piece in enumerate(pieces):
            if receives:
                receives[number].Wait()
            if not is_last:
                sends.append(messages.start_send(data[piece], self._right))
        for request in sends:
            request.Wait()

    def all_gather(self, mine: AnyArray, gathered: AnyArray, counts: Sequence[int]) -> None:
        """Collective. See `Backend.all_gather`."""
        parts = slices_of(counts)
        gathered[parts[self._rank]] = mine
        self._gather_around(gathered, parts, first=self._rank)

    def all_to_all(
        self, sent: AnyArray, sent_counts: Sequence[int], got: AnyArray, got_counts: Sequence[int]
    ) -> None:
        """Collective. See `Backend.all_to_all`."""
        outgoing, incoming = slices_of(sent_counts), slices_of(got_counts)
        got[incoming[self._rank]] = sent[outgoing[self._rank]]
        for step in range(1, self._size):
            to, source = (self._rank + step) % self._size, (self._rank - step) % self._size
            self._exchange(sent[outgoing[to]], to, got[incoming[source]], source, None)

    def _reduce_around(self, total: AnyArray, parts: Sequence[slice], op: ReduceOp, first: int) -> None:
        """Each step sends a part to the right and combines the one from the left with the same part here."""
        function = FUNCTIONS[op]
        for step in range(self._size - 1):
            out, into = parts[(first - step) % self._size], parts[(first - step - 1) % self._size]
            self._exchange(total[out], self._right, total[into], self._left, function)

    def _gather_around(self, data: AnyArray, parts: Sequence[slice], first: int) -> None:
        for step in range(self._size - 1):
            out, into = parts[(first - step) % self._size], parts[(first - step - 1) % self._size]
            self._exchange(data[out], self._right, data[into], self._left, None)

    @np.errstate(all="ignore")
    def _exchange(self, out: AnyArray, to: int, into: AnyArray, source: int, function: np.ufunc | None) -> None:
        """Send `out` piece by piece while `into` is received, or combined with what is received."""
        messages = self._messages
        sends = [messages.start_send(out[piece], to) for piece in messages.pieces(out.size, out.itemsize)]
        pieces = messages.pieces(into.size, into.itemsize)
        if function is None:
            for request in [messages.start_receive(into[piece], source) for piece in pieces]:
                request.Wait()
        elif pieces:
            length = pieces[0].stop
            rooms = [arrays.namespace(into).empty(length, into.dtype) for _ in range(min(_AHEAD, len(pieces)))]
            requests: list[Any] = []
            for number, piece in enumerate(pieces):
                if number == 0:
                    requests = [
                        messages.start_receive(rooms[ahead][: pieces[ahead].stop - pieces[ahead].start], source)
                        for ahead in range(len(rooms))
                    ]
                requests[number].Wait()
                mine = into[piece]
                function(mine, rooms[number % len(rooms)][: mine.size], out=mine)
                following = number + len(rooms)
                if following < len(pieces):
                    size = pieces[following].stop - pieces[following].start
                    requests.append(messages.start_receive(rooms[number % len(rooms)][:size], source))
        for request in sends:
            request.Wait()
