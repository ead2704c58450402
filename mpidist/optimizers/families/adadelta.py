"""Adadelta: steps in the ratio of the running means of squared steps and squared gradients.

Zeiler, "ADADELTA: an adaptive learning rate method", 2012.
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
class AdadeltaKernel:
    """`d = sqrt(u + epsilon) / sqrt(v + epsilon) * g; p -= rate * d`.

    `v` and `u` are decayed means of `g**2` and `d**2`.

    Attributes:
        rho: Decay of both means.
        epsilon: Added to both before the roots.
    """

    rho: float
    epsilon: float

    slots: ClassVar[Mapping[str, float]] = {"accumulated_grad": 0.0, "accumulated_delta_var": 0.0}
    scratch_count: ClassVar[int] = 1

    def prepare(self, _step: int, learning_rate: float) -> Update:
        """Local. See `Kernel.prepare`."""

        def update(
            parameter: AnyArray, gradient: AnyArray, slots: Sequence[AnyArray], scratch: Sequence[AnyArray]
        ) -> None:
            squares, steps, block = slots[0], slots[1], scratch[0]
            np.multiply(squares, self.rho, out=squares)
            # In this order, which overflows as late as the mean itself.
            np.multiply(gradient, 1 - self.rho, out=block)
            np.multiply(block, gradient, out=block)
            np.add(squares, block, out=squares)
            np.add(squares, self.epsilon, out=block)
            np.sqrt(block, out=block)
            np.divide(gradient, block, out=gradient)
            np.add(steps, self.epsilon, out=block)
            np.sqrt(block, out=block)
            np.multiply(gradient, block, out=gradient)
            np.multiply(steps, self.rho, out=steps)
            np.multiply(gradient, gradient, out=block)
            np.multiply(block, 1 - self.rho, out=block)
            np.add(steps, block, out=steps)
            np.multiply(gradient, learning_rate, out=gradient)
            np.subtract(parameter, gradient, out=parameter)

        return update


def Adadelta(
    learning_rate: float | Schedule = 0.001,
    rho: float = 0.95,
    epsilon: float = 1e-7,
    *,
    name: str = "Adadelta",
    **options: Unpack[OptionKeywords],
) -> Optimizer:
    """Local. Make an Adadelta optimizer (Zeiler 2012). The paper uses a rate of 1.

    Args:
        learning_rate: A number or a schedule.
        rho: Decay of both means, below 1.
        epsilon: Added before the roots are taken, above 0.
        name: A name for the texts of errors.
        options: The options of every optimizer; see `OptimizerOptions`.

    Returns:
        The optimizer.

    Raises:
        ValueError: A hyperparameter is out of range.
        TypeError: A hyperparameter is no number, or an argument does not exist.
    """
    fraction(rho=rho)
    positive(epsilon=epsilon)
    if not epsilon > 0:
        raise ValueError(f"`epsilon` must be above 0, got {epsilon!r}: the first step would divide by 0")
    return Optimizer(AdadeltaKernel(rho, epsilon), learning_rate, name=name, **options)
