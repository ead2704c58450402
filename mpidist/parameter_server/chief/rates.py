"""The learning rates of steps that are about to be committed."""

from __future__ import annotations

import math

from mpidist.optimizers.optimizer import Optimizer
from mpidist.parameter_server.chief.plan import ServedPlan
from mpidist.parameter_server.queue.commits import RateError
from mpidist.variables.update.kernel import require_rate


def rate_of(optimizer: Optimizer, iteration: int) -> float:
    """Local. The learning rate of a step.

    Args:
        optimizer: On the coordinator.
        iteration: The iteration of the step, counted from 0.

    Raises:
        RateError: The optimizer refuses the rate, which on the servers would come too late; or it is no number, and
            comes from no schedule.
        Exception: What the schedule raises.
    """
    try:
        rate = optimizer.rate_at(iteration)
    except TypeError as error:
        if callable(optimizer.learning_rate):
            raise
        raise RateError(str(error)) from error
    if isinstance(optimizer.plan, ServedPlan) and not math.isnan(rate):
        try:
            require_rate(optimizer.plan.kernel, iteration + 1, rate)
        except ValueError as error:
            raise RateError(str(error)) from error
    return rate
