"""Adamax: Adam with the largest gradient in the place of the mean of squares.

Kingma and Ba, "Adam: a method for stochastic optimization", 2015, section 7.
"""

from __future__ import annotations

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


@dataclass(frozen=True)
class AdamaxKernel:
    """`u = max(beta_2 * u, |g|); p -= rate * m^ / (u + epsilon)`.

    Attributes:
        beta_1: Decay of the first moment.
        beta_2: Decay of the largest magnitude.
        epsilon: Added to the denominator.
    """

    beta_1: float
    beta_2: float
    epsilon: float

    slots: ClassVar[Mapping[str, float]] = {"momentum": 0.0, "norm": 0.0}
    scratch_count: ClassVar[int] = 1

    def prepare(self, step: int, learning_rate: float) -> Update:
        """Local. See `Kernel.prepare`."""
        rate = learning_rate / (1 - self.beta_1**step)

        def update(
            parameter: AnyArray, gradient: AnyArray, slots: Sequence[AnyArray], scratch: Sequence[AnyArray]
        ) -> None:
            momentum, norm = slots[0], slots[1]
            block = scratch[0]
            np.multiply(norm, self.beta_2, out=norm)
            np.absolute(gradient, out=block)
            np.maximum(norm, block, out=norm)
            np.multiply(momentum, self.beta_1, out=momentum)
            np.multiply(gradient, 1 - self.beta_1, out=gradient)
            np.add(momentum, gradient, out=momentum)
            np.add(norm, self.epsilon, out=block)
            np.divide(momentum, block, out=block)
            np.multiply(block, rate, out=block)
            np.subtract(parameter, block, out=parameter)

        return update


def Adamax(
    learning_rate: float | Schedule = 0.001,
    beta_1: float = 0.9,
    beta_2: float = 0.999,
    epsilon: float = 1e-7,
    *,
    name: str = "Adamax",
    **options: Unpack[OptionKeywords],
) -> Optimizer:
    """Local. Make an Adamax optimizer (Kingma and Ba 2015, section 7): Adam with a decayed maximum of `|gradient|`.

    `epsilon` is added to that magnitude when it divides, as in Keras; PyTorch adds it to each gradient's.

    Args:
        learning_rate: A number or a schedule.
        beta_1: Decay of the first moment, below 1.
        beta_2: Decay of the largest magnitude, below 1.
        epsilon: Added to the denominator, above 0.
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
    if not epsilon > 0:
        raise ValueError(f"`epsilon` must be above 0, got {epsilon!r}: without gradients a step would divide by 0")
    return Optimizer(AdamaxKernel(beta_1, beta_2, epsilon), learning_rate, name=name, **options)
