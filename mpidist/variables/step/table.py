"""The table: a variable of a plan whose gradients are rows, so that a step touches these rows and no others.

In a step the rows of all ranks are gathered and merged, and the kernel is applied to the merged rows of the parameter
and of the state. In node memory the merged rows are cut over the ranks of the node, so that each row has one writer.
Where memory is private, every rank updates its own copy. Merging and updating rows is `RowArithmetic`'s; here is what
belongs to the ranks: whose rows, in whose memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from mpidist.arrays import AnyArray
from mpidist.comm.front.sparse import gather_rows
from mpidist.variables.kinds.mirrored import MirroredVariable
from mpidist.variables.memory.arena_memory import ArenaMemory
from mpidist.variables.update.halves import state_dtype
from mpidist.variables.update.kernel import Update
from mpidist.variables.update.rows import RowArithmetic, Rows


class Table:
    """Collective. State and rows of one variable that was made with `sparse_gradient=True`.

    Args:
        variable: The variable of at least one dimension.
        slots: Names of the state and its initial value.
        scratch_count: Number of private blocks for the kernel.

    Attributes:
        slots: Memory of the state by name, for all rows.
        is_shared: Whether the state is in node memory.
    """

    def __init__(self, variable: MirroredVariable, slots: Mapping[str, complex], scratch_count: int) -> None:
        self._arena = arena = variable.arena
        self.is_shared = variable.address.slab.is_shared
        # Parameters in node memory, state private to each rank: every rank keeps the state of all rows, and one rank
        # of the node writes the parameters.
        self._writes_back = False
        dtype = state_dtype(variable.dtype)
        try:
            self.slots = arena.reserve_slots(slots, variable.size, dtype, shared=self.is_shared)
        except OSError as error:
            # Every rank is here with the same error, and the variable stays where it is.
            arena.accept_private("the state of an optimizer is", error)
            self.is_shared, self._writes_back = False, True
            self.slots = arena.reserve_slots(slots, variable.size, dtype, shared=False)
        shape = variable.shape[0], int(np.prod(variable.shape[1:], dtype=np.int64))
        parameter, *states = (
            flat.reshape(shape) for flat in (variable.address.writable, *(s.writable for s in self.slots.values()))
        )
        self._rows = RowArithmetic(parameter, states, scratch_count, arena.namespace)
        # Under `reproducible` one rank measures all merged rows, and those of every rank are kept for it.
        self._given = self._merged = self._everything = self._rows.no_rows()

    def put(self, indices: AnyArray, values: AnyArray) -> None:
        """Local. Take this replica's gradient for the next step.

        Args:
            indices: Shape (n,), of rows of the variable. A row that is named twice counts twice.
            values: Shape (n, ...), dtype of the variable.
        """
        # A row that this rank names often is sent once.
        self._given = self._rows.merge(indices, values)

    def take(self) -> Rows:
        """Local. The rows that were put, each of them once."""
        given, self._given = self._given, self._rows.no_rows()
        return given

    def merge(self, rows: Rows) -> None:
        """Local. Merge the rows of all ranks, and keep those that this rank has to update."""
        node = self._arena.communicator.node
        # Rows of one number are added rank after rank, as dense gradients in node memory are.
        self._merged = self._rows.merge(*rows, *((node.rank, node.size) if self.is_shared else (0, 1)))
        if self._arena.options.reproducible:
            self._everything = self._rows.merge(*rows)

    def measure(self, measure: Callable[[AnyArray, AnyArray], Sequence[float]], count: int) -> AnyArray:
        """Local. Sum up this rank's share of the merged rows; see `VariablePass.measure`.

        Returns:
            Shape (count,), float64.
        """
        communicator = self._arena.communicator
        one_measures = self._arena.options.reproducible or not self.is_shared
        # The merged rows are counted in one copy: the first node's, or the first rank's.
        if (communicator.rank if one_measures else communicator.node_index) != 0:
            return np.zeros(count)
        rows = self._everything if one_measures and self.is_shared else self._merged
        return self._rows.measure(rows, measure, count)

    def apply(self, update: Update) -> None:
        """Collective. Update the merged rows, between the barriers of a step."""
        if self._writes_back:
            self._rows.apply_aside(self._merged, update)
            # Other ranks may still be reading the old parameters; then one rank writes for its node.
            self._arena.barrier()
            if self._arena.communicator.node.rank == 0:
                self._rows.write_back(self._merged)
            self._arena.barrier()
        else:
            self._rows.apply(self._merged, update)
        self._merged = self._rows.no_rows()


class TableStep:
    """The phase of a step for all of its tables, whose rows travel in one message.

    Args:
        arena: The arena of the tables.
        tables: The same on every rank.
        is_summed: Whether every rank has put the rows of all ranks, so that nothing is gathered.
    """

    def __init__(self, arena: ArenaMemory, tables: Sequence[Table], *, is_summed: bool) -> None:
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
