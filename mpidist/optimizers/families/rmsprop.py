"""RMSprop: steps divided by the root of a running mean of squared gradients.

Tieleman and Hinton, lecture 6.5 of "Neural networks for machine learning", 2012; centered: Graves, "Generating
sequences with recurrent neural networks", 2013.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from mpidist.arguments import flag
from mpidist.arrays import AnyArray
from mpidist.optimizers.optimizer import Optimizer
from mpidist.variables.update.kernel import Schedule, Update, fraction, positive, share

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from mpidist.variables.update.options import OptionKeywords


@dataclass(frozen=True)
class RMSpropKernel:
    """`v = rho * v + (1 - rho) * g**2; p -= rate * g / (sqrt(v) + epsilon)`.

    With momentum `m = momentum * m + rate * g / (sqrt(v) + epsilon); p -= m`, as in Keras.

    Attributes:
        rho: Decay of the mean of squares.
        momentum: The momentum of the steps; 0 needs no state.
        epsilon: Added to the root.
        centered: Subtract the square of the mean gradient from the mean of squares.
        is_under_root: Whether epsilon is added before the root is taken, as in Keras.
    """

    rho: float
    momentum: float
    epsilon: float
    centered: bool
    is_under_root: bool = False

    # For the denominator.
    scratch_count: ClassVar[int] = 1

    @property
    def slots(self) -> Mapping[str, float]:
        """Local. The mean of squares, and the slots of momentum and centering."""
        return {
            "velocity": 0.0,
            **({"momentum": 0.0} if self.momentum else {}),
            **({"average_gradient": 0.0} if self.centered else {}),
        }

    def prepare(self, _step: int, learning_rate: float) -> Update:
        """Local. See `Kernel.prepare`."""

        def update(
            parameter: AnyArray, gradient: AnyArray, slots: Sequence[AnyArray], scratch: Sequence[AnyArray]
        ) -> None:
            square, root = slots[0], scratch[0]
            np.multiply(square, self.rho, out=square)
            # In this order, which overflows as late as the mean itself.
            np.multiply(gradient, 1 - self.rho, out=root)
            np.multiply(root, gradient, out=root)
            np.add(square, root, out=square)
            if self.centered:
                mean = slots[-1]
                # mean += (1 - rho) * (g - mean), without a second block.
                np.multiply(mean, self.rho, out=mean)
                np.multiply(gradient, 1 - self.rho, out=root)
                np.add(mean, root, out=mean)
                np.multiply(mean, mean, out=root)
                np.subtract(square, root, out=root)
                # Rounding may leave a variance just below zero.
                np.maximum(root, 0, out=root)
            if self.is_under_root:
                np.add(root if self.centered else square, self.epsilon, out=root)
                np.sqrt(root, out=root)
            else:
                np.sqrt(root if self.centered else square, out=root)
                np.add(root, self.epsilon, out=root)
            np.divide(gradient, root, out=gradient)
            np.multiply(gradient, learning_rate, out=gradient)
            if self.momentum:
                velocity = slots[1]
                np.multiply(velocity, self.momentum, out=velocity)
                np.add(velocity, gradient, out=velocity)
                np.subtract(parameter, velocity, out=parameter)
            else:
                np.subtract(parameter, gradient, out=parameter)

        return update


def RMSprop(
    learning_rate: float | Schedule = 0.001,
    rho: float = 0.9,
    momentum: float = 0.0,
    epsilon: float = 1e-7,
    centered: bool = False,
    *,
    name: str = "RMSprop",
    **options: Unpack[OptionKeywords],
) -> Optimizer:
    """Local. Make an RMSprop optimizer (Tieleman and Hinton 2012; centered: Graves 2013).

    `epsilon` is added to the root, as in PyTorch; Keras 3 takes the root of the sum. The two differ where squares are
    not large against `epsilon`.

    Args:
        learning_rate: A number or a schedule.
        rho: Decay of the mean of squares, below 1.
        momentum: The momentum of the steps, 0 to 1.
        epsilon: Added to the root.
        centered: Divide by the deviation instead: another mean is kept.
        name: A name for the texts of errors.
        options: The options of every optimizer; see `OptimizerOptions`.

    Returns:
        The optimizer.

    Raises:
        ValueError: A hyperparameter is out of range.
        TypeError: A hyperparameter is no number, or an argument does not exist.
    """
    fraction(rho=rho)
    share(momentum=momentum)
    positive(epsilon=epsilon)
    flag("centered", centered)
    return Optimizer(RMSpropKernel(rho, momentum, epsilon, centered), learning_rate, name=name, **options)
