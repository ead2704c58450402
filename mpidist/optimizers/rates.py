"""Learning rates as programs give them: numbers, and what schedules return."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mpidist.arguments import described
from mpidist.variables.update.kernel import Schedule, positive

# `float` reads texts, and takes True for 1.
NO_RATES = (bool, str, bytes)


def require_rate(learning_rate: float | Schedule) -> None:
    """Local. Raise TypeError or ValueError for an argument that is neither a schedule nor a rate."""
    if not callable(learning_rate):
        if isinstance(learning_rate, bool) or not isinstance(learning_rate, (int, float, np.number)):
            raise TypeError(f"`learning_rate` must be a number or a schedule, got {described(learning_rate)}")
        positive(learning_rate=float(learning_rate))


def rate_at(learning_rate: float | Schedule, iteration: int, owner: str) -> float:
    """Local. The learning rate of a step.

    Args:
        learning_rate: The learning rate of an optimizer.
        iteration: The iteration of the step, counted from 0.
        owner: The optimizer, for the errors.

    Raises:
        TypeError: It is no number; texts are not read as numbers.
    """
    given: Any = learning_rate(iteration) if callable(learning_rate) else learning_rate
    # Older versions of NumPy take an array of one number for a number, with a warning.
    if isinstance(given, NO_RATES) or getattr(given, "ndim", 0) > 0:
        raise no_rate(given, learning_rate, iteration, owner)
    try:
        return float(given)
    except (TypeError, ValueError):
        raise no_rate(given, learning_rate, iteration, owner) from None


def no_rate(given: object, learning_rate: float | Schedule, iteration: int, owner: str) -> TypeError:
    """Local. The error for a value that is no learning rate; `given` is its description, the others as in `rate_at`."""
    source = f"its schedule {learning_rate!r} at step {iteration}" if callable(learning_rate) else "`learning_rate`"
    return TypeError(f"{owner}: the learning rate must be a number, got {described(given)} from {source}")


def refused_rate(rate: float, learning_rate: float | Schedule, iteration: int, owner: str) -> ValueError:
    """Local. The error for a rate that is negative or NaN; for the arguments see `rate_at`."""
    way_out = "look at what the schedule divides by" if math.isnan(rate) else "it must not be negative"
    return ValueError(
        f"{owner}: expected a learning rate, got {rate} from {learning_rate!r} at step {iteration}: {way_out}"
    )
