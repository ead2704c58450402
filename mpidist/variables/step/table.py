"""The table: a variable of a plan whose gradients are rows, so that a step touches these rows and no others.

In a step the rows of all ranks are gathered and merged, and the kernel is applied to the merged rows of the parameter
and of the state. In node memory the merged rows are cut over the ranks of the node, so that each row has one writer.
Where memory is private, every rank updates its own copy. Rows are gathered and merged in host memory; where the
variable is on a GPU, the merged rows are then copied there.
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
from mpidist.variables.step.bundle import BLOCK_BYTES, GPU_BLOCK_BYTES, Update


class Table:
    """State and rows of one variable that was made with `sparse_gradient=True`.

    Collective. Args:
        variable: Of at least one dimension.
        slots: Names of the state and its initial value.
        scratch_count: Number of private blocks for the kernel.

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
            self.slots = arena.reserve_slots(slots, variable.size, variable.dtype, shared=self.is_shared)
        except OSError as error:
            # Every rank is here with the same error, and the variable stays where it is.
            arena.accept_private("the state of an optimizer is", error)
            self.is_shared, self._writes_back = False, True
            self.slots = arena.reserve_slots(slots, variable.size, variable.dtype, shared=False)
        self._states = [self._as_rows(slab.writable) for slab in self.slots.values()]
        self._xp = xp = arena.namespace
        row_bytes = max(1, self._width * self._dtype.itemsize)
        self._length = max(1, BLOCK_BYTES // row_bytes if xp is np else min(GPU_BLOCK_BYTES // row_bytes, self._count))
        self._blocks = [xp.empty((self._length, self._width), self._dtype) for _ in range(1 + len(slots))]
        self._scratch = [xp.empty(self._length * self._width, self._dtype) for _ in range(scratch_count)]
        # Under `reproducible` one rank measures all merged rows, and those of every rank are kept for it.
        self._given = self._merged = self._everything = self._no_rows()

    def put(self, indices: AnyArray, values: AnyArray) -> None:
        """Local. Take this replica's gradient for the next step.

        Args:
            indices: Shape (n,), of rows of the variable. A row that is named twice counts twice.
            values: Shape (n, ...), dtype of the variable.
        """
        # A row that this rank names often is sent once.
        self._given = merge_rows(indices.astype(np.int64), values.reshape(len(indices), self._width))

    def take(self) -> IndexedRows:
        """Local. The rows that were put, each of them once."""
        given, self._given = self._given, self._no_rows()
        return given

    def merge(self, rows: IndexedRows) -> None:
        """Local. Merge the rows of all ranks, and keep those that this rank has to update."""
        node = self._arena.communicator.node
        # Rows of one number are added rank after rank, as dense gradients in node memory are.
        self._merged = merge_rows(*rows, *((node.rank, node.size) if self.is_shared else (0, 1)))
        if self._arena.options.reproducible:
            self._everything = merge_rows(*rows)

    def measure(self, measure: Callable[[AnyArray, AnyArray], Sequence[float]], count: int) -> AnyArray:
        """Local. Sum up this rank's share of the merged rows; see `VariablePass.measure`.

        Returns:
            Shape (count,), float64.
        """
        sums = np.zeros(count)
        communicator = self._arena.communicator
        one_measures = self._arena.options.reproducible or not self.is_shared
        # The merged rows are counted in one copy: the first node's, or the first rank's.
        if (communicator.rank if one_measures else communicator.node_index) == 0:
            for rows, gradient in self._pieces(self._everything if one_measures and self.is_shared else self._merged):
                sums += measure(self._fetch(self._parameter, rows, 0), gradient)
        return sums

    def apply(self, update: Update) -> None:
        """Collective. Update the merged rows, between the barriers of a step."""
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
            # Other ranks may still be reading the old parameters; then one rank writes for its node.
            self._arena.barrier()
            if self._arena.communicator.node.rank == 0:
                indices, parameters = self._merged
                self._parameter[indices] = parameters
            self._arena.barrier()
        self._merged = self._no_rows()

    def _pieces(self, merged: IndexedRows) -> Iterator[tuple[AnyArray, AnyArray]]:
        """Row numbers and flat gradients, in the variable's memory; as many at a time as a block takes."""
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

    def _as_rows(self, flat: AnyArray) -> AnyArray:
        return flat.reshape(self._count, self._width)

    def _no_rows(self) -> IndexedRows:
        return np.empty(0, np.int64), np.empty((0, self._width), self._dtype)


class TableStep:
    """The phase of a step for all of its tables, whose rows travel in one message.

    Args:
        arena: Of the tables.
        tables: The same on every rank.
        is_summed: Whether every rank has put the rows of all ranks, so that nothing is gathered.
    """

    def __init__(self, arena: Arena, tables: Sequence[Table], *, is_summed: bool) -> None:
        self._collective = None if is_summed or arena.communicator.size == 1 else arena.collective
        self._tables = tables

    def apply(self, update: Update) -> None:
        """Collective. See `Phase.apply`."""
        self.reduce()
        for table in self._tables:
            table.apply(update)

    def reduce(self) -> None:
        """Collective. See `Phase.reduce`: the merged rows stay in the tables."""
        given = [table.take() for table in self._tables]
        if self._collective is not None:
            given = gather_rows(self._collective, given, "the tables of a step")
        for table, rows in zip(self._tables, given, strict=True):
            table.merge(rows)
