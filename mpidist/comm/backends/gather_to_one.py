"""The star: one rank takes the arrays of others, combines them in the order of the ranks, and gives the result back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpidist.arrays import AnyArray
from mpidist.comm.arithmetic.combine import combine
from mpidist.comm.backends.messages import Messages
from mpidist.options import ReduceOp


class GatherToOne:
    """Some ranks around one of them. Arrays are flat, and of the same size and dtype on all of these ranks.

    Args:
        messages: Between the ranks.
        ranks: In increasing order.
        center: Which of them combines.
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
        rooms = {other: np.empty(pieces[0].stop, source.dtype) for other in self._others} if pieces else {}
        for piece in pieces:
            mine = source[piece]
            parts = {other: room[: mine.size] for other, room in rooms.items()}
            for request in [self._messages.start_receive(part, other) for other, part in parts.items()]:
                request.Wait()
            parts[self._center] = mine
            combine([parts[one] for one in self._ranks], total[piece], op)

    def collect(self, source: AnyArray) -> list[AnyArray] | None:
        """Collective. The arrays of all ranks in their order, at the center; None elsewhere."""
        if not self.is_center:
            self._messages.send(source, self._center)
            return None
        parts = {other: np.empty_like(source) for other in self._others}
        for other, part in parts.items():
            self._messages.receive(part, other)
        parts[self._center] = source
        return [parts[one] for one in self._ranks]

    def spread(self, total: AnyArray) -> None:
        """Collective. Give the center's `total` to all."""
        if not self.is_center:
            self._messages.receive(total, self._center)
            return
        requests: list[Any] = [
            self._messages.start_send(total[piece], other)
            for piece in self._messages.pieces(total.size, total.itemsize) for other in self._others
        ]
        for request in requests:
            request.Wait()
