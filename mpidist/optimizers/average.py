"""The exponential moving average of the weights, a slot after those of the kernel."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpidist.arrays import AnyArray
from mpidist.variables.step.plan import Plan

SLOT = "average"


def update_average(plan: Plan, momentum: float, *, is_first: bool) -> None:
    """Collective. Move the average of all variables of the plan towards their values; the first one is these."""

    def move(
        parameter: AnyArray, gradient: AnyArray, slots: Sequence[AnyArray], scratch: Sequence[AnyArray]
    ) -> None:
        average, difference = slots[-1], scratch[0]
        if is_first:
            np.copyto(average, parameter)
            return
        np.subtract(parameter, average, out=difference)
        np.multiply(difference, 1 - momentum, out=difference)
        np.add(average, difference, out=average)

    plan.sweep(tuple(range(len(plan.variables)))).change(lambda _: move)


def overwrite_with_average(plan: Plan, numbers: tuple[int, ...]) -> None:
    """Collective. Set variables of the plan to their average."""

    def copy(
        parameter: AnyArray, gradient: AnyArray, slots: Sequence[AnyArray], scratch: Sequence[AnyArray]
    ) -> None:
        np.copyto(parameter, slots[-1])

    sweep = plan.sweep(numbers)
    # Nobody may still be reading.
    sweep.barrier()
    sweep.apply(lambda _: copy)
