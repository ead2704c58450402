"""LAMB: Adam's direction, in steps as long as each variable's own norm.

You and others, "Large batch optimization for deep learning: training BERT in 76 minutes", 2020.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from mpidist.arrays import AnyArray
from mpidist.optimizers.optimizer import Optimizer
from mpidist.variables.update.kernel import LayerKernel, Schedule, Update, fraction, positive

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from mpidist.variables.update.options import OptionKeywords


@dataclass(frozen=True)
class LAMBKernel(LayerKernel):
    """`r = m^ / (sqrt(v^) + epsilon); p -= rate * |p| / |r| * r`, with 1 for the ratio where a norm is 0.

    Attributes:
        beta_1: Decay of the first moment.
        beta_2: Decay of the second moment.
        epsilon: Added to the root.
    """

    beta_1: float
    beta_2: float
    epsilon: float

    slots: ClassVar[Mapping[str, float]] = {"momentum": 0.0, "velocity": 0.0}
    # For the denominator.
    scratch_count: ClassVar[int] = 1

    def direct(self, step: int) -> Update | None:
        """Local. See `LayerKernel.direct`."""
        correction = 1 / (1 - self.beta_1**step)
        root_correction = 1 / math.sqrt(1 - self.beta_2**step)

        def update(
            _parameter: AnyArray, gradient: AnyArray, slots: Sequence[AnyArray], scratch: Sequence[AnyArray]
        ) -> None:
            momentum, squares = slots
            root = scratch[0]
            np.multiply(squares, self.beta_2, out=squares)
            # In this order, which overflows as late as the mean itself.
            np.multiply(gradient, 1 - self.beta_2, out=root)
            np.multiply(root, gradient, out=root)
            np.add(squares, root, out=squares)
            np.multiply(momentum, self.beta_1, out=momentum)
            np.multiply(gradient, 1 - self.beta_1, out=gradient)
            np.add(momentum, gradient, out=momentum)
            np.sqrt(squares, out=root)
            np.multiply(root, root_correction, out=root)
            np.add(root, self.epsilon, out=root)
            np.multiply(momentum, correction, out=gradient)
            np.divide(gradient, root, out=gradient)

        return update

    def prepare(self, _step: int, learning_rate: float, parameter_norm: float, direction_norm: float) -> Update:
        """Local. See `LayerKernel.prepare`."""
        ratio = parameter_norm / direction_norm if parameter_norm > 0 and direction_norm > 0 else 1.0

        def update(
            parameter: AnyArray, gradient: AnyArray, _slots: Sequence[AnyArray], _scratch: Sequence[AnyArray]
        ) -> None:
            np.multiply(gradient, ratio * learning_rate, out=gradient)
            np.subtract(parameter, gradient, out=parameter)

        return update


def LAMB(
    learning_rate: float | Schedule = 0.001,
    beta_1: float = 0.9,
    beta_2: float = 0.999,
    epsilon: float = 1e-7,
    *,
    name: str = "LAMB",
    **options: Unpack[OptionKeywords],
) -> Optimizer:
    """Local. Make a LAMB optimizer (You and others 2020).

    `weight_decay` is decoupled, as in Keras. The norm is that of the decayed variable.

    Args:
        learning_rate: A number or a schedule.
        beta_1: Decay of the first moment, below 1.
        beta_2: Decay of the second moment, below 1.
        epsilon: Added to the root.
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
    return Optimizer(LAMBKernel(beta_1, beta_2, epsilon), learning_rate, name=name, **options)
