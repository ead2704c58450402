"""The ring backend: every rank sends to its right neighbor and receives from its left one, all ranks the same amount.

An all-reduce is a reduce-scatter and an all-gather around the ring. Each of n ranks sends 2(n - 1)/n of its array
(P. Patarasuk, X. Yuan: Bandwidth optimal all-reduce algorithms for clusters of workstations, 2009). While a piece is
added, the next ones are being sent.
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
from mpidist.comm.group.communicator import Communicator
from mpidist.options import CommunicationOptions, ReduceOp

# The number of receives that have begun, with that of the piece that is added next.
_AHEAD = 2


class RingBackend(Backend):
    """Rings of point-to-point messages.

    Args:
        communicator: An `MpiCommunicator`.
        options: The options, of which `bytes_per_pack` is the size of a message.
    """

    compares_calls = True

    def __init__(self, communicator: Communicator, options: CommunicationOptions) -> None:
        self.communicator = communicator
        self._messages = Messages(communicator, options.bytes_per_pack)
        self._rank, self._size = communicator.rank, communicator.size
        self._look_ahead, self._show_call = communicator.order.look_ahead, communicator.order.show_call
        self._right, self._left = (self._rank + 1) % self._size, (self._rank - 1) % self._size

    @property
    def traffic(self) -> Traffic:
        """Local. The bytes that this rank has moved so far."""
        return self._messages.traffic

    def all_reduce(self, source: AnyArray, total: AnyArray, op: ReduceOp) -> None:
        """Collective. See `Backend.all_reduce`."""
        self._look_ahead()
        if total is not source:
            total[...] = source
        slices = cut_evenly(total.size, self._size)
        # Reducing leaves this rank with the sum of the slice after its own: gathering begins there.
        self._reduce_around(total, slices, op, first=self._rank)
        self._gather_around(total, slices, first=self._rank + 1)

    def reduce_scatter(self, source: AnyArray, mine: AnyArray, counts: Sequence[int], op: ReduceOp) -> None:
        """Collective. See `Backend.reduce_scatter`."""
        self._look_ahead()
        total = source.copy()
        slices = slices_of(counts)
        # Beginning one slice earlier than in `all_reduce`, it ends with this rank's own.
        self._reduce_around(total, slices, op, first=self._rank - 1)
        mine[...] = total[slices[self._rank]]

    def reduce(self, source: AnyArray, total: AnyArray, op: ReduceOp, root: int) -> None:
        """Collective. See `Backend.reduce`."""
        self._look_ahead()
        summed = source.copy()
        slices = cut_evenly(summed.size, self._size)
        self._reduce_around(summed, slices, op, first=self._rank - 1)
        if self._rank != root:
            self._messages.send(summed[slices[self._rank]], root)
            return
        total[slices[root]] = summed[slices[root]]
        for rank in range(self._size):
            if rank != root:
                self._messages.receive(total[slices[rank]], rank)

    def broadcast(self, data: AnyArray, root: int) -> None:
        """Collective. See `Backend.broadcast`."""
        self._look_ahead()
        data = as_bytes(data)
        # A chain: a rank sends each piece on to its right neighbor as soon as it has it.
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
        self._show_call()
        slices = slices_of(counts)
        gathered[slices[self._rank]] = mine
        self._gather_around(gathered, slices, first=self._rank)

    def all_to_all(
        self, sent: AnyArray, sent_counts: Sequence[int], got: AnyArray, got_counts: Sequence[int]
    ) -> None:
        """Collective. See `Backend.all_to_all`."""
        self._show_call()
        outgoing, incoming = slices_of(sent_counts), slices_of(got_counts)
        got[incoming[self._rank]] = sent[outgoing[self._rank]]
        for step in range(1, self._size):
            to, source = (self._rank + step) % self._size, (self._rank - step) % self._size
            self._exchange([sent[outgoing[to]]], to, [got[incoming[source]]], source, None)

    def _reduce_around(self, total: AnyArray, slices: Sequence[slice], op: ReduceOp, first: int) -> None:
        """In each step, send a slice to the right and combine the slice from the left with the same slice here."""
        function = FUNCTIONS[op]
        for step in range(self._size - 1):
            out, into = slices[(first - step) % self._size], slices[(first - step - 1) % self._size]
            self._exchange([total[out]], self._right, [total[into]], self._left, function)

    def _gather_around(self, data: AnyArray, slices: Sequence[slice], first: int) -> None:
        """In each step, send a slice to the right and receive another one from the left."""
        for step in range(self._size - 1):
            out, into = slices[(first - step) % self._size], slices[(first - step - 1) % self._size]
            self._exchange([data[out]], self._right, [data[into]], self._left, None)

    def _exchange(
        self, out: Sequence[AnyArray], to: int, into: Sequence[AnyArray], source: int, function: np.ufunc | None
    ) -> None:
        """Send arrays piece by piece, and at the same time receive arrays, or combine them with the received pieces."""
        messages = self._messages
        # All ranks begin to send before they wait for anything. If they waited first, the ring would be a deadlock.
        sends = [
            messages.start_send(one[piece], to) for one in out for piece in messages.pieces(one.size, one.itemsize)
        ]
        if function is None:
            for request in [
                messages.start_receive(one[piece], source)
                for one in into for piece in messages.pieces(one.size, one.itemsize)
            ]:
                request.Wait()
        else:
            # An overflow gives an infinity in silence, as where MPI adds. A warning would come on one rank only.
            # As a decorator this would be a function of NumPy's on the stack, which reports take for the program's.
            with np.errstate(all="ignore"):
                for one in into:
                    pieces = messages.pieces(one.size, one.itemsize)
                    if pieces:
                        self._combine_received(one, pieces, source, function)
        for request in sends:
            request.Wait()

    def _combine_received(self, into: AnyArray, pieces: Sequence[slice], source: int, function: np.ufunc) -> None:
        """Receive pieces from a rank, some of them ahead, and combine each with the same piece of `into`."""
        empty = arrays.namespace(into).empty
        buffers = [empty(pieces[0].stop, into.dtype) for _ in range(min(_AHEAD, len(pieces)))]
        requests: list[Any] = []

        def start(number: int) -> None:
            buffer = buffers[number % len(buffers)]
            size = pieces[number].stop - pieces[number].start
            requests.append(self._messages.start_receive(buffer[:size], source))

        for number in range(len(buffers)):
            start(number)
        for number, piece in enumerate(pieces):
            requests[number].Wait()
            mine = into[piece]
            function(mine, buffers[number % len(buffers)][: mine.size], out=mine)
            # Its buffer is free only now.
            if number + len(buffers) < len(pieces):
                start(number + len(buffers))
