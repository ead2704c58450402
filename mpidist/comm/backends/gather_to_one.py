"""Gathering to one rank: it receives the other ranks' arrays, combines them in order, and sends the result back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpidist.arrays import AnyArray
from mpidist.comm.arithmetic.combine import combine
from mpidist.comm.backends.messages import Messages
from mpidist.options import ReduceOp


class GatherToOne:
    """Ranks that send to one of them, the center. Arrays are flat, and of the same size and dtype on all these ranks.

    Args:
        messages: The messages between the ranks.
        ranks: The ranks, in increasing order.
        center: The rank among them that combines.
        rank: This rank.
    """

    def __init__(self, messages: Messages, ranks: Sequence[int], center: int, rank: int) -> None:
        self._messages = messages
        self._ranks = tuple(ranks)
        self._center = center
        self._others = tuple(other for other in ranks if other != center)
        self.is_center = rank == center

    def combine(self, source: AnyArray, total: AnyArray, op: ReduceOp) -> None:
        """Collective. Combine `source` of all ranks (MEAN as SUM) into the center's `total`, piece by piece."""
        if not self.is_center:
            self._messages.send(source, self._center)
            return
        pieces = self._messages.pieces(source.size, source.itemsize)
        buffers = {other: np.empty(pieces[0].stop, source.dtype) for other in self._others} if pieces else {}
        for piece in pieces:
            mine = source[piece]
            received = {other: buffer[: mine.size] for other, buffer in buffers.items()}
            # All receives begin before the first wait, so that the ranks send at the same time.
            for request in [self._messages.start_receive(one, other) for other, one in received.items()]:
                request.Wait()
            received[self._center] = mine
            combine([received[rank] for rank in self._ranks], total[piece], op)

    def collect(self, source: AnyArray) -> list[AnyArray] | None:
        """Collective. The arrays of all ranks in their order, at the center; None elsewhere."""
        if not self.is_center:
            self._messages.send(source, self._center)
            return None
        received = {other: np.empty_like(source) for other in self._others}
        for other, one in received.items():
            self._messages.receive(one, other)
        received[self._center] = source
        return [received[rank] for rank in self._ranks]

    def spread(self, total: AnyArray) -> None:
        """Collective. Send the center's `total` to all ranks."""
        if not self.is_center:
            self._messages.receive(total, self._center)
            return
        requests: list[Any] = [
            self._messages.start_send(total[piece], other)
            for piece in self._messages.pieces(total.size, total.itemsize) for other in self._others
        ]
        for request in requests:
            request.Wait()
