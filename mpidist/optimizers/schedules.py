"""Learning-rate schedules: pure functions of the step, with tf.keras's names."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from mpidist.arguments import described, flag, named, number, python_numbers, whole
from mpidist.variables.update.kernel import Schedule

# More than what arithmetic of floats is wrong by, less than one step of any training.
_ROUNDING = 1e-12


@dataclass(frozen=True)
class _Stairs:
    """The arguments of the decays that have a `staircase`."""

    initial_learning_rate: float
    decay_steps: float
    decay_rate: float
    staircase: bool = False

    def __post_init__(self) -> None:
        with named(type(self).__name__):
            number("initial_learning_rate", self.initial_learning_rate, least=0)
            _check_length("decay_steps", self.decay_steps)
            number("decay_rate", self.decay_rate, least=0)
            flag("staircase", self.staircase)
        python_numbers(self)

    def _done(self, step: int) -> float:
        done = step / self.decay_steps
        return math.floor(done) if self.staircase else done


@dataclass(frozen=True)
class ExponentialDecay(_Stairs):
    """`initial_learning_rate * decay_rate ** (step / decay_steps)`.

    Attributes:
        initial_learning_rate: The rate at step 0.
        decay_steps: Number of steps in which `decay_rate` multiplies the rate once.
        decay_rate: The factor.
        staircase: Round `step / decay_steps` down.

    Raises:
        ValueError: An argument is out of range.
        TypeError: An argument is no number.
    """

    def __call__(self, step: int) -> float:
        """Local. The rate at a step."""
        rate: float = self.initial_learning_rate * self.decay_rate ** self._done(step)
        return rate


@dataclass(frozen=True)
class InverseTimeDecay(_Stairs):
    """`initial_learning_rate / (1 + decay_rate * step / decay_steps)`.

    Attributes:
        initial_learning_rate: The rate at step 0.
        decay_steps: Number of steps in which the divisor grows by `decay_rate`.
        decay_rate: The growth of the divisor.
        staircase: Round `step / decay_steps` down.

    Raises:
        ValueError: An argument is out of range.
        TypeError: An argument is no number.
    """

    def __call__(self, step: int) -> float:
        """Local. The rate at a step."""
        return self.initial_learning_rate / (1 + self.decay_rate * self._done(step))


@dataclass(frozen=True)
class PolynomialDecay:
    """A power of the steps that are left, from `initial_learning_rate` to `end_learning_rate`, then constant.

    Attributes:
        initial_learning_rate: The rate at step 0.
        decay_steps: Number of steps until the decay ends.
        end_learning_rate: The rate at the end.
        power: 1 makes a straight line.
        cycle: Begin again, instead of a constant rate: after the end the decay takes the smallest multiple of
            `decay_steps` that is not less than the step.

    Raises:
        ValueError: An argument is out of range.
        TypeError: An argument is no number.
    """

    initial_learning_rate: float
    decay_steps: float
    end_learning_rate: float = 0.0001
    power: float = 1.0
    cycle: bool = False

    def __post_init__(self) -> None:
        with named("PolynomialDecay"):
            number("initial_learning_rate", self.initial_learning_rate, least=0)
            _check_length("decay_steps", self.decay_steps)
            number("end_learning_rate", self.end_learning_rate, least=0)
            number("power", self.power, least=0)
            flag("cycle", self.cycle)
        python_numbers(self)

    def __call__(self, step: int) -> float:
        """Local. The rate at a step."""
        length = self.decay_steps * (max(1, math.ceil(step / self.decay_steps)) if self.cycle else 1)
        left: float = (1 - min(step, length) / length) ** self.power
        return (self.initial_learning_rate - self.end_learning_rate) * left + self.end_learning_rate


@dataclass(frozen=True)
class CosineDecay:
    """Half a cosine from `initial_learning_rate` to `alpha` times it, then constant; optionally a linear warmup first.

    Loshchilov and Hutter, "SGDR: stochastic gradient descent with warm restarts", 2017.

    Attributes:
        initial_learning_rate: The rate at step 0.
        decay_steps: Number of steps from the beginning of the decay to its end.
        alpha: The final rate as a fraction of that at which the decay begins.
        warmup_target: The rate at the end of a linear warmup, where the decay begins; None: there is no warmup.
        warmup_steps: Number of steps of the warmup.

    Raises:
        ValueError: An argument is out of range, or there are `warmup_steps` and no `warmup_target`.
        TypeError: An argument is no number.
    """

    initial_learning_rate: float
    decay_steps: float
    alpha: float = 0.0
    warmup_target: float | None = None
    warmup_steps: float = 0

    def __post_init__(self) -> None:
        with named("CosineDecay"):
            number("initial_learning_rate", self.initial_learning_rate, least=0)
            _check_length("decay_steps", self.decay_steps)
            number("alpha", self.alpha, least=0)
            if self.warmup_target is not None:
                number("warmup_target", self.warmup_target, least=0)
            number("warmup_steps", self.warmup_steps, least=0)
            if self.warmup_steps and self.warmup_target is None:
                raise ValueError(
                    "`warmup_steps` needs a `warmup_target`, the rate at which they end, got "
                    f"{self.warmup_steps} steps and no rate"
                )
        python_numbers(self)

    def __call__(self, step: int) -> float:
        """Local. The rate at a step."""
        first, begin = self.initial_learning_rate, self.initial_learning_rate
        if self.warmup_target is not None:
            begin = self.warmup_target
        if step < self.warmup_steps:
            return first + (begin - first) * step / self.warmup_steps
        return begin * _cosine(min(step - self.warmup_steps, self.decay_steps) / self.decay_steps, 1, self.alpha)


@dataclass(frozen=True)
class CosineDecayRestarts:
    """Half a cosine in each of many periods, which become longer and lower by constant factors.

    Loshchilov and Hutter, "SGDR: stochastic gradient descent with warm restarts", 2017.

    Attributes:
        initial_learning_rate: The rate at step 0.
        first_decay_steps: Number of steps in the first period.
        t_mul: Ratio of the length of a period to that of the previous one, at least 1.
        m_mul: Ratio of the height of a period to that of the previous one.
        alpha: The least rate as a fraction of the initial one.

    Raises:
        ValueError: An argument is out of range.
        TypeError: An argument is no number.
    """

    initial_learning_rate: float
    first_decay_steps: float
    t_mul: float = 2.0
    m_mul: float = 1.0
    alpha: float = 0.0

    def __post_init__(self) -> None:
        with named("CosineDecayRestarts"):
            number("initial_learning_rate", self.initial_learning_rate, least=0)
            _check_length("first_decay_steps", self.first_decay_steps)
            # Shorter and shorter periods would all end before some step, and leave no rate for the steps after it.
            number("t_mul", self.t_mul, least=1)
            number("m_mul", self.m_mul, least=0)
            number("alpha", self.alpha, least=0)
        python_numbers(self)

    def __call__(self, step: int) -> float:
        """Local. The rate at a step."""
        done = step / self.first_decay_steps  # in units of the first period
        restarts = self._restarts(done)
        fraction = (done - self._end(restarts)) / self.t_mul**restarts
        return self.initial_learning_rate * _cosine(fraction, self.m_mul**restarts, self.alpha)

    def _restarts(self, done: float) -> int:
        if self.t_mul == 1:
            return math.floor(done)
        count = math.floor(math.log1p(done * (self.t_mul - 1)) / math.log(self.t_mul))
        # Rounding must not put a restart one step later: periods of 1000 and 1100 steps end after 2100.
        done *= 1 + _ROUNDING
        return count + (done >= self._end(count + 1)) - (done < self._end(count))

    def _end(self, count: int) -> float:
        """The length of the first `count` periods."""
        return count if self.t_mul == 1 else (self.t_mul**count - 1) / (self.t_mul - 1)


@dataclass(frozen=True)
class PiecewiseConstantDecay:
    """One constant rate up to and including each boundary.

    Attributes:
        boundaries: Increasing steps.
        values: One more than boundaries.

    Raises:
        ValueError: `boundaries` do not increase, or a number of `values` does not fit or is out of range.
        TypeError: An argument is no number, or no list of numbers.
    """

    boundaries: tuple[float, ...]
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        with named("PiecewiseConstantDecay"):
            for name in ("boundaries", "values"):
                object.__setattr__(self, name, _numbers(name, getattr(self, name)))
            if any(first >= second for first, second in pairwise(self.boundaries)):
                raise ValueError(f"`boundaries` must increase, got {self.boundaries!r}")
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
    """A linear warmup: a straight line from 0 to the rate of another schedule during the first steps.

    Goyal et al., "Accurate, large minibatch SGD: training ImageNet in 1 hour", 2017.

    Attributes:
        warmup_steps: Length of the line.
        after: The rate, or the schedule, after the warmup; a schedule counts steps from step 0 of the training.

    Raises:
        ValueError: An argument is out of range.
        TypeError: An argument is no number, or `after` no schedule.
    """

    warmup_steps: int
    after: float | Schedule

    def __post_init__(self) -> None:
        with named("LinearWarmup"):
            whole("warmup_steps", self.warmup_steps, least=0)
            if not callable(self.after):
                with named("expected a rate, or a schedule, which is a function of the step"):
                    number("after", self.after, least=0)
        python_numbers(self)

    def __call__(self, step: int) -> float:
        """Local. The rate at a step."""
        rate = self.after(step) if callable(self.after) else self.after
        return rate * min(1.0, (step + 1) / self.warmup_steps) if self.warmup_steps else rate


def _cosine(done: float, height: float, alpha: float) -> float:
    return (1 - alpha) * height * 0.5 * (1 + math.cos(math.pi * done)) + alpha


def _check_length(argument: str, value: Any) -> None:
    if number(argument, value) <= 0:
        raise ValueError(
            f"`{argument}` must be a number of steps above 0, got {value!r}. For a constant rate give the optimizer a "
            "number instead of a schedule"
        )


def _numbers(argument: str, values: Any) -> tuple[float, ...]:
    try:
        given = tuple(values)
    except TypeError:
        raise TypeError(f"`{argument}` must be a list of numbers, got {described(values)}") from None
    for place, value in enumerate(given):
        number(f"{argument}[{place}]", value, least=0)
    return given
