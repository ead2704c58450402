"""Adam, and AdamW with decoupled weight decay.

Kingma and Ba, "Adam: a method for stochastic optimization", 2015; Loshchilov and Hutter, "Decoupled weight decay
regularization", 2019; AMSGrad: Reddi, Kale and Kumar, "On the convergence of Adam and beyond", 2018.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from mpidist.arguments import flag
from mpidist.arrays import AnyArray
from mpidist.optimizers.optimizer import Optimizer
from mpidist.variables.update.kernel import Schedule, Update, fraction, positive

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from mpidist.variables.update.options import OptionKeywords, OptionKeywordsButDecay


@dataclass(frozen=True)
class AdamKernel:
    """First and second moments with bias correction.

    The first slot holds the first moment divided by `1 - beta_1`, that is the plain sum over `beta_1**k` times older
    gradients: the same arithmetic in fewer passes over memory. The second moment is held as it is, and gradients are
    scaled before they are squared: the sum of squares would overflow at gradients of a thirtieth of the size.

    Attributes:
        beta_1: Decay of the first moment.
        beta_2: Decay of the second moment.
        epsilon: Added to the denominator.
        weight_decay: Fraction that the parameter loses per step, times the learning rate.
        amsgrad: Divide by the root of the largest second moment so far.
        has_epsilon_hat: Whether epsilon is added to the root of the uncorrected second moment, as in the faster form of
            the paper's section 2, where it is called epsilon hat; and in Keras.
    """

    beta_1: float
    beta_2: float
    epsilon: float
    weight_decay: float = 0.0
    amsgrad: bool = False
    has_epsilon_hat: bool = False

    # The update overwrites the gradient instead.
    scratch_count: ClassVar[int] = 0

    @property
    def slots(self) -> Mapping[str, float]:
        """Local. The decayed sum of gradients, the mean of squares, and with `amsgrad` the largest of the latter."""
        return {"gradient_sum": 0.0, "velocity": 0.0, **({"largest_velocity": 0.0} if self.amsgrad else {})}

    @property
    def older_slots(self) -> Mapping[str, tuple[str, float]]:
        """Local. See `saving.renewed`: checkpoints once held the sum of squares."""
        return {
            "velocity": ("square_sum", 1 - self.beta_2), "largest_velocity": ("largest_square_sum", 1 - self.beta_2)
        }

    def prepare(self, step: int, learning_rate: float) -> Update:
        """Local. See `Kernel.prepare`."""
        # p -= rate * m^ / (sqrt(v^) + epsilon), with both corrections and the scale of a slot moved out of the loop.
        root = math.sqrt(1 / (1 - self.beta_2**step))
        rate = learning_rate * (1 - self.beta_1) / (1 - self.beta_1**step) / root
        epsilon = self.epsilon if self.has_epsilon_hat else self.epsilon / root
        keep = 1 - learning_rate * self.weight_decay
        scale = math.sqrt(1 - self.beta_2)

        def update(
            parameter: AnyArray, gradient: AnyArray, slots: Sequence[AnyArray], _scratch: Sequence[AnyArray]
        ) -> None:
            gradients, squares = slots[0], slots[1]
            np.multiply(gradients, self.beta_1, out=gradients)
            np.add(gradients, gradient, out=gradients)
            np.multiply(squares, self.beta_2, out=squares)
            np.multiply(gradient, scale, out=gradient)
            np.multiply(gradient, gradient, out=gradient)
            np.add(squares, gradient, out=squares)
            if self.amsgrad:
                np.maximum(slots[2], squares, out=slots[2])
            np.sqrt(slots[-1], out=gradient)
            np.add(gradient, epsilon, out=gradient)
            np.divide(gradients, gradient, out=gradient)
            np.multiply(gradient, rate, out=gradient)
            if self.weight_decay:
                np.multiply(parameter, keep, out=parameter)
            np.subtract(parameter, gradient, out=parameter)

        return update


def Adam(
    learning_rate: float | Schedule = 0.001,
    beta_1: float = 0.9,
    beta_2: float = 0.999,
    epsilon: float = 1e-7,
    amsgrad: bool = False,
    *,
    name: str = "Adam",
    **options: Unpack[OptionKeywords],
) -> Optimizer:
    """Local. Make an Adam optimizer (Kingma and Ba 2015; AMSGrad: Reddi, Kale and Kumar 2018).

    `epsilon` is added to the root of the corrected second moment, as in the paper's algorithm and in PyTorch. Keras
    adds it to the uncorrected root: there `epsilon * sqrt(1 - beta_2**step)` does what `epsilon` does here.

    Args:
        learning_rate: A number or a schedule.
        beta_1: Decay of the first moment, below 1.
        beta_2: Decay of the second moment, below 1.
        epsilon: Added to the denominator.
        amsgrad: Divide by the root of the largest second moment so far, which another slot keeps.
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
    flag("amsgrad", amsgrad)
    return Optimizer(AdamKernel(beta_1, beta_2, epsilon, amsgrad=amsgrad), learning_rate, name=name, **options)


def AdamW(
    learning_rate: float | Schedule = 0.001,
    weight_decay: float = 0.004,
    beta_1: float = 0.9,
    beta_2: float = 0.999,
    epsilon: float = 1e-7,
    amsgrad: bool = False,
    *,
    name: str = "AdamW",
    **options: Unpack[OptionKeywordsButDecay],
) -> Optimizer:
    """Local. Make an Adam optimizer with decoupled weight decay (Loshchilov and Hutter 2019); see `Adam` for `epsilon`.

    Args:
        learning_rate: A number or a schedule.
        weight_decay: In each step every parameter loses `learning_rate * weight_decay` of itself.
        beta_1: Decay of the first moment, below 1.
        beta_2: Decay of the second moment, below 1.
        epsilon: Added to the denominator.
        amsgrad: Divide by the root of the largest second moment so far, which another slot keeps.
        name: A name for the texts of errors.
        options: The options of every optimizer; see `OptimizerOptions`.

    Returns:
        The optimizer.

    Raises:
        ValueError: A hyperparameter is out of range.
        TypeError: A hyperparameter is no number, or an argument does not exist.
    """
    fraction(beta_1=beta_1, beta_2=beta_2)
    positive(epsilon=epsilon, weight_decay=weight_decay)
    flag("amsgrad", amsgrad)
    kernel = AdamKernel(beta_1, beta_2, epsilon, weight_decay, amsgrad)
    return Optimizer(kernel, learning_rate, name=name, **options)
