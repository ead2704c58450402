"""An optimizer's plan under `HybridStrategy`: its updates are local steps of the group."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from typing_extensions import override

from mpidist.strategy.hybrid.part import Part
from mpidist.variables.kinds.mirrored import MirroredVariable
from mpidist.variables.step.arena_plan import ArenaPlan
from mpidist.variables.update.arithmetic import UpdateSettings
from mpidist.variables.update.kernel import Kernel, LayerKernel
from mpidist.variables.update.options import OUTER_STEPS, OptimizerOptions
from mpidist.variables.variable import Gradient


class LocalSteps(NamedTuple):
    """The calls around the updates of an optimizer, which are local steps of the group.

    Attributes:
        parts: The parts of its variables.
        before: A function, Collective over the group, that is called with the parts before a local step.
        after: A function, Collective over the group, that is called with the parts after a local step.
        is_counted: Whether checkpoints hold the number of outer steps.
    """

    parts: Sequence[Part]
    before: Callable[[Sequence[Part]], None]
    after: Callable[[Sequence[Part]], None]
    is_counted: bool


class HybridPlan(ArenaPlan):
    """Collective over the group. An optimizer's plan whose updates are local steps of the group.

    Args:
        variables: The variables of the optimizer, the same list on every rank.
        kernel: The arithmetic.
        options: The options of the optimizer.
        steps: The calls around an update.
    """

    def __init__(
        self, variables: Sequence[MirroredVariable], kernel: Kernel | LayerKernel, options: OptimizerOptions,
        steps: LocalSteps,
    ) -> None:
        super().__init__(variables, kernel, options)
        self._steps = steps

    @override
    def apply(
        self, gradients: Mapping[int, Gradient], settings: UpdateSettings, *, numbers: tuple[int, ...] | None = None
    ) -> bool:
        """Collective. See `ArenaPlan.apply`; then, if the window is full, the outer step."""
        if numbers is None:
            self._steps.before(self._steps.parts)
        was_applied = super().apply(gradients, settings, numbers=numbers)
        # With accumulation the base class calls this method again, with the numbers; a step that is skipped counts,
        # too, so that all groups count alike.
        if numbers is None:
            self._steps.after(self._steps.parts)
        return was_applied

    @override
    def flush(self, count: int, settings: UpdateSettings) -> bool:
        """Collective. See `ArenaPlan.flush`."""
        self._steps.before(self._steps.parts)
        was_applied = super().flush(count, settings)
        if count:
            self._steps.after(self._steps.parts)
        return was_applied

    @override
    def state(self) -> dict[str, Any]:
        """Local. See `ArenaPlan.state`; and the number of outer steps, of which a schedule makes a learning rate."""
        counted = {OUTER_STEPS: max(part.windows for part in self._steps.parts)} if self._steps.is_counted else {}
        return {**super().state(), **counted}

    @override
    def load(self, saved: Mapping[str, Any]) -> None:
        """Collective. See `ArenaPlan.load`."""
        super().load(saved)
        for part in self._steps.parts if OUTER_STEPS in saved else ():
            part.continue_from(int(saved[OUTER_STEPS].numpy()))
