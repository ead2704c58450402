"""The home of variables where a replica is a group of ranks, its logical devices.

A replicated variable is one variable over all ranks, and only the gradient of logical device 0 counts: if each device
had a variable of its own, over the same device of all replicas, these variables would diverge after a difference of
one bit in a gradient. A split variable has a tile on each device, in an arena over the same device of all replicas. One
plan updates both: barriers, norms and the search for gradients that are not finite include all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import numpy.typing as npt
from typing_extensions import override

from mpidist.arrays import AnyArray
from mpidist.comm.choice import selection
from mpidist.comm.front.sparse import reduce_slices
from mpidist.comm.group.resource import end_all
from mpidist.indexed_slices import IndexedSlices
from mpidist.options import ReduceOp
from mpidist.recorder.calls import noted
from mpidist.variables.arena import Arena, mirrored_only
from mpidist.variables.kinds.mirrored import MirroredVariable
from mpidist.variables.kinds.split import SplitVariable
from mpidist.variables.logical_devices import LogicalDevices
from mpidist.variables.making.splitting import create_split
from mpidist.variables.memory.arena_memory import ArenaMemory
from mpidist.variables.replicas import Replicas
from mpidist.variables.scatter import require_rows
from mpidist.variables.step.arena_plan import ArenaPlan
from mpidist.variables.step.gradient import require_same_gradients, take_rows, write_gradient
from mpidist.variables.update.arithmetic import UpdateSettings
from mpidist.variables.update.kernel import Kernel, LayerKernel
from mpidist.variables.update.options import OptimizerOptions
from mpidist.variables.variable import BaseVariable, Gradient, Slot, UpdatePlan, by_number


class LogicalArena(Arena):
    """Collective over all ranks. The home of `TPUStrategy`'s variables.

    Args:
        replicas: The same logical device of all replicas, and all ranks; see `Replicas`.
        devices: The logical devices of this rank's replica.
        shared: See `Arena`.
        on_gpu: See `Arena`; only for replicas of one rank.
    """

    takes_partition_dimensions = True

    def __init__(
        self, replicas: Replicas, devices: LogicalDevices, *, shared: bool | None = None, on_gpu: bool = False
    ) -> None:
        own = None
        if devices.count > 1:
            exact = replace(replicas.options, wire_dtype=None)
            own = selection.choose(replicas.everyone, exact, replicas.number)
        self._own_collective = own
        super().__init__(replicas, shared=shared, on_gpu=on_gpu, collective=own)
        self.devices = devices
        self._tiles: Arena | None = self if devices.count == 1 else None
        self._tile_replicas: Replicas | None = None
        self._shared = shared if self.shares_memory else False
        self.gives_gradients = devices.device == 0
        if devices.count > 1:
            node = self.communicator.node
            giving = node.all_gather_object(self.gives_gradients)
            # A node without a logical device 0 adds zeros from its first rank to the sums of other nodes.
            self.givers = [rank for rank, gives in enumerate(giving) if gives] or [0]

    def _end(self, *, is_collective: bool) -> None:
        tiles = [] if self._tile_replicas is None or self._tiles is None else [self._tiles, self._tile_replicas]
        own = [] if self._own_collective is None else [self._own_collective]
        end_all([*tiles, *own], is_collective=is_collective)
        super()._end(is_collective=is_collective)

    @override
    def combine(self, array: AnyArray, op: ReduceOp) -> AnyArray:
        """Collective. See `ArenaMemory.combine`; the array of logical device 0 is the array of its replica."""
        return self.devices.first(self.replicas.collective.all_reduce(array, op))

    @override
    def combine_rows(self, rows: IndexedSlices, op: ReduceOp) -> IndexedSlices:
        """Collective. See `ArenaMemory.combine_rows`; the rows of logical device 0 are the rows of its replica."""
        return self.devices.lead("reducing rows", lambda: reduce_slices(self.replicas.collective, op, rows))

    @override
    def after_run(self) -> None:
        """Collective. See `Home.after_run`; tiles are compared over the replicas."""
        super().after_run()
        if self._tile_replicas is not None and self._tiles is not None:
            self._tiles.after_run()

    @override
    def create_variable(
        self, initial_value: npt.ArrayLike | BaseVariable | Callable[[], npt.ArrayLike], *,
        partition_dimensions: Any = None, **arguments: Any,
    ) -> BaseVariable:
        """Collective. See `Home.create_variable`, and `splitting.create_split` with `partition_dimensions`."""
        if partition_dimensions is None:
            return super().create_variable(initial_value, **arguments)
        self.require_open()
        with self.calls.during("creating a variable"):
            return create_split(
                self, self._open_tiles(), self.devices, initial_value, partition_dimensions, **arguments
            )

    @override
    @noted("building an optimizer")
    def plan(
        self, variables: Sequence[BaseVariable], kernel: Kernel | LayerKernel, options: OptimizerOptions
    ) -> UpdatePlan:
        """Collective. See `Arena.plan`."""
        held = mirrored_only([one.tile if isinstance(one, SplitVariable) else one for one in variables])
        plan = ArenaPlan(held, kernel, options) if self.gives_everywhere else LogicalPlan(held, kernel, options, self)
        if not any(isinstance(one, SplitVariable) for one in variables):
            return plan
        return SplitPlan(variables, plan, self, self.devices)

    def _open_tiles(self) -> Arena:
        if self._tiles is None:
            column = self.replicas.communicator
            self._tile_replicas = Replicas(column, self.options)
            self._tiles = Arena(self._tile_replicas, shared=self._shared)
            self._tiles.set_strategy(self.strategy)
            # Other threads that copy tiles must wait for a step over all variables.
            self._tiles.guard = self.guard
        return self._tiles


class LogicalPlan(ArenaPlan):
    """Collective. An optimizer's plan over replicated variables and tiles.

    Args:
        variables: The replicated variables, and this device's tiles of split variables; the same list on every rank.
        kernel: The arithmetic.
        options: The options of the work around the kernel.
        home: The arena of all ranks.
    """

    def __init__(
        self, variables: Sequence[MirroredVariable], kernel: Kernel | LayerKernel, options: OptimizerOptions,
        home: LogicalArena,
    ) -> None:
        super().__init__(variables, kernel, options, home)
        self._home = home

    @override
    def apply(
        self, gradients: Mapping[int, Gradient], settings: UpdateSettings, *, numbers: tuple[int, ...] | None = None
    ) -> bool:
        """Collective. See `ArenaPlan.apply`."""
        if numbers is not None:
            self._plan.silence(numbers, is_summed=settings.is_summed)
        return super().apply(gradients, settings, numbers=numbers)

    @override
    def _write(self, gradients: Mapping[int, Gradient], *, is_summed: bool) -> tuple[int, ...]:
        """Local, and Collective under `check`. See `ArenaPlan`; for replicated variables device 0's gradient counts."""
        if self._checks:
            # Gradients are compared over the replicas: they may differ between logical devices, and those of tiles do.
            column = self._home.replicas.communicator
            require_same_gradients(column, gradients if is_summed else None, self.variables)
        plan = self._plan
        for number, gradient in self._apart(gradients).items():
            variable, counts = plan.variables[number], plan.counts(number, is_summed=is_summed)
            if number in plan.tables:
                rows = take_rows(gradient, variable)
                plan.tables[number].put(*(rows if counts else (rows[0][:0], rows[1][:0])))
            elif counts:
                write_gradient(plan.gradients[number], gradient, variable)
            elif isinstance(gradient, IndexedSlices):
                require_rows(variable, gradient)
            else:
                variable.coerce(gradient)
        numbers = tuple(sorted(gradients))
        plan.silence(numbers, is_summed=is_summed)
        return numbers


