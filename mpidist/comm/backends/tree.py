"""The tree collective: what ranks combine has the same bits whatever the nodes, the backend and the sizes of messages.

Another collective moves the bytes: each rank gets its slice of all ranks' arrays, combines them in the tree order of
the ranks, and gives the result to all. As in a ring, each rank sends 2(n - 1)/n of its array. On one node the node
collective keeps the same order in shared memory, which is faster.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpidist import arrays
from mpidist.arrays import AnyArray
from mpidist.comm.arithmetic.combine import is_half
from mpidist.comm.arithmetic.slices import even_sizes
from mpidist.comm.arithmetic.tree_order import combine_pairs, leaves, pairing
from mpidist.comm.communicator import Communicator
from mpidist.comm.front.front import ArrayCollective
from mpidist.options import CommunicationOptions, ReduceOp

# All arrays together: up to here every rank gets them whole, by one message instead of two.
GATHERED_BYTES = 1 << 14
# Of an array at a time: what is received lies in a cache while it is combined.
CHUNK_BYTES = 1 << 20


class TreeCollective(ArrayCollective):
    """Combines in the tree order of the ranks; a half-precision result is rounded once.

    The ranks are the leaves of the tree, so the result still depends on how a program's work is cut over them;
    `Strategy.gradients` has leaves that do not depend on the ranks.

    Args:
        communicator: The ranks.
        options: `bytes_per_pack` is the chunk.
        inside: Moves bytes between the same ranks.
        open_node: Makes a collective that sums in the tree order itself, at the first sum; None where there is none.
            Collective.

    Attributes:
        pairs: In which order the ranks' arrays are combined; see `tree_order.pairing`.
    """

    combines_halves = True
    takes_device_arrays = True

    def __init__(
        self,
        communicator: Communicator,
        options: CommunicationOptions,
        inside: ArrayCollective,
        open_node: Callable[[], ArrayCollective | None] | None = None,
    ) -> None:
        super().__init__(communicator, options)
        self.inside = inside
        self._rank, self._size = communicator.rank, communicator.size
        self.pairs = pairing(leaves(self._size))
        self._chunk_bytes = options.bytes_per_pack or CHUNK_BYTES
        self._open_node = open_node
        self._node: ArrayCollective | None = None

    def allocate(self, shape: Sequence[int], dtype: Any = np.float32) -> AnyArray:
        """Collective. See `ArrayCollective.allocate`."""
        return self.inside.allocate(shape, dtype)

    def _all_reduce(self, source: AnyArray, total: AnyArray, op: ReduceOp) -> None:
        node = self._summing_node(source, op)
        if node is not None:
            node._all_reduce(source, total, op)
            return
        if source.nbytes * self._size <= GATHERED_BYTES:
            got = arrays.namespace(source).empty((self._size, source.size), source.dtype)
            self.inside._all_gather(_bytes(source), _bytes(got), [source.nbytes] * self._size)
            total[...] = self._combined(got, op)
            return
        length = max(1, self._chunk_bytes // source.itemsize)
        for begin in range(0, source.size, length):
            piece = slice(begin, min(begin + length, source.size))
            counts = even_sizes(piece.stop - begin, self._size)
            mine = self._combined_slices(source[piece], counts, op)
            self.inside._all_gather(_bytes(mine), _bytes(total[piece]), _times(counts, source.itemsize))

    def _reduce(self, source: AnyArray, total: AnyArray, op: ReduceOp, root: int) -> None:
        counts = even_sizes(source.size, self._size)
        mine = _bytes(self._combined_slices(source, counts, op))
        is_root = self._rank == root
        sent = [mine.size if rank == root else 0 for rank in range(self._size)]
        got = _times(counts, source.itemsize) if is_root else [0] * self._size
        self.inside._all_to_all(mine, sent, _bytes(total) if is_root else mine[:0], got)

    def _reduce_scatter(self, source: AnyArray, mine: AnyArray, counts: Sequence[int], op: ReduceOp) -> None:
        mine[...] = self._combined_slices(source, counts, op)

    def _broadcast(self, data: AnyArray, root: int) -> None:
        self.inside._broadcast(data, root)

    def _broadcast_array(self, data: AnyArray, root: int) -> None:
        self.inside._broadcast_array(data, root)

    def _all_gather(self, mine: AnyArray, gathered: AnyArray, counts: Sequence[int]) -> None:
        self.inside._all_gather(mine, gathered, counts)

    def _all_to_all(
        self, sent: AnyArray, sent_counts: Sequence[int], got: AnyArray, got_counts: Sequence[int]
    ) -> None:
        self.inside._all_to_all(sent, sent_counts, got, got_counts)

    def _summing_node(self, source: AnyArray, op: ReduceOp) -> ArrayCollective | None:
        """What keeps the order by itself: not for products of complex numbers, which need not commute to the bit."""
        is_sum = op in (ReduceOp.SUM, ReduceOp.MEAN) or (op is ReduceOp.PROD and source.dtype.kind != "c")
        if not is_sum or type(source) is not np.ndarray:
            return None
        if self._open_node is not None:
            self._node, self._open_node = self._open_node(), None
        return self._node

    def _combined_slices(self, source: AnyArray, counts: Sequence[int], op: ReduceOp) -> AnyArray:
        """This rank's slice, of `counts[rank]` elements, of all arrays, combined."""
        own = counts[self._rank]
        got = arrays.namespace(source).empty((self._size, own), source.dtype)
        received = [own * source.itemsize] * self._size
        self.inside._all_to_all(_bytes(source), _times(counts, source.itemsize), _bytes(got), received)
        return self._combined(got, op)

    def _combined(self, rows: AnyArray, op: ReduceOp) -> AnyArray:
        wide = rows.astype(np.float32) if is_half(rows.dtype) else rows
        result: AnyArray = combine_pairs(list(wide), self.pairs, op).astype(rows.dtype, copy=False)
        return result

    def _lend(self, array: Any) -> AnyArray:
        return self.inside._lend(array)

    def __repr__(self) -> str:
        return f"TreeCollective({self.communicator!r}, {self.inside!r})"


def _bytes(array: AnyArray) -> AnyArray:
    result: AnyArray = array.reshape(-1).view(np.uint8)
    return result


def _times(counts: Sequence[int], factor: int) -> list[int]:
    return [count * factor for count in counts]
