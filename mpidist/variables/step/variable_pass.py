"""The sweep: one pass over the variables of a plan one by one, for what depends on a whole variable, as a norm does.

It follows `Plan.reduce`: the sums of the gradients stand in the first segment of each node. Measuring is cut over all
ranks, since every node holds the same numbers; changing is cut over the ranks of a node, as in `Plan.step`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from mpidist.arrays import AnyArray
from mpidist.variables.arena import Arena
from mpidist.variables.step.bundle import Block, Bundle, Update
from mpidist.variables.step.table import Table

BlockMeasure = Callable[[AnyArray, AnyArray], Sequence[float]]


class VariablePass:
    """What one rank does for some variables of a plan.

    Args:
        arena: Where the variables live.
        parts: Parts of the plan, with the numbers of the variables in each.
        numbers: All the numbers, the same on every rank.
        tables: Those of them whose gradients are rows: only merged rows are measured and updated.

    Attributes:
        is_in_order: Under `reproducible`: what is measured must not depend on threads, ranks or nodes.
    """

    def __init__(
        self,
        arena: Arena,
        parts: Sequence[tuple[Bundle, Sequence[int]]],
        numbers: tuple[int, ...],
        tables: Mapping[int, Table],
    ) -> None:
        self._arena = arena
        self._tables = tables
        self.is_in_order = arena.options.reproducible
        self._numbers = numbers
        self._rows = {number: row for row, number in enumerate(numbers)}
        communicator, node = arena.communicator, arena.communicator.node
        self._measured: list[tuple[int, Block]] = []
        # Under `reproducible`: the same blocks on any number of ranks, each of which is one rank's to measure.
        self._fixed: list[tuple[int, Block]] = []
        self._own: list[tuple[int, Block]] = []
        # Parameters in node memory, gradients and state private to each rank: one rank per node writes the former.
        self._copied: list[tuple[int, Block]] = []
        for part, chosen in parts:
            if self.is_in_order:
                self._fixed += [(number, block) for number in chosen for block in part.fixed_blocks(number)]
            else:
                self._measured += part.variable_blocks(chosen, communicator.rank, communicator.size)
            mine = (node.rank, node.size) if part.is_shared else (0, 1)
            (self._copied if part.writes_back else self._own).extend(part.variable_blocks(chosen, *mine))

    def measure(self, measure: BlockMeasure, count: int) -> AnyArray:
        """Collective. Sums over all elements of each variable, by one small all-reduce.

        Nothing may be changed before every rank has measured; the all-reduce, to which every rank adds, sees to it.

        Args:
            measure: `measure(parameter, gradient)` gives `count` numbers for a block; they are added up.
            count: How many.

        Returns:
            Shape (variables, count), float64, the same on every rank; in the order of the numbers.
        """
        sums = np.zeros((len(self._numbers), count))
        for number, (parameter, gradients, _, _) in self._measured:
            sums[self._rows[number]] += measure(parameter, gradients[0])
        for number, table in self._tables.items():
            sums[self._rows[number]] += table.measure(measure, count)
        if not self._fixed:
            return self._arena.collective.all_reduce(sums)
        return self._measured_in_order(measure, sums)

    def _measured_in_order(self, measure: BlockMeasure, sums: AnyArray) -> AnyArray:
        """Every block is measured by one rank, the others add 0 to it; then blocks are added in their order."""
        communicator, count = self._arena.communicator, len(self._fixed)
        measured = np.zeros((len(sums) + count, sums.shape[1]))
        measured[: len(sums)] = sums
        begin, end = (count * rank // communicator.size for rank in (communicator.rank, communicator.rank + 1))
        for place, (_, (parameter, gradients, _, _)) in enumerate(self._fixed[begin:end], len(sums) + begin):
            measured[place] = measure(parameter, gradients[0])
        measured = self._arena.collective.all_reduce(measured)
        for place, (number, _) in enumerate(self._fixed, len(sums)):
            measured[self._rows[number]] += measured[place]
        return measured[: len(sums)]

    def change(self, update_of: Callable[[int], Update]) -> None:
        """Collective. Change gradients and state of all but tables, and leave the parameters alone.

        Args:
            update_of: The update of a variable's number.
        """
        for number, (parameter, gradients, slots, scratch) in [*self._own, *self._copied]:
            update_of(number)(parameter, gradients[0], slots, scratch[1:])
        self.barrier()

    def apply(self, update_of: Callable[[int], Update]) -> None:
        """Collective. Change parameters and state; may overwrite gradients.

        Args:
            update_of: The update of a variable's number.
        """
        for number, (parameter, gradients, slots, scratch) in self._own:
            update_of(number)(parameter, gradients[0], slots, scratch[1:])
        for number, (parameter, gradients, slots, scratch) in self._copied:
            np.copyto(scratch[0], parameter)
            update_of(number)(scratch[0], gradients[0], slots, scratch[1:])
            np.copyto(gradients[0], scratch[0])
        for number, table in self._tables.items():
            table.apply(update_of(number))
        self.barrier()
        if self._copied:
            if self._arena.communicator.node.rank == 0:
                for _, (parameter, gradients, _, _) in self._copied:
                    np.copyto(parameter, gradients[0])
            self.barrier()

    def barrier(self) -> None:
        """Collective. Wait for the ranks of the node."""
        self._arena.communicator.node.barrier()
