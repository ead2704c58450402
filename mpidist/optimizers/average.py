"""The exponential moving average of the weights, a slot after those of the kernel."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpidist.arrays import AnyArray
from mpidist.optimizers.options import OptimizerOptions
from mpidist.variables.step.plan import Plan

SLOT = "average"


class MovingAverage:
    """The moving average of all variables of a plan.

    Args:
        plan: Its last slot is `SLOT`.
        options: Momentum, and how often the variables become their average.
    """

    def __init__(self, plan: Plan, options: OptimizerOptions) -> None:
        self._plan = plan
        self._momentum = options.ema_momentum
        self._frequency = options.ema_overwrite_frequency
        self._all = tuple(range(len(plan.variables)))

    def follow(self, step: int) -> None:
        """Collective. Move the average towards the variables; every so many steps, set the variables to it.

        Args:
            step: Of the update that has just changed the variables. In step 1 the average becomes their value.
        """
        momentum, is_first = self._momentum, step == 1

        def move(
            parameter: AnyArray, _gradient: AnyArray, slots: Sequence[AnyArray], scratch: Sequence[AnyArray]
        ) -> None:
            average, difference = slots[-1], scratch[0]
            if is_first:
                np.copyto(average, parameter)
                return
            np.subtract(parameter, average, out=difference)
            np.multiply(difference, 1 - momentum, out=difference)
            np.add(average, difference, out=average)

        self._plan.variable_pass(self._all).change(lambda _: move)
        if self._frequency is not None and step % self._frequency == 0:
            self.overwrite(self._all)

    def overwrite(self, numbers: tuple[int, ...]) -> None:
        """Collective. Set variables to their average."""
        variable_pass = self._plan.variable_pass(numbers)
        # Other ranks may still be reading the variables.
        variable_pass.barrier()
        variable_pass.apply(lambda _: _copy)


def _copy(
    parameter: AnyArray, _gradient: AnyArray, slots: Sequence[AnyArray], _scratch: Sequence[AnyArray]
) -> None:
    np.copyto(parameter, slots[-1])