class SplitPlan:
    """An optimizer's plan where some variables are split: the plan over tiles, presented as one over whole variables.

    Args:
        variables: The variables of the optimizer.
        held: The plan over the replicated variables, and over this device's tiles of the split variables.
        home: The home of the variables.
        devices: The logical devices of this rank's replica.

    Attributes:
        variables: The constructor's argument.
        slots: The state by name; the state of a split variable is split in the same way.
    """

    def __init__(
        self, variables: Sequence[BaseVariable], held: ArenaPlan, home: ArenaMemory, devices: LogicalDevices
    ) -> None:
        self.variables = tuple(variables)
        self._held = held

        def whole(number: int, state: BaseVariable) -> BaseVariable:
            variable = self.variables[number]
            if not isinstance(variable, SplitVariable):
                return state
            return SplitVariable(home, state, variable.tiling, devices)

        self.slots: dict[str, Slot] = {}
        for name, slot in held.slots.items():
            made = {number: whole(number, state) for number, state in by_number(slot).items()}
            self.slots[name] = made if isinstance(slot, Mapping) else list(made.values())

    def during(self) -> AbstractContextManager[object]:
        """Local. See `UpdatePlan.during`."""
        return self._held.during()

    def gradient(self, number: int) -> AnyArray:
        """Local. See `UpdatePlan.gradient`; the gradient of a split variable has the shape of the tile."""
        return self._held.gradient(number)

    def accumulate(self, gradients: Mapping[int, Gradient], factor: float, *, is_summed: bool) -> None:
        """Local. See `UpdatePlan.accumulate`."""
        self._held.accumulate(gradients, factor, is_summed=is_summed)

    def apply(self, gradients: Mapping[int, Gradient], settings: UpdateSettings) -> bool:
        """Collective. See `UpdatePlan.apply`."""
        return self._held.apply(gradients, settings)

    def flush(self, count: int, settings: UpdateSettings) -> bool:
        """Collective. See `UpdatePlan.flush`."""
        return self._held.flush(count, settings)

    def take_average(self, numbers: tuple[int, ...], moves: int = 0) -> None:
        """Collective. See `UpdatePlan.take_average`."""
        self._held.take_average(numbers, moves)

    def state(self) -> dict[str, Any]:
        """Local. See `UpdatePlan.state`."""
        return self._held.state()

    def load(self, saved: Mapping[str, Any]) -> None:
        """Collective. See `UpdatePlan.load`."""
        self._held.load(saved)
