"""Plans of optimizers where a replica is a group of ranks: over replicated variables and tiles, and over split ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from typing_extensions import override

from mpidist.arrays import AnyArray
from mpidist.indexed_slices import IndexedSlices
from mpidist.variables.kinds.mirrored import MirroredVariable
from mpidist.variables.kinds.split import SplitVariable
from mpidist.variables.logical_devices import LogicalDevices
from mpidist.variables.memory.arena_memory import ArenaMemory
from mpidist.variables.scatter import require_rows
from mpidist.variables.step.arena_plan import ArenaPlan
from mpidist.variables.step.gradient import require_same_gradients, take_rows, write_gradient
from mpidist.variables.update.arithmetic import UpdateSettings
from mpidist.variables.update.kernel import Kernel, LayerKernel
from mpidist.variables.update.options import OptimizerOptions
from mpidist.variables.variable import BaseVariable, Gradient, Slot, by_number


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
        home: ArenaMemory,
    ) -> None:
        super().__init__(variables, kernel, options, home)
        # Over the replicas: gradients may differ between logical devices, and those of tiles do.
        self._compared_over = home.replicas.communicator

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
            require_same_gradients(self._compared_over, gradients if is_summed else None, self.variables)
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
