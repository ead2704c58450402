"""The tree backend: a result has the same bits whatever the nodes, the backend inside, and the sizes of messages.

Another backend moves the bytes: each rank gets its slice of all ranks' arrays, combines them in the tree order of the
ranks, and sends the result to all ranks. As in a ring, each of n ranks sends 2(n - 1)/n of its array. On one node the
node backend keeps the same order in shared memory, which is faster.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from mpidist import arrays
from mpidist.arrays import AnyArray, as_bytes
from mpidist.comm.arithmetic.combine import is_half
from mpidist.comm.arithmetic.slices import cut_by_length, even_sizes, in_bytes
from mpidist.comm.arithmetic.tree_order import combine_pairs, leaves, pairing
from mpidist.comm.backend import Backend
from mpidist.comm.group.communicator import Communicator
from mpidist.comm.group.resource import end_all
from mpidist.options import CommunicationOptions, ReduceOp

# Up to this size of all ranks' arrays together every rank receives them whole, in one exchange instead of two.
GATHERED_BYTES = 1 << 14
# The size of the chunk of an array that is combined at a time, so that the received bytes stay in a cache.
CHUNK_BYTES = 1 << 20


class TreeBackend(Backend):
    """Combines in the tree order of the ranks. A half-precision result is rounded once.

    The ranks are the leaves of the tree, so the result still depends on how a program divides its work among them.
    `Strategy.gradients` has leaves that do not depend on the ranks.

    Args:
        communicator: The ranks.
        options: The options, of which `bytes_per_pack` is the size of a chunk.
        inside: The backend that moves bytes between the same ranks.
        open_node: A Collective function that makes a backend that sums in the tree order itself, when the first sum
            comes; it returns None on every rank if there is none.

    Attributes:
        inside: The constructor's argument.
        pairs: The order in which the ranks' arrays are combined; see `tree_order.pairing`.
    """

    combines_halves = True

    def __init__(
        self,
        communicator: Communicator,
        options: CommunicationOptions,
        inside: Backend,
        open_node: Callable[[], Backend | None] | None = None,
    ) -> None:
        self.communicator = communicator
        self.inside = inside
        self.takes_device_arrays = inside.takes_device_arrays
        self._rank, self._size = communicator.rank, communicator.size
        self.pairs = pairing(leaves(self._size))
        self._chunk_bytes = options.bytes_per_pack or CHUNK_BYTES
        self._open_node = open_node
        self._node: Backend | None = None

    def _end(self, *, is_collective: bool) -> None:
        end_all([self.inside, *([] if self._node is None else [self._node])], is_collective=is_collective)

    def allocate(self, byte_count: int) -> AnyArray | None:
        """Collective. See `Backend.allocate`."""
        return self.inside.allocate(byte_count)

    def all_reduce(self, source: AnyArray, total: AnyArray, op: ReduceOp) -> None:
        """Collective. See `Backend.all_reduce`."""
        node = self._summing_node(source, op)
        if node is not None:
            node.all_reduce(source, total, op)
            return
        if source.nbytes * self._size <= GATHERED_BYTES:
            got = arrays.namespace(source).empty((self._size, source.size), source.dtype)
            self.inside.all_gather(as_bytes(source), as_bytes(got), [source.nbytes] * self._size)
            total[...] = self._combined(got, op)
            return
        length = max(1, self._chunk_bytes // source.itemsize)
        for chunk in cut_by_length(source.size, length):
            counts = even_sizes(chunk.stop - chunk.start, self._size)
            mine = self._combined_slices(source[chunk], counts, op)
            self.inside.all_gather(as_bytes(mine), as_bytes(total[chunk]), in_bytes(counts, source.itemsize))

    def reduce(self, source: AnyArray, total: AnyArray, op: ReduceOp, root: int) -> None:
        """Collective. See `Backend.reduce`."""
        counts = even_sizes(source.size, self._size)
        mine = as_bytes(self._combined_slices(source, counts, op))
        is_root = self._rank == root
        sent = [mine.size if rank == root else 0 for rank in range(self._size)]
        got = in_bytes(counts, source.itemsize) if is_root else [0] * self._size
        self.inside.all_to_all(mine, sent, as_bytes(total) if is_root else mine[:0], got)

    def reduce_scatter(self, source: AnyArray, mine: AnyArray, counts: Sequence[int], op: ReduceOp) -> None:
        """Collective. See `Backend.reduce_scatter`."""
        mine[...] = self._combined_slices(source, counts, op)

    def broadcast(self, data: AnyArray, root: int) -> None:
        """Collective. See `Backend.broadcast`."""
        self.inside.broadcast(data, root)

    def all_gather(self, mine: AnyArray, gathered: AnyArray, counts: Sequence[int]) -> None:
        """Collective. See `Backend.all_gather`."""
        self.inside.all_gather(mine, gathered, counts)

    def all_to_all(
        self, sent: AnyArray, sent_counts: Sequence[int], got: AnyArray, got_counts: Sequence[int]
    ) -> None:
        """Collective. See `Backend.all_to_all`."""
        self.inside.all_to_all(sent, sent_counts, got, got_counts)

    def _summing_node(self, source: AnyArray, op: ReduceOp) -> Backend | None:
        """Collective at the first sum, else Local. The node backend if it takes this call, otherwise None."""
        # Not for products of complex numbers: the bits of a * b and b * a may differ.
        is_sum = op in (ReduceOp.SUM, ReduceOp.MEAN) or (op is ReduceOp.PROD and source.dtype.kind != "c")
        if not is_sum or type(source) is not np.ndarray:
            return None
        if self._open_node is not None:
            self._node, self._open_node = self._open_node(), None
        return self._node

    def _combined_slices(self, source: AnyArray, counts: Sequence[int], op: ReduceOp) -> AnyArray:
        """This rank's slice of `counts[rank]` elements, combined over all ranks' arrays."""
        own = counts[self._rank]
        got = arrays.namespace(source).empty((self._size, own), source.dtype)
        received = [own * source.itemsize] * self._size
        self.inside.all_to_all(as_bytes(source), in_bytes(counts, source.itemsize), as_bytes(got), received)
        return self._combined(got, op)

    def _combined(self, rows: AnyArray, op: ReduceOp) -> AnyArray:
        wide = rows.astype(np.float32) if is_half(rows.dtype) else rows
        result: AnyArray = combine_pairs(list(wide), self.pairs, op).astype(rows.dtype, copy=False)
        return result

    def __repr__(self) -> str:
        return f"TreeBackend({self.inside!r})"
