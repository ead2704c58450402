"""The plan of a synchronous step: the memory of gradients and state, and the slice that each rank updates.

A step is: barrier; each rank takes its slice block by block, adds the ranks' gradients in a fixed order and applies
the kernel to its slice of the parameters; barrier. Nothing is gathered or broadcast inside a node. Between nodes a
slice is a lane, reduced with the same lane of the other nodes. Variables whose gradients are rows are tables, with a
phase of their own (`table.py`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from mpidist import arrays
from mpidist.arrays import AnyArray
from mpidist.comm.arithmetic.combine import is_half
from mpidist.comm.first_use import at_first_use
from mpidist.comm.group.agreement import same_on_all
from mpidist.indexed_slices import IndexedSlices
from mpidist.variables.kinds.mirrored import MirroredVariable
from mpidist.variables.memory.arena_memory import ArenaMemory
from mpidist.variables.memory.sharing import return_at_once
from mpidist.variables.memory.slab import SlabRange
from mpidist.variables.step.bundle import Bundle
from mpidist.variables.step.bundle_step import open_bundle_step, open_reduced_step
from mpidist.variables.step.compressed_step import CompressedReduction
from mpidist.variables.step.step import NoGradients, Phase, Selection, Step, StepHeader
from mpidist.variables.step.table import Table, TableStep
from mpidist.variables.step.variable_pass import VariablePass
from mpidist.variables.update.halves import MASTER_COPY
from mpidist.variables.variable import BaseVariable, Gradient, common_home

if TYPE_CHECKING:
    from mpidist.comm.compression.compression import Compression, CompressionState
    from mpidist.variables.kinds.sharded_state import ShardedState
else:
    ShardedState = at_first_use("mpidist.variables.kinds.sharded_state", "ShardedState")

# The number of steps, and of variable passes, kept for the selections of variables used last. A program uses a few:
# all variables, or those of a generator and those of a discriminator. With random selections a step is planned again
# each time; it takes a few views of arrays for each block.
KEPT_SELECTIONS = 32


class Plan:
    """Collective. The memory of gradients and state of some variables, and the steps over them.

    Args:
        variables: The variables of one arena, the same list on every rank.
        slots: Names of the state that the kernel keeps for each element, with its initial value.
        scratch_count: Number of private blocks for the kernel.
        has_directions: Whether updates take two passes over gradients, see `Bundle`.
        has_master: Whether variables of half precision have the slot `MASTER_COPY`.
        arena: The arena of all ranks that take the steps, where variables are in others, over some of these ranks.
            Default: that of the variables.

    Raises:
        MismatchError: The lists of variables differ between ranks.
        ValueError: The variables are of several strategies, or one occurs twice.
        OSError: Sharing is demanded (shared=True), and node memory has run out; on every rank.

    Attributes:
        number: The number of the plan among those of the arena.
        variables: The variables in the plan's order, which numbers them.
        bundles: The bundles of the variables with dense gradients.
        tables: The variables with sparse gradients, by number.
        gradients: Writable views of this rank's gradients, in the shapes of the variables; of a table an array without
            rows.
        is_sharded: Whether some state is in shards, so that not every node has it.
        compression_states: The errors of this rank's compressed gradients, by number; see `CompressionErrors`.
    """

    def __init__(
        self, variables: Sequence[MirroredVariable], slots: Mapping[str, complex], scratch_count: int = 0, *,
        has_directions: bool = False, has_master: bool = False, arena: ArenaMemory | None = None,
    ) -> None:
        self.variables = tuple(variables)
        if arena is None:
            common_home(self.variables)
        self.arena = self.variables[0].arena if arena is None else arena
        # One rank has nothing to send.
        self._compression = (
            cast("Compression | None", self.arena.options.compression) if self.arena.communicator.size > 1 else None
        )
        same_on_all(
            self.arena.communicator, "the variables of an optimizer",
            # Many variables have the same name and shape; their offsets distinguish them.
            [(v.name, v.shape, v.dtype.name, self._place(v), v.sparse_gradient) for v in self.variables],
            "Build the model the same way on every rank and pass its variables in the same order.",
        )
        self.number = self.arena.plan_count
        self.arena.plan_count += 1
        kinds: dict[tuple[np.dtype[Any], bool, int], list[tuple[int, MirroredVariable]]] = {}
        for number, variable in enumerate(self.variables):
            if not variable.sparse_gradient:
                kind = variable.dtype, variable.address.slab.is_shared, id(variable.arena)
                kinds.setdefault(kind, []).append((number, variable))
        master = {MASTER_COPY: 0.0} if has_master else {}
        self.bundles = [
            Bundle(
                chosen[0][1].arena, chosen, {**slots, **(master if is_half(dtype) else {})}, scratch_count,
                has_directions=has_directions,
            ) for (dtype, *_), chosen in kinds.items()
        ]
        self._bundle_of = {number: bundle for bundle in self.bundles for number in bundle.spans}
        self.tables = {
            number: Table(variable, {**slots, **(master if is_half(variable.dtype) else {})}, scratch_count)
            for number, variable in enumerate(self.variables) if variable.sparse_gradient
        }
        holders: list[Bundle | Table] = [*self.bundles, *self.tables.values()]
        self.is_sharded = any(held.shards is not None for held in holders)
        self.gradients = tuple(self._gradient(number) for number in range(len(self.variables)))
        # They belong to the variables and not to a step, which may be dropped and planned again.
        self.compression_states: dict[int, CompressionState] = {}
        is_shared = any(bundle.is_shared for bundle in self.bundles) or any(t.is_shared for t in self.tables.values())
        if any(variable.arena is not self.arena for variable in self.variables):
            # Whether a part is shared may differ between the ranks of a node, and all of them meet there.
            is_shared = self.arena.barrier is not return_at_once
        self._barrier = self.arena.barrier if is_shared else None
        self._header = StepHeader(self.arena, is_shared=is_shared)
        self._steps: OrderedDict[tuple[tuple[int, ...], bool], Step] = OrderedDict()
        self._passes: OrderedDict[tuple[int, ...], VariablePass] = OrderedDict()

    def slot(self, name: str, number: int) -> BaseVariable:
        """Local. The state `name` of variable `number`, as a variable of the same shape."""
        variable, title = self.variables[number], f"{self.variables[number].name}/{name}"
        address, begin = self._address(name, number)
        held = self.tables.get(number) or self._bundle_of[number]
        if held.shards is None:
            return MirroredVariable(variable.arena, address, variable.shape, name=title, trainable=False)
        low = 0 if number in self.tables else self._bundle_of[number].spans[number][0]
        return ShardedState(variable, address, begin, held.shards.parts(low, low + variable.size), name=title)

    def elements(self, name: str, number: int) -> AnyArray:
        """Local. The elements of the state `name` of variable `number` that are on this node, flat."""
        return self._address(name, number)[0].writable

    def _address(self, name: str, number: int) -> tuple[SlabRange, int]:
        """The place of those elements of a slot that this node has, and the number of the first one in the variable."""
        variable, known = self.variables[number], f"{number} ({name})"
        if number in self.tables:
            held: Table | Bundle = self.tables[number]
            low, high = 0, variable.size
        else:
            held = self._bundle_of[number]
            low, high = held.spans[number]
        first, last = (low, high) if held.shards is None else held.shards.own
        begin = min(max(first, low), high)
        end = max(min(last, high), begin)
        start = begin if held.shards is None else max(begin - first, 0)
        return SlabRange(held.slots[name], start, end - begin, known), begin - low

    def step(self, numbers: tuple[int, ...], *, is_summed: bool = False) -> Step:
        """Local. The step over some variables, planned at the first call.

        Args:
            numbers: The numbers of the variables, increasing; the same on every rank, and not empty.
            is_summed: Whether the gradients are the sums over all ranks already, on every rank; of those in node memory
                the first rank's count. The same on every rank.
        """
        step = self._steps.get((numbers, is_summed))
        if step is None:
            step = self._open_step(numbers, is_summed=is_summed)
            _keep(self._steps, (numbers, is_summed), step)
        else:
            self._steps.move_to_end((numbers, is_summed))
        return step

    def variable_pass(self, numbers: tuple[int, ...]) -> VariablePass:
        """Local. The pass over some variables one by one, after the `reduce` of their step; planned at the first call.

        Args:
            numbers: See `step`.
        """
        variable_pass = self._passes.get(numbers)
        if variable_pass is None:
            bundles = [(bundle, chosen) for bundle in self.bundles if (chosen := _within(bundle, numbers))]
            variable_pass = VariablePass(self.arena, bundles, numbers, self._tables(numbers))
            _keep(self._passes, numbers, variable_pass)
        else:
            self._passes.move_to_end(numbers)
        return variable_pass

    def holds(self, gradient: Gradient) -> bool:
        """Local. Whether a gradient is in this rank's memory of gradients."""
        array = arrays.as_array(gradient.values if isinstance(gradient, IndexedSlices) else gradient)
        if arrays.namespace(array) is not self.arena.namespace:
            return False
        return any(self.arena.namespace.may_share_memory(array, bundle.gradient) for bundle in self.bundles)

    def takes_sum(self, number: int) -> bool:
        """Local. Whether this rank's gradient counts where the gradients are the sums already."""
        bundle = self._bundle_of[number]
        return bundle.gradient is bundle.first_segment

    def counts(self, number: int, *, is_summed: bool) -> bool:
        """Local. Whether this rank's gradient counts, where not those of all ranks do.

        Args:
            number: The number of the variable.
            is_summed: See `step`.
        """
        arena = self.variables[number].arena
        if not is_summed:
            return arena.gives_gradients
        if number in self.tables:
            return arena.gives_everywhere or arena.communicator.rank == 0
        return self.takes_sum(number) if self._bundle_of[number].takes_given_sums else arena.communicator.rank == 0

    def silence(self, numbers: Iterable[int], *, is_summed: bool) -> None:
        """Local. Set gradients of this rank that do not count, and are added to others, to zero."""
        for number in numbers:
            if number not in self.tables and not self.counts(number, is_summed=is_summed):
                bundle = self._bundle_of[number]
                if bundle.has_segment and not bundle.arena.gives_everywhere:
                    self.gradients[number][...] = 0

    def _place(self, variable: MirroredVariable) -> int | str:
        # Other ranks may have another place for a part, where memory was free earlier.
        return variable.address.start if variable.arena is self.arena else variable.address.number

    def _open_step(self, numbers: tuple[int, ...], *, is_summed: bool) -> Step:
        # Opening does not communicate, therefore ranks need not agree on which steps they keep.
        phases = [
            self._open_phase(bundle, chosen, is_summed=is_summed)
            for bundle in self.bundles if (chosen := _within(bundle, numbers))
        ]
        tables: dict[int, list[int]] = {}
        for number in self._tables(numbers):
            tables.setdefault(id(self.variables[number].arena), []).append(number)
        for chosen in tables.values():
            arena = self.variables[chosen[0]].arena
            is_given = is_summed and arena.gives_everywhere
            phases.append(TableStep(arena, [self.tables[number] for number in chosen], is_summed=is_given))
        if not phases:
            phases.append(NoGradients(self.variables, self._barrier))
        selection = Selection(self.variables, numbers, is_summed=is_summed, plan=self.number)
        return Step(selection, self._header, phases, self._barrier)

    def _open_phase(self, bundle: Bundle, numbers: Sequence[int], *, is_summed: bool) -> Phase:
        if self._compression is None or is_summed:
            return open_bundle_step(bundle, numbers, is_summed=is_summed and bundle.takes_given_sums)
        gradients = {number: self.gradients[number] for number in numbers}
        reduction = CompressedReduction(bundle, gradients, self._compression, self.compression_states)
        return open_reduced_step(bundle, numbers, reduction)

    def _gradient(self, number: int) -> AnyArray:
        variable = self.variables[number]
        if number in self.tables:
            return np.empty((0, *variable.shape[1:]), variable.dtype)
        bundle = self._bundle_of[number]
        return bundle.gradient[slice(*bundle.spans[number])].reshape(variable.shape)

    def _tables(self, numbers: tuple[int, ...]) -> dict[int, Table]:
        return {number: self.tables[number] for number in numbers if number in self.tables}


def _keep(kept: OrderedDict[Any, Any], key: object, value: object) -> None:
    """Add a value, and drop the one that was not used for longest."""
    kept[key] = value
    if len(kept) > KEPT_SELECTIONS:
        kept.popitem(last=False)


def _within(bundle: Bundle, numbers: Sequence[int]) -> list[int]:
    return [number for number in numbers if number in bundle.spans]
