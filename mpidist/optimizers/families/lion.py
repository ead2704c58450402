"""Lion: the sign of a momentum, a step of the same size for every element.

Chen and others, "Symbolic discovery of optimization algorithms", 2023.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from mpidist.arrays import AnyArray
from mpidist.optimizers.optimizer import Optimizer
from mpidist.variables.update.kernel import Schedule, Update, fraction

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from mpidist.variables.update.options import OptionKeywords


@dataclass(frozen=True)
class LionKernel:
    """`p -= rate * sign(beta_1 * m + (1 - beta_1) * g); m = beta_2 * m + (1 - beta_2) * g`.

    Attributes:
        beta_1: Weight of the momentum in the step.
        beta_2: Decay of the momentum.
    """

    beta_1: float
    beta_2: float

    slots: ClassVar[Mapping[str, float]] = {"momentum": 0.0}
    # For the step.
    scratch_count: ClassVar[int] = 1

    def prepare(self, _step: int, learning_rate: float) -> Update:
        """Local. See `Kernel.prepare`."""

        def update(
            parameter: AnyArray, gradient: AnyArray, slots: Sequence[AnyArray], scratch: Sequence[AnyArray]
        ) -> None:
            momentum, direction = slots[0], scratch[0]
            np.subtract(momentum, gradient, out=direction)
            np.multiply(direction, self.beta_1, out=direction)
            np.add(direction, gradient, out=direction)
            np.sign(direction, out=direction)
            np.multiply(direction, learning_rate, out=direction)
            np.subtract(parameter, direction, out=parameter)
            np.multiply(momentum, self.beta_2, out=momentum)
            np.multiply(gradient, 1 - self.beta_2, out=gradient)
            np.add(momentum, gradient, out=momentum)

        return update


def Lion(
    learning_rate: float | Schedule = 0.001,
    beta_1: float = 0.9,
    beta_2: float = 0.99,
    *,
    name: str = "Lion",
    **options: Unpack[OptionKeywords],
) -> Optimizer:
    """Local. Make a Lion optimizer (Chen and others 2023).

    Args:
        learning_rate: A number or a schedule.
        beta_1: Weight of the momentum in the step, below 1.
        beta_2: Decay of the momentum, below 1.
        name: A name for the texts of errors.
        options: The options of every optimizer; see `OptimizerOptions`.

    Returns:
        The optimizer.

    Raises:
        ValueError: A hyperparameter is out of range.
        TypeError: A hyperparameter is no number, or an argument does not exist.
    """
    fraction(beta_1=beta_1, beta_2=beta_2)
    return Optimizer(LionKernel(beta_1, beta_2), learning_rate, name=name, **options)
