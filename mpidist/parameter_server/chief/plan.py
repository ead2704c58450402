"""The plan of an optimizer whose variables are on servers, as the chief has it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from mpidist.arrays import AnyArray
from mpidist.variables.kinds.sharded import served_parts
from mpidist.variables.update.kernel import Kernel, LayerKernel
from mpidist.variables.update.options import OptimizerOptions
from mpidist.variables.variable import BaseVariable, Gradient, Slot


class ServedPlan:
    """The plan of an optimizer on the coordinator, where nothing is applied; see `UpdatePlan`.

    Attributes:
        number: The number of the optimizer.
        variables: The variables in their order.
        slots: The state of the variables.
        kernel: The arithmetic.
        options: The options of the optimizer.
    """

    def __init__(
        self, number: int, variables: Sequence[BaseVariable], slots: Mapping[str, Slot],
        kernel: Kernel | LayerKernel, options: OptimizerOptions,
    ) -> None:
        self.number = number
        self.variables: Sequence[BaseVariable] = tuple(variables)
        self.slots = slots
        self.kernel = kernel
        self.options = options

    def during(self) -> AbstractContextManager[object]:
        """Local. See `UpdatePlan.during`; nothing is updated here."""
        return nullcontext()

    def gradient(self, number: int) -> AnyArray:
        """Local. Refuse; see `apply`."""
        del number
        raise _outside()

    def accumulate(self, gradients: Mapping[int, Gradient], factor: float, *, is_summed: bool) -> None:
        """Local. Refuse; see `apply`."""
        del gradients, factor, is_summed
        raise _outside()

    def apply(self, gradients: Mapping[int, Gradient], settings: Any) -> bool:
        """Local. Refuse.

        Raises:
            RuntimeError: Always.
        """
        del gradients, settings
        raise _outside()

    def flush(self, count: int, settings: Any) -> bool:
        """Local. Do nothing: gradients are not accumulated over closures."""
        del count, settings
        return True

    def take_average(self, numbers: tuple[int, ...], moves: int = 0) -> None:
        """Local. Set variables to their moving average."""
        del moves
        for number in numbers:
            self.variables[number].assign(self.slots["average"][number].value())

    def state(self) -> dict[str, Any]:
        """Local. The slots are all of its state."""
        return {}

    def load(self, saved: Mapping[str, Any]) -> None:
        """Local. The slots are all of its state."""


def require_plannable(variables: Sequence[BaseVariable], options: OptimizerOptions) -> None:
    """Local. Raise an error for variables, or options, that servers do not update.

    Raises:
        NotImplementedError: Servers do not support an option.
        TypeError: An element is no variable on servers.
    """
    if options.gradient_accumulation_steps:
        raise NotImplementedError(
            "gradient_accumulation_steps is not supported under a ParameterServerStrategy, whose calls run on "
            "different workers: add up the gradients inside the closure"
        )
    if options.ema_overwrite_frequency:
        raise NotImplementedError(
            "ema_overwrite_frequency is not supported under a ParameterServerStrategy: call finalize_variable_values "
            "after `join`"
        )
    if not all(len(served_parts(variable)) == len(variable.parts) for variable in variables):
        raise TypeError(f"a ParameterServerStrategy plans updates of its own variables, got {list(variables)!r}")


def _outside() -> RuntimeError:
    return RuntimeError(
        "gradients are applied on workers: call the optimizer inside a function that "
        "ClusterCoordinator(strategy).schedule(function) runs there"
    )
