"""Learning-rate schedules: pure functions of the step, with tf.keras's names."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass

from mpidist.variables.update.kernel import Schedule


@dataclass(frozen=True)
class ExponentialDecay:
    """`initial_learning_rate * decay_rate ** (step / decay_steps)`.

    Attributes:
        initial_learning_rate: At step 0.
        decay_steps: Number of steps in which `decay_rate` multiplies the rate once.
        decay_rate: The factor.
        staircase: Round `step / decay_steps` down.
    """

    initial_learning_rate: float
    decay_steps: int
    decay_rate: float
    staircase: bool = False

    def __call__(self, step: int) -> float:
        """Local. The rate at a step."""
        power = step / self.decay_steps
        return self.initial_learning_rate * self.decay_rate ** (math.floor(power) if self.staircase else power)


@dataclass(frozen=True)
class CosineDecay:
    """Half a cosine from `initial_learning_rate` to `alpha` times it, then constant.

    Loshchilov and Hutter, "SGDR: stochastic gradient descent with warm restarts", 2017.

    Attributes:
        initial_learning_rate: At step 0.
        decay_steps: Number of steps until the decay ends.
        alpha: The final rate as a fraction of the initial one.
    """

    initial_learning_rate: float
    decay_steps: int
    alpha: float = 0.0

    def __call__(self, step: int) -> float:
        """Local. The rate at a step."""
        done = min(step, self.decay_steps) / self.decay_steps
        cosine = 0.5 * (1 + math.cos(math.pi * done))
        return self.initial_learning_rate * ((1 - self.alpha) * cosine + self.alpha)


@dataclass(frozen=True)
class PiecewiseConstantDecay:
    """One constant rate up to and including each boundary.

    Attributes:
        boundaries: Increasing steps.
        values: One more than boundaries.
    """

    boundaries: tuple[int, ...]
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "boundaries", tuple(self.boundaries))
        object.__setattr__(self, "values", tuple(self.values))
        if len(self.values) != len(self.boundaries) + 1:
            raise ValueError(
                f"expected one more value than boundaries, got {len(self.values)} values and "
                f"{len(self.boundaries)} boundaries"
            )

    def __call__(self, step: int) -> float:
        """Local. The rate at a step."""
        return self.values[bisect_left(self.boundaries, step)]


@dataclass(frozen=True)
class LinearWarmup:
    """A straight line from 0 to the rate of another schedule during the first steps.

    Goyal et al., "Accurate, large minibatch SGD: training ImageNet in 1 hour", 2017.

    Attributes:
        warmup_steps: Length of the line.
        after: The rate, or the schedule, that is reached; a schedule counts steps from the beginning.
    """

    warmup_steps: int
    after: float | Schedule

    def __call__(self, step: int) -> float:
        """Local. The rate at a step."""
        rate = self.after(step) if callable(self.after) else self.after
        return rate * min(1.0, (step + 1) / self.warmup_steps) if self.warmup_steps else rate
