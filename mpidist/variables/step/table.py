"""The table: a variable of a plan whose gradients are rows, so that a step touches these rows and no others.

In a step the rows of all ranks are gathered and merged, and the kernel is applied to the merged rows of the parameter
and of the state. In node memory the merged rows are cut over the ranks of the node, so that each has one writer; where
memory is private, every rank updates its own copy. Rows are gathered and merged in host memory; where the variable is
on a GPU, the merged ones are then taken there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from mpidist import arrays
from mpidist.arrays import AnyArray
from mpidist.comm.arithmetic.merging import merge_rows
from mpidist.comm.front.sparse import IndexedRows, gather_rows
from mpidist.variables.arena import Arena
from mpidist.variables.mirrored import MirroredVariable
from mpidist.variables.slab import Slab
from mpidist.variables.step.bundle import BLOCK_BYTES, GPU_BLOCK_BYTES, Update


class Table:
    """State and rows of one variable that was made with `sparse_gradient=True`.

    Collective. Args:
        variable: Of at least one dimension.
        slots: Names of the state and its initial value.
        scratch_count: Private blocks that the kernel wants.

    Attributes:
        slots: Memory of the state by name, for all rows.
        is_shared: Whether the state is in node memory.
    """

    def __init__(self, variable: MirroredVariable, slots: Mapping[str, float], scratch_count: int) -> None:
        self._arena = arena = variable.arena
        self._count = variable.shape[0]
        self._width = int(np.prod(variable.shape[1:], dtype=np.int64))
        self._dtype = variable.dtype
        self._parameter = self._as_rows(variable.address.writable)
        self.is_shared = variable.address.slab.is_shared
        # Parameters in node memory, state private to each rank: every rank keeps the state of all rows, and one rank
        # of the node writes the parameters.
        self._writes_back = False
        try:
            self.slots = self._reserve(slots)
        except OSError as error:
            # Every rank is here with the same error, and the variable stays where it is.
            arena.accept_private("the state of an optimizer is", error)
            self.is_shared, self._writes_back = False, True
            self.slots = self._reserve(slots)
        self._states = [self._as_rows(slab.writable) for slab in self.slots.values()]
        self._xp = xp = arena.namespace
        row_bytes = max(1, self._width * self._dtype.itemsize)
        self._length = max(1, BLOCK_BYTES // row_bytes if xp is np else min(GPU_BLOCK_BYTES // row_bytes, self._count))
        self._blocks = [xp.empty((self._length, self._width), self._dtype) for _ in range(1 + len(slots))]
        self._scratch = [xp.empty(self._length * self._width, self._dtype) for _ in range(scratch_count)]
        # Under `reproducible` one rank measures all merged rows, whoever updates them.
        self._given = self._merged = self._everything = self._no_rows()

    def put(self, indices: AnyArray, values: AnyArray) -> None:
        """Local. This replica's gradient for the next `reduce_tables`.

        Args:
            indices: Shape (n,), of rows of the variable; rows named twice count twice.
            values: Shape (n, ...), dtype of the variable.
        """
        # Rows that this rank names often travel once.
        self._given = merge_rows(indices.astype(np.int64), values.reshape(len(indices), self._width))

    def take(self) -> IndexedRows:
        """Local. The rows that were put, each of them once."""
        given, self._given = self._given, self._no_rows()
        return given

    def merge(self, rows: IndexedRows) -> None:
        """Local. Merge the rows of all ranks, and keep those that this rank has to update."""
        node = self._arena.communicator.node
        # The sums go rank by rank, as those of dense gradients in node memory do.
        self._merged = merge_rows(*rows, *((node.rank, node.size) if self.is_shared else (0, 1)))
        if self._arena.options.reproducible:
            self._everything = merge_rows(*rows)

    def measure(self, measure: Callable[[AnyArray, AnyArray], Sequence[float]], count: int) -> AnyArray:
        """Local. Sums over the merged rows, to be added up over all ranks; see `VariablePass.measure`.

        Returns:
            Shape (count,), float64.
        """
        sums = np.zeros(count)
        communicator = self._arena.communicator
        one_measures = self._arena.options.reproducible or not self.is_shared
        # The merged rows of one copy count: the first node's, or the first rank's.
        if (communicator.rank if one_measures else communicator.node_index) == 0:
            for rows, gradient in self._pieces(self._everything if one_measures and self.is_shared else self._merged):
                sums += measure(self._fetch(self._parameter, rows, 0), gradient)
        return sums

    def apply(self, update: Update) -> None:
        """Collective. Update the merged rows, between the barriers of `Plan.step`."""
        for rows, gradient in self._pieces(self._merged):
            parameter = self._fetch(self._parameter, rows, 0)
            states = tuple(self._fetch(state, rows, 1 + i) for i, state in enumerate(self._states))
            update(parameter, gradient, states, tuple(scratch[: gradient.size] for scratch in self._scratch))
            for state, block in zip(self._states, states, strict=True):
                state[rows] = block.reshape(len(rows), self._width)
            if self._writes_back:
                np.copyto(gradient, parameter)
            else:
                self._parameter[rows] = parameter.reshape(len(rows), self._width)
        if self._writes_back:
            node = self._arena.communicator.node
            node.barrier()
            if node.rank == 0:
                indices, parameters = self._merged
                self._parameter[indices] = parameters
            node.barrier()
        self._merged = self._no_rows()

    def _pieces(self, merged: IndexedRows) -> Iterator[tuple[AnyArray, AnyArray]]:
        """Row numbers and flat gradients, where the variable lies; as many at a time as a block takes."""
        indices, values = merged
        for low in range(0, len(indices), self._length):
            rows, gradient = indices[low : low + self._length], values[low : low + self._length].reshape(-1)
            yield arrays.move(rows, self._xp), arrays.move(gradient, self._xp)

    def _fetch(self, source: AnyArray, rows: AnyArray, block: int) -> AnyArray:
        """Rows of an array as a flat block of their own."""
        target: AnyArray = self._blocks[block][: len(rows)]
        if self._xp is np:
            # "clip" writes straight into `out`; the indices have been checked.
            np.take(source, rows, axis=0, out=target, mode="clip")
        else:
            self._xp.take(source, rows, axis=0, out=target)
        return target.reshape(-1)

    def _reserve(self, slots: Mapping[str, float]) -> dict[str, Slab]:
        slabs: dict[str, Slab] = {}
        for name, value in slots.items():
            slab = self._arena.reserve(self._count * self._width, self._dtype, shared=self.is_shared)
            if value:
                self._arena.write(slab, lambda slab=slab, value=value: slab.writable.fill(value))  # type: ignore[misc]
            slabs[name] = slab
        return slabs

    def _as_rows(self, flat: AnyArray) -> AnyArray:
        return flat.reshape(self._count, self._width)

    def _no_rows(self) -> IndexedRows:
        return np.empty(0, np.int64), np.empty((0, self._width), self._dtype)


def reduce_tables(arena: Arena, tables: Sequence[Table], *, is_summed: bool = False) -> None:
    """Collective. Gather the rows that were put on all ranks, of all tables in one message, and merge them.

    Args:
        arena: Of the tables.
        tables: The same on every rank.
        is_summed: Every rank has put the rows of all ranks: nothing is gathered.
    """
    given = [table.take() for table in tables]
    if tables and not is_summed and arena.communicator.size > 1:
        given = gather_rows(arena.collective, given, "the tables of a step")
    for table, rows in zip(tables, given, strict=True):
        table.merge(rows)
