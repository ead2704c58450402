"""Nadam: Adam with Nesterov momentum, whose weight grows in the first steps.

Dozat, "Incorporating Nesterov momentum into Adam", 2016; the schedule of the momentum as in Keras.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from mpidist.arrays import AnyArray
from mpidist.optimizers.optimizer import Optimizer
from mpidist.variables.update.kernel import Schedule, Update, fraction, positive

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from mpidist.variables.update.options import OptionKeywords

# From then on a further factor of `_growth` is 1 in double precision.
_LAST_GROWTH = 1000


@functools.lru_cache(maxsize=2 * _LAST_GROWTH)
def _growth(step: int) -> float:
    """The product of `1 - 0.96**i / 2` up to a step: of all steps' weights without `beta_1`."""
    return math.prod(1 - 0.5 * 0.96**number for number in range(1, step + 1))


@dataclass(frozen=True)
class NadamKernel:
    """`r = u' * m / (1 - U * u') + (1 - u) * g / (1 - U); p -= rate * r / (sqrt(v^) + epsilon)`.

    `u = beta_1 * (1 - 0.96**step / 2)` is the weight of the momentum, `u'` that of the next step, and `U` the product
    of all weights so far.

    Attributes:
        beta_1: Decay of the first moment.
        beta_2: Decay of the second moment.
        epsilon: Added to the denominator.
    """

    beta_1: float
    beta_2: float
    epsilon: float

    slots: ClassVar[Mapping[str, float]] = {"momentum": 0.0, "velocity": 0.0}
    scratch_count: ClassVar[int] = 1

    def _product(self, step: int) -> float:
        return float(self.beta_1**step * _growth(min(step, _LAST_GROWTH)))

    def prepare(self, step: int, learning_rate: float) -> Update:
        """Local. See `Kernel.prepare`."""
        weight, following = (self.beta_1 * (1 - 0.5 * 0.96**number) for number in (step, step + 1))
        of_gradient = (1 - weight) / (1 - self._product(step))
        of_momentum = following / (1 - self._product(step + 1))
        root_correction = 1 / math.sqrt(1 - self.beta_2**step)

        def update(
            parameter: AnyArray, gradient: AnyArray, slots: Sequence[AnyArray], scratch: Sequence[AnyArray]
        ) -> None:
            momentum, squares = slots[0], slots[1]
            block = scratch[0]
            np.multiply(momentum, self.beta_1, out=momentum)
            np.multiply(gradient, 1 - self.beta_1, out=block)
            np.add(momentum, block, out=momentum)
            np.multiply(squares, self.beta_2, out=squares)
            # In this order, which overflows as late as the mean itself.
            np.multiply(gradient, 1 - self.beta_2, out=block)
            np.multiply(block, gradient, out=block)
            np.add(squares, block, out=squares)
            np.multiply(gradient, of_gradient, out=gradient)
            np.multiply(momentum, of_momentum, out=block)
            np.add(gradient, block, out=gradient)
            np.sqrt(squares, out=block)
            np.multiply(block, root_correction, out=block)
            np.add(block, self.epsilon, out=block)
            np.divide(gradient, block, out=gradient)
            np.multiply(gradient, learning_rate, out=gradient)
            np.subtract(parameter, gradient, out=parameter)

        return update


def Nadam(
    learning_rate: float | Schedule = 0.001,
    beta_1: float = 0.9,
    beta_2: float = 0.999,
    epsilon: float = 1e-7,
    *,
    name: str = "Nadam",
    **options: Unpack[OptionKeywords],
) -> Optimizer:
    """Local. Make a Nadam optimizer (Dozat 2016), as in Keras; PyTorch's momentum grows more slowly.

    Args:
        learning_rate: A number or a schedule.
        beta_1: Decay of the first moment, below 1.
        beta_2: Decay of the second moment, below 1.
        epsilon: Added to the denominator.
        name: A name for the texts of errors.
        options: The options of every optimizer; see `OptimizerOptions`.

    Returns:
        The optimizer.

    Raises:
        ValueError: A hyperparameter is out of range.
        TypeError: A hyperparameter is no number, or an argument does not exist.
    """
    fraction(beta_1=beta_1, beta_2=beta_2)
    positive(epsilon=epsilon)
    return Optimizer(NadamKernel(beta_1, beta_2, epsilon), learning_rate, name=name, **options)
