"""MIN and MAX of floating-point numbers over MPI: a NaN on any rank is one on every rank, as NumPy has it.

MPI says nothing of NaN. Its libraries drop it or keep it, by the size of an array and by rank, and of the zeros 0.0 and
-0.0 they give one to one rank and the other to another. Here MPI moves the bytes, and every rank combines them in the
same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpidist import arrays
from mpidist.arrays import AnyArray
from mpidist.comm.arithmetic.combine import FUNCTIONS, combine, open_quiet
from mpidist.comm.arithmetic.slices import even_sizes
from mpidist.options import ReduceOp

# Up to this size of all ranks' arrays together every rank receives them whole. 64 KB of 2 ranks took 21 us whole and
# 23 us in slices with MPICH 5.0.2, 10 and 22 us with Open MPI 5.0.11.
GATHERED_BYTES = 1 << 17
# The number of dtypes and sizes for which views of the received bytes are kept.
_KEPT = 256


class Extremes:
    """MIN and MAX of arrays that go in one message.

    Args:
        mpi: The communicator of mpi4py.
    """

    def __init__(self, mpi: Any) -> None:
        self._mpi = mpi
        # Bound once, as are the views below: looking up and making them takes as long as a small message.
        self._all_gather = mpi.Allgather
        self._rank, self._size = mpi.rank, mpi.size
        self._quietly = open_quiet()
        self._received = np.empty(0, np.uint8)
        self._kept: dict[tuple[type, str, int], tuple[AnyArray, list[AnyArray]]] = {}

    def all_reduce(self, source: AnyArray, total: AnyArray, op: ReduceOp) -> None:
        """Collective. Combine `source` of all ranks into every rank's `total`, which may be `source` itself."""
        kept = self._kept.get((type(source), source.dtype.char, source.size)) or self._room(source)
        if kept is not None:
            self._all_gather(source, kept[0])
            self._combine_rows(kept[1], total, op)
            return
        counts = even_sizes(source.size, self._size)
        self._mpi.Allgatherv(self._combined_slice(source, counts, op), [total, counts])

    def reduce(self, source: AnyArray, total: AnyArray, op: ReduceOp, root: int) -> None:
        """Collective. Combine `source` of all ranks into rank `root`'s `total`; elsewhere `total` stays as it is."""
        is_root = self._rank == root
        kept = self._room(source)
        if kept is not None:
            self._all_gather(source, kept[0])
            if is_root:
                self._combine_rows(kept[1], total, op)
            return
        counts = even_sizes(source.size, self._size)
        mine = self._combined_slice(source, counts, op)
        self._mpi.Gatherv(mine, [total, counts] if is_root else None, root)

    def reduce_scatter(self, source: AnyArray, mine: AnyArray, counts: Sequence[int], op: ReduceOp) -> None:
        """Collective. Combine `source` of all ranks; `mine` takes this rank's slice of `counts[rank]` elements."""
        mine[...] = self._combined_slice(source, counts, op)
        # CuPy's pool gives the slice's memory to the next call, in which MPI writes to it at once.
        arrays.wait_for_device(mine)

    def _room(self, source: AnyArray) -> tuple[AnyArray, list[AnyArray]] | None:
        """Room for the arrays of all ranks, whole and one by one; None where they go in slices."""
        if source.nbytes * self._size > GATHERED_BYTES or type(source) is not np.ndarray:
            return None
        # A dtype by its letter: its hash takes longer.
        key = np.ndarray, source.dtype.char, source.size
        if key not in self._kept:
            if len(self._kept) == _KEPT:
                self._kept.clear()
            rows = self._rows(source, source.size)
            self._kept[key] = rows, list(rows)
        return self._kept[key]

    def _rows(self, like: AnyArray, count: int) -> AnyArray:
        """Room for `count` numbers of each rank, the same in each call: the system provides new memory page by page."""
        if type(like) is not np.ndarray:
            made: AnyArray = arrays.namespace(like).empty((self._size, count), like.dtype)
            return made
        byte_count = self._size * count * like.itemsize
        if byte_count > self._received.size:
            self._kept.clear()
            self._received = np.empty(max(byte_count, GATHERED_BYTES), np.uint8)
        return self._received[:byte_count].view(like.dtype).reshape(self._size, count)

    def _combine_rows(self, rows: Sequence[AnyArray], total: AnyArray, op: ReduceOp) -> None:
        function, quietly = FUNCTIONS[op], self._quietly
        # With one rank the second row is the first again.
        quietly(function, rows[0], rows[self._size > 1], out=total)
        for row in rows[2:]:
            quietly(function, total, row, out=total)

    def _combined_slice(self, source: AnyArray, counts: Sequence[int], op: ReduceOp) -> AnyArray:
        own = counts[self._rank]
        rows = self._rows(source, own)
        self._mpi.Alltoallv([source, counts], [rows, [own] * self._size])
        combine(list(rows), rows[0], op)
        arrays.wait_for_device(source)
        mine: AnyArray = rows[0]
        return mine
