"""The variable pass: work on the variables of a plan one by one, for what depends on a whole variable, as a norm does.

It follows `Step.reduce`: the sums of the gradients are in the first segment of each node. Measuring is cut over all
ranks, since every node holds the same numbers. Changing is cut over the ranks of a node, as in a step. Where the state
is in shards, each node measures and changes its own, and then the new parameters go around.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from mpidist.arrays import AnyArray
from mpidist.comm.first_use import at_first_use
from mpidist.variables.memory.arena_memory import ArenaMemory
from mpidist.variables.step.bundle import Block, Bundle
from mpidist.variables.step.bundle_step import chunk_bytes
from mpidist.variables.step.sums import aside, write_back
from mpidist.variables.step.table import Table, spread_rows
from mpidist.variables.update.kernel import Update

if TYPE_CHECKING:
    from mpidist.variables.step.sharding.sharded_sums import LaneExchange
else:
    LaneExchange = at_first_use("mpidist.variables.step.sharding.sharded_sums", "LaneExchange")

BlockMeasure = Callable[[AnyArray, AnyArray], Sequence[float]]


class VariablePass:
    """The work of one rank in a pass over some variables of a plan.

    Args:
        arena: The arena of the plan.
        bundles: The bundles of the plan, with the numbers of the variables in each.
        numbers: All the numbers, the same on every rank.
        tables: The tables of the variables whose gradients are rows: only merged rows are measured and updated.

    Attributes:
        barrier: The barrier of the node.
    """

    def __init__(
        self,
        arena: ArenaMemory,
        bundles: Sequence[tuple[Bundle, Sequence[int]]],
        numbers: tuple[int, ...],
        tables: Mapping[int, Table],
    ) -> None:
        self._arena = arena
        self._tables = tables
        is_in_order = arena.options.reproducible
        self.barrier = arena.barrier
        self._numbers = numbers
        self._narrow_anywhere = any(bundle.directions is not None for bundle, _ in bundles)
        self._rows = {number: row for row, number in enumerate(numbers)}
        self._measured: list[tuple[int, Block]] = []
        # Under `reproducible`: the same blocks on any number of ranks. Each block is measured by one rank.
        # In the place of one that another rank measures there is None.
        self._fixed: list[tuple[int, Block | None]] = []
        self._exchanges: list[LaneExchange] = []
        self._own: list[tuple[int, Block]] = []
        # Parameters in node memory, gradients and state private to each rank: one rank per node writes parameters.
        self._copied: list[tuple[int, Block]] = []
        self._copies: list[tuple[ArenaMemory, list[Block]]] = []
        # For half precision: sums of gradients, and the arrays that get them in float32.
        self._narrow: list[tuple[AnyArray, AnyArray]] = []
        for bundle, chosen in bundles:
            communicator, node, shards = bundle.arena.communicator, bundle.arena.communicator.node, bundle.shards
            index, count = (communicator.rank, communicator.size) if shards is None else shards.writers
            if is_in_order:
                self._fixed += _share(
                    [(number, block) for number in chosen for block in bundle.fixed_blocks(number, of_directions=True)],
                    index, count,
                )
            else:
                self._measured += bundle.variable_blocks(chosen, index, count, of_directions=True)
            if shards is not None:
                self._exchanges.append(LaneExchange(bundle, shards, chosen, chunk_bytes(bundle.arena)))
            mine = (node.rank, node.size) if bundle.is_shared else (0, 1)
            own = bundle.variable_blocks(chosen, *mine, of_directions=True, is_written=True)
            (self._copied if bundle.writes_back else self._own).extend(own)
            if bundle.writes_back:
                spans = bundle.merged(chosen) if shards is not None else ()
                new = [block for low, high in spans for block in bundle.blocks(low, high)]
                self._copies.append((bundle.arena, new or [block for _, block in own]))
            if bundle.directions is not None:
                sums = [block.gradients[0] for _, block in bundle.variable_blocks(chosen, *mine, is_written=True)]
                self._narrow += zip(sums, [block.gradients[0] for _, block in own], strict=True)

    def widen(self) -> None:
        """Collective where a plan `has_directions`: from here on their gradients are the sums in float32."""
        for narrow, wide in self._narrow:
            np.copyto(wide, narrow)
        if self._narrow_anywhere:
            self.barrier()

    def measure(self, measure: BlockMeasure, count: int) -> AnyArray:
        """Collective. Sums over all elements of each variable, by one small all-reduce.

        Args:
            measure: A function `measure(parameter, gradient)` that returns `count` numbers for a block; they are added
                up.
            count: The number of the numbers.

        Returns:
            Shape (variables, count), float64, the same on every rank; in the order of the numbers.
        """
        sums = np.zeros((len(self._numbers), count))
        for number, (parameter, gradients, *_) in self._measured:
            sums[self._rows[number]] += measure(parameter, gradients[0])
        for number, table in self._tables.items():
            sums[self._rows[number]] += table.measure(measure, count)
        # No rank leaves the all-reduce before every rank has entered it with its sums. Therefore no barrier is needed
        # between measuring and the changes that follow.
        if not self._fixed:
            return self._arena.collective.all_reduce(sums)
        return self._measured_in_order(measure, sums)

    def _measured_in_order(self, measure: BlockMeasure, sums: AnyArray) -> AnyArray:
        """One rank measures a block, the others add 0 to it; then blocks are added in their order."""
        measured = np.zeros((len(sums) + len(self._fixed), sums.shape[1]))
        measured[: len(sums)] = sums
        for place, (_, block) in enumerate(self._fixed, len(sums)):
            if block is not None:
                measured[place] = measure(block.parameter, block.gradients[0])
        measured = self._arena.collective.all_reduce(measured)
        for place, (number, _) in enumerate(self._fixed, len(sums)):
            measured[self._rows[number]] += measured[place]
        return measured[: len(sums)]

    def change(self, update_of: Callable[[int], Update]) -> None:
        """Collective. Change gradients and state of all but tables, and leave the parameters alone.

        Args:
            update_of: The update of a variable's number.
        """
        for number, (parameter, gradients, slots, _, scratch) in [*self._own, *self._copied]:
            update_of(number)(parameter, gradients[0], slots, scratch)
        self.barrier()

    def apply(self, update_of: Callable[[int], Update]) -> None:
        """Collective. Change parameters and state; may overwrite gradients.

        Args:
            update_of: The update of a variable's number.
        """
        for number, (parameter, gradients, slots, _, scratch) in self._own:
            update_of(number)(parameter, gradients[0], slots, scratch)
        for number, (parameter, gradients, slots, total, scratch) in self._copied:
            aside(update_of(number), total)(parameter, gradients[0], slots, scratch)
        for number, table in self._tables.items():
            table.apply(update_of(number))
        spread_rows(self._tables.values())
        self.barrier()
        if self._exchanges:
            if self._copies:
                # What goes around are blocks of the gradients' own dtype.
                for narrow, wide in self._narrow:
                    np.copyto(narrow, wide, casting="same_kind")
            for exchange in self._exchanges:
                exchange.gather_all()
            self.barrier()
        for arena, blocks in self._copies:
            if arena.communicator.node.rank == 0:
                write_back(blocks)
            arena.barrier()


def _share(blocks: list[tuple[int, Block | None]], index: int, count: int) -> list[tuple[int, Block | None]]:
    """The same blocks, with None in the place of those that are not in part `index` of `count`."""
    there = [place for place, (_, block) in enumerate(blocks) if block is not None]
    own = set(there[len(there) * index // count : len(there) * (index + 1) // count])
    return [(number, block if place in own else None) for place, (number, block) in enumerate(blocks)]
