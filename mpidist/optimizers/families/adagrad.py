"""Adagrad: steps divided by the root of the sum of all squared gradients.

Duchi, Hazan and Singer, "Adaptive subgradient methods for online learning and stochastic optimization", 2011.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from mpidist.arrays import AnyArray
from mpidist.optimizers.optimizer import Optimizer
from mpidist.variables.update.kernel import Schedule, Update, positive

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from mpidist.variables.update.options import OptionKeywords


@dataclass(frozen=True)
class AdagradKernel:
    """`a += g**2; p -= rate * g / (sqrt(a) + epsilon)`.

    Attributes:
        initial_accumulator_value: The initial value of `a`.
        epsilon: Added to the root.
    """

    initial_accumulator_value: float
    epsilon: float

    # For the denominator.
    scratch_count: ClassVar[int] = 1

    @property
    def slots(self) -> Mapping[str, float]:
        """Local. The sum of squares."""
        return {"accumulator": self.initial_accumulator_value}

    def prepare(self, _step: int, learning_rate: float) -> Update:
        """Local. See `Kernel.prepare`."""

        def update(
            parameter: AnyArray, gradient: AnyArray, slots: Sequence[AnyArray], scratch: Sequence[AnyArray]
        ) -> None:
            total, root = slots[0], scratch[0]
            np.multiply(gradient, gradient, out=root)
            np.add(total, root, out=total)
            np.sqrt(total, out=root)
            np.add(root, self.epsilon, out=root)
            np.multiply(gradient, learning_rate, out=gradient)
            np.divide(gradient, root, out=gradient)
            np.subtract(parameter, gradient, out=parameter)

        return update


def Adagrad(
    learning_rate: float | Schedule = 0.001,
    initial_accumulator_value: float = 0.1,
    epsilon: float = 1e-7,
    *,
    name: str = "Adagrad",
    **options: Unpack[OptionKeywords],
) -> Optimizer:
    """Local. Make an Adagrad optimizer (Duchi, Hazan and Singer 2011).

    `epsilon` is added to the root, as in PyTorch; Keras 3 takes the root of the sum. The two differ where squares are
    not large against `epsilon`.

    Args:
        learning_rate: A number or a schedule.
        initial_accumulator_value: The initial value of the sums of squares.
        epsilon: Added to the root; must not be 0 where the sums begin with 0.
        name: A name for the texts of errors.
        options: The options of every optimizer; see `OptimizerOptions`.

    Returns:
        The optimizer.

    Raises:
        ValueError: A hyperparameter is out of range.
        TypeError: A hyperparameter is no number, or an argument does not exist.
    """
    positive(initial_accumulator_value=initial_accumulator_value, epsilon=epsilon)
    if not initial_accumulator_value and not epsilon:
        raise ValueError("`initial_accumulator_value` and `epsilon` must not both be 0: an update would divide by 0")
    return Optimizer(AdagradKernel(initial_accumulator_value, epsilon), learning_rate, name=name, **options)
