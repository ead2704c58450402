"""The table: a variable of a plan whose gradients are rows, so that a step touches these rows and no others.

In a step the rows of all ranks are gathered and merged, and the kernel is applied to the merged rows of the parameter
and of the state. In node memory the merged rows are cut over the ranks of the node, so that each row has one writer.
Where memory is private, every rank updates its own copy. Where the state is in shards, each node has that of some
rows, updates these, and sends the new parameters to the others. Merging and updating rows is `RowArithmetic`'s; here is
what belongs to the ranks: whose rows, in whose memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from mpidist import arrays
from mpidist.arrays import AnyArray
from mpidist.comm.first_use import at_first_use
from mpidist.comm.front.sparse import gather_rows
from mpidist.variables.kinds.mirrored import MirroredVariable
from mpidist.variables.memory.arena_memory import ArenaMemory
from mpidist.variables.update.halves import state_dtype
from mpidist.variables.update.kernel import Update
from mpidist.variables.update.rows import RowArithmetic, Rows

if TYPE_CHECKING:
    from mpidist.variables.step.sharding.shards import Shards, cut
else:
    cut = at_first_use("mpidist.variables.step.sharding.shards", "cut")


class Table:
    """Collective. State and rows of one variable that was made with `sparse_gradient=True`.

    Args:
        variable: The variable of at least one dimension.
        slots: Names of the state and its initial value.
        scratch_count: Number of private blocks for the kernel.

    Attributes:
        slots: Memory of the state by name, for all rows, or for those of the own shard.
        is_shared: Whether the state is in node memory.
        shards: The shards of the state, None where each node has all of it.
    """

    def __init__(self, variable: MirroredVariable, slots: Mapping[str, complex], scratch_count: int) -> None:
        self._arena = arena = variable.arena
        self._xp = arena.namespace
        self.is_shared = variable.address.slab.is_shared
        # Parameters in node memory, state private to each rank: every rank keeps the state of all rows, and one rank
        # of the node writes the parameters.
        self._writes_back = False
        self._shape = variable.shape[0], int(np.prod(variable.shape[1:], dtype=np.int64))
        self._parameter = variable.address.writable.reshape(self._shape)
        try:
            self._reserve(slots)
        except OSError as error:
            # Every rank is here with the same error, and the variable stays where it is.
            arena.accept_private("the state of an optimizer is", error)
            self.is_shared, self._writes_back = False, True
            self._reserve(slots)
        first, last = self._own
        states = [slot.writable.reshape(last - first, self._shape[1]) for slot in self.slots.values()]
        self._rows = RowArithmetic(self._parameter[first:last], states, scratch_count, arena.namespace)
        # Under `reproducible` one rank measures all merged rows, and those of every rank are kept for it.
        self._all_rows = self._rows if self.shards is None else RowArithmetic(self._parameter, (), 0, arena.namespace)
        self._given = self._merged = self._everything = self._rows.no_rows()

    def _reserve(self, slots: Mapping[str, complex]) -> None:
        arena, (count, width) = self._arena, self._shape
        self.shards: Shards | None = None
        self._own = (0, count)
        if arena.shards_state:
            # Cut at rows, and counted in elements, as all state is.
            self.shards = cut(arena, count, _slice_of_rows, int, is_shared=self.is_shared, width=width)
            if self.shards is not None:
                self._own = _slice_of_rows(count, self.shards.index, self.shards.count)
        size = (self._own[1] - self._own[0]) * width
        dtype = state_dtype(self._parameter.dtype)
        self.slots = arena.reserve_slots(slots, size, dtype, shared=self.is_shared)

    def put(self, indices: AnyArray, values: AnyArray) -> None:
        """Local. Take this replica's gradient for the next step.

        Args:
            indices: The indices of rows of the variable, shape (n,). A row that is named twice counts twice.
            values: The rows, shape (n, ...), of the variable's dtype.
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
        if self.shards is None:
            self._merged = self._rows.merge(*rows, *((node.rank, node.size) if self.is_shared else (0, 1)))
        elif self.shards.lane is not None:
            indices, values = rows
            here = (indices >= self._own[0]) & (indices < self._own[1])
            self._merged = self._rows.merge(
                indices[here] - self._own[0], values[here], self.shards.lane, self.shards.lane_count
            )
        if self._arena.options.reproducible:
            self._everything = self._rows.merge(*rows)

    def measure(self, measure: Callable[[AnyArray, AnyArray], Sequence[float]], count: int) -> AnyArray:
        """Local. Sum up this rank's share of the merged rows; see `VariablePass.measure`.

        Returns:
            Shape (count,), float64.
        """
        communicator = self._arena.communicator
        one_measures = self._arena.options.reproducible or not self.is_shared
        if self.shards is not None and not self._arena.options.reproducible:
            # Each row is in one shard.
            return self._rows.measure(self._merged, measure, count)
        # The merged rows are counted in one copy: the first node's, or the first rank's.
        if (communicator.rank if one_measures else communicator.node_index) != 0:
            return np.zeros(count)
        is_whole = one_measures and (self.is_shared or self.shards is not None)
        return self._all_rows.measure(self._everything if is_whole else self._merged, measure, count)

    def apply(self, update: Update) -> None:
        """Collective. Update the merged rows, between the barriers of a step; with shards `spread_rows` must follow."""
        if self.shards is not None:
            (self._rows.apply_aside if self._writes_back else self._rows.apply)(self._merged, update)
            return
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

    def take_new(self) -> Rows:
        """Local. The rows that `apply` has updated here, and their new parameters; with shards only."""
        (indices, values), self._merged = self._merged, self._rows.no_rows()
        rows = indices + self._own[0]
        return rows, values if self._writes_back else arrays.to_host(self._parameter[arrays.move(rows, self._xp)])

    def write_new(self, rows: Rows) -> None:
        """Collective. Write the new parameters of all nodes, or those of this rank's lane."""
        indices, values = (arrays.move(array, self._xp) for array in rows)
        if not self._writes_back:
            self._parameter[indices] = values
            return
        # Other ranks may still be reading the old parameters.
        self._arena.barrier()
        if self._arena.communicator.node.rank == 0:
            self._parameter[indices] = values
        self._arena.barrier()


def spread_rows(tables: Iterable[Table]) -> None:
    """Collective. Send the new parameters of updated rows, from the shards that have their state, to all nodes."""
    kinds: dict[bool, list[Table]] = {}
    for table in tables:
        if table.shards is not None and table.shards.lane is not None:
            kinds.setdefault(table.is_shared, []).append(table)
    for chosen in kinds.values():
        shards = chosen[0].shards
        if shards is not None and shards.collective is not None:
            new = gather_rows(shards.collective, [table.take_new() for table in chosen], "the updated rows of a step")
            for table, rows in zip(chosen, new, strict=True):
                table.write_new(rows)


def _slice_of_rows(count: int, index: int, slice_count: int) -> tuple[int, int]:
    return count * index // slice_count, count * (index + 1) // slice_count


class TableStep:
    """The phase of a step for all of its tables, whose rows travel in one message.

    Args:
        arena: The arena of the tables.
        tables: The tables, the same on every rank.
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
        spread_rows(self._tables)

    def reduce(self) -> None:
        """Collective. See `Phase.reduce`: the merged rows stay in the tables."""
        given = [table.take() for table in self._tables]
        if self._collective is not None:
            given = gather_rows(self._collective, given, "the tables of a step")
        for table, rows in zip(self._tables, given, strict=True):
            table.merge(rows)
