"""The plan of a synchronous step: where gradients and state of some variables lie, and which slice each rank updates.

A step is: barrier; each rank takes its slice block by block, adds the ranks' gradients in a fixed order and applies
the kernel to its slice of the parameters; barrier. Nothing is gathered or broadcast inside a node. Between nodes a
slice is a lane, reduced with the same lane of the other nodes. Variables whose gradients are rows are tables, and take
a way of their own (`table.py`).
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from mpidist.arrays import AnyArray
from mpidist.comm.agreement import same_on_all
from mpidist.comm.communicator import Communicator
from mpidist.comm.compression.compression import Compression, CompressionState
from mpidist.errors import mark_shared
from mpidist.variables.arena import Arena
from mpidist.variables.mirrored import MirroredVariable
from mpidist.variables.slab import Address
from mpidist.variables.step.bundle import Bundle, Update
from mpidist.variables.step.bundle_step import BundleStep
from mpidist.variables.step.compressed_step import CompressedStep
from mpidist.variables.step.table import Table, reduce_tables
from mpidist.variables.step.variable_pass import VariablePass


class Plan:
    """Where gradients and state of some variables lie.

    Collective. Args:
        variables: Of one arena, the same list on every rank.
        slots: Names of the state that the kernel keeps for each element, with its initial value.
        scratch_count: Private blocks that the kernel wants.

    Raises:
        MismatchError: The lists of variables differ between ranks.
        ValueError: Variables of several strategies, or one twice.
        OSError: No node memory for gradients or state, on every rank.

    Attributes:
        variables: In the plan's order, which numbers them.
        parts: Of the variables with dense gradients.
        tables: The variables with sparse gradients, by number.
        gradients: Writable views of this rank's, in the shapes of the variables; of a table an array without rows.
        memories: What this rank's compressed gradients have left out, by number; see `CompressionErrors`.
    """

    def __init__(
        self, variables: Sequence[MirroredVariable], slots: Mapping[str, float], scratch_count: int = 0
    ) -> None:
        self.variables = tuple(variables)
        self.arena = _common_arena(self.variables)
        # One rank has nothing to send.
        self._compression = (
            cast("Compression | None", self.arena.options.compression) if self.arena.communicator.size > 1 else None
        )
        self._numbers = {variable: number for number, variable in enumerate(self.variables)}
        same_on_all(
            self.arena.communicator, "the variables of an optimizer",
            # Many variables have the same name and shape; where they start tells them apart.
            [(v.name, v.shape, v.dtype.name, v.address.start, v.sparse_gradient) for v in self.variables],
            "Build the model the same way on every rank and pass its variables in the same order.",
        )
        kinds: dict[tuple[np.dtype[Any], bool], list[tuple[int, MirroredVariable]]] = {}
        for number, variable in enumerate(self.variables):
            if not variable.sparse_gradient:
                kinds.setdefault((variable.dtype, variable.address.slab.is_shared), []).append((number, variable))
        self.parts = [Bundle(self.arena, chosen, slots, scratch_count) for chosen in kinds.values()]
        self._part_of = {number: part for part in self.parts for number in part.spans}
        self.tables = {
            number: Table(variable, slots, scratch_count)
            for number, variable in enumerate(self.variables) if variable.sparse_gradient
        }
        self.gradients = tuple(self._gradient(number) for number in range(len(self.variables)))
        self._steps: dict[tuple[int, ...], list[BundleStep]] = {}
        # They belong to no selection of variables.
        self.memories: dict[int, CompressionState] = {}
        self._sweeps: dict[tuple[int, ...], VariablePass] = {}
        self._is_shared = any(p.is_shared for p in self.parts) or any(t.is_shared for t in self.tables.values())
        self._header = self._open_header()
        self._count = 0

    def number(self, variable: MirroredVariable) -> int | None:
        """Local. The place of a variable in the plan, None if it is not there."""
        return self._numbers.get(variable)

    def slot(self, name: str, number: int) -> MirroredVariable:
        """Local. The state `name` of variable `number`, as a variable of the same shape."""
        variable = self.variables[number]
        if number in self.tables:
            address = Address(self.tables[number].slots[name], 0, variable.size)
        else:
            part = self._part_of[number]
            low, high = part.spans[number]
            address = Address(part.slots[name], low, high - low)
        return MirroredVariable(
            self.arena, address, variable.shape, name=f"{variable.name}/{name}", trainable=False
        )

    def step(self, numbers: tuple[int, ...], update: Update, *, is_summed: bool = False) -> None:
        """Collective. Reduce the gradients of some variables over all ranks and apply `update` to them.

        Args:
            numbers: Of the variables, increasing; the same on every rank, and not empty.
            update: `update(parameter, gradient, slots, scratch)` on flat blocks, in place; may overwrite `gradient`.
            is_summed: The gradients are the sums over all ranks already, on every rank; of those in node memory the
                first rank's count. The same on every rank.

        Raises:
            MismatchError: The ranks do not pass the same variables, or are not at the same step.
            CollectiveTimeoutError: Under `timeout_seconds`, some rank did not come in time.
            ValueError: No variables, on every rank.
        """
        self._run(numbers, update, is_summed)

    def _run(self, numbers: tuple[int, ...], update: Update | None, is_summed: bool) -> None:
        self._count += 1
        steps = self._steps.get(numbers)
        if self.arena.arrival is not None:
            self.arena.arrival.wait("apply_gradients")
        self._enter(numbers, is_summed)
        if not numbers:
            raise mark_shared(
                ValueError(f"no gradients for any of {[v.name for v in self.variables]}; all are None")
            )
        for step in steps or self._open_steps(numbers):
            if update is not None:
                (step.apply_summed if is_summed else step.apply)(update)
            elif not is_summed:
                step.reduce()
        tables = list(self._tables(numbers).values())
        reduce_tables(self.arena, tables, is_summed=is_summed)
        if update is not None:
            for table in tables:
                table.apply(update)
        if self._is_shared:
            self.arena.communicator.node.barrier()

    def reduce(self, numbers: tuple[int, ...], *, is_summed: bool = False) -> None:
        """Collective. Sum the gradients of some variables over all ranks, without changing anything else.

        The sums stand in the first gradient segment of each node, and in the tables, for `sweep`: the half of a step
        for those who must see all gradients before they change a parameter.

        Args:
            numbers: As for `step`.
            is_summed: As for `step`; then nothing is left to be summed.

        Raises:
            MismatchError: As `step`.
        """
        self._run(numbers, None, is_summed)

    def takes_sum(self, number: int) -> bool:
        """Local. Whether this rank's gradient counts where the gradients are the sums already."""
        part = self._part_of[number]
        return part.gradient is part.first_segment

    def sweep(self, numbers: tuple[int, ...]) -> VariablePass:
        """Local. How this rank goes over some variables one by one, after `reduce`."""
        sweep = self._sweeps.get(numbers)
        if sweep is None:
            sweep = self._sweeps[numbers] = VariablePass(
                self.arena, [(part, chosen) for part in self.parts if (chosen := _within(part, numbers))], numbers,
                self._tables(numbers),
            )
        return sweep

    def _open_steps(self, numbers: tuple[int, ...]) -> list[BundleStep]:
        steps = [self._part_step(part, chosen) for part in self.parts if (chosen := _within(part, numbers))]
        self._steps[numbers] = steps
        return steps

    def _part_step(self, part: Bundle, numbers: Sequence[int]) -> BundleStep:
        if self._compression is None:
            return BundleStep(part, numbers)
        gradients = {number: self.gradients[number] for number in numbers}
        return CompressedStep(part, gradients, self._compression, self.memories)

    def _gradient(self, number: int) -> AnyArray:
        variable = self.variables[number]
        if number in self.tables:
            return np.empty((0, *variable.shape[1:]), variable.dtype)
        part = self._part_of[number]
        return part.gradient[slice(*part.spans[number])].reshape(variable.shape)

    def _tables(self, numbers: tuple[int, ...]) -> dict[int, Table]:
        return {number: self.tables[number] for number in numbers if number in self.tables} if self.tables else {}

    def _open_header(self) -> AnyArray | None:
        if not self._is_shared:
            return None
        node = self.arena.communicator.node
        try:
            # One cache line per rank of the node: step count, checksum of the variables' numbers.
            return self.arena.reserve(8 * node.size, np.dtype(np.int64), shared=True).writable.reshape(node.size, 8)
        except OSError:
            # Node memory is full, on every rank: they compare by messages.
            return None

    def _enter(self, numbers: tuple[int, ...], is_summed: bool) -> None:
        """The barrier that begins a step; on the way the ranks compare what they are about to do."""
        communicator = self.arena.communicator
        agrees = True
        if self._header is not None:
            mine = self._header[communicator.node.rank]
            mine[0], mine[1] = self._count, zlib.crc32(np.asarray((is_summed, *numbers), np.int64).tobytes())
            communicator.node.barrier()
            agrees = bool((self._header[:, :2] == mine[:2]).all())
        elif self._is_shared:
            communicator.node.barrier()
        crosses = self._header is None or len(communicator.node_sizes) > 1
        # Only at a step that all ranks know may all of them compare; at others a node that sees a difference is on
        # its own, and the job ends with its error.
        if crosses and (self.arena.options.check or self._count <= 16 or self._count & (self._count - 1) == 0):
            self._compare(communicator, numbers, is_summed)
        elif not agrees:
            self._compare(communicator.node, numbers, is_summed)

    def _compare(self, communicator: Communicator, numbers: tuple[int, ...], is_summed: bool) -> None:
        same_on_all(
            communicator, "the step's number and the variables with gradients",
            (self._count, {number: self.variables[number].name for number in numbers}, *["summed"] * is_summed),
            "Every rank must apply gradients for the same variables, in the same order of calls.",
        )


def _within(part: Bundle, numbers: Sequence[int]) -> list[int]:
    return [number for number in numbers if number in part.spans]


def _common_arena(variables: Sequence[MirroredVariable]) -> Arena:
    if not variables:
        raise ValueError("an optimizer needs at least one variable, got an empty list")
    if len(set(variables)) < len(variables):
        raise ValueError(f"a variable stands twice in the list {[v.name for v in variables]}")
    arena = variables[0].arena
    for variable in variables:
        if variable.arena is not arena:
            raise ValueError(
                f"variables {variables[0].name!r} and {variable.name!r} belong to different strategies: create all "
                "variables of a model in the scope of one strategy"
            )
    return arena
