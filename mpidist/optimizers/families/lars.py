"""LARS: momentum whose rate is in proportion to each variable's norm over its gradient's.

You, Gitman and Ginsburg, "Large batch training of convolutional networks", 2017, algorithm 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from mpidist.arguments import flag
from mpidist.arrays import AnyArray
from mpidist.optimizers.optimizer import Optimizer
from mpidist.variables.update.kernel import LayerKernel, Schedule, Update, positive, share

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from mpidist.variables.update.options import OptionKeywords


@dataclass(frozen=True)
class LARSKernel(LayerKernel):
    """`r = eeta * |p| / (|g| + decay * |p|); m = momentum * m + rate * r * (g + decay * p); p -= m`.

    The ratio `r` is 1 where a norm is 0.

    Attributes:
        momentum: 0 needs no state.
        weight_decay_rate: `decay` above.
        eeta: The trust coefficient.
        nesterov: `p -= momentum * m + rate * r * (g + decay * p)` instead.
    """

    momentum: float
    weight_decay_rate: float
    eeta: float
    nesterov: bool

    # For the decay and for Nesterov's step ahead.
    scratch_count: ClassVar[int] = 1

    @property
    def slots(self) -> Mapping[str, float]:
        """Local. The momentum, if any."""
        return {"momentum": 0.0} if self.momentum else {}

    def direct(self, _step: int) -> Update | None:
        """Local. See `LayerKernel.direct`."""
        return None

    def prepare(self, _step: int, learning_rate: float, parameter_norm: float, direction_norm: float) -> Update:
        """Local. See `LayerKernel.prepare`."""
        decay = self.weight_decay_rate
        ratio = 1.0
        if parameter_norm > 0 and direction_norm > 0:
            ratio = self.eeta * parameter_norm / (direction_norm + decay * parameter_norm)

        def update(
            parameter: AnyArray, gradient: AnyArray, slots: Sequence[AnyArray], scratch: Sequence[AnyArray]
        ) -> None:
            block = scratch[0]
            if decay:
                np.multiply(parameter, decay, out=block)
                np.add(gradient, block, out=gradient)
            np.multiply(gradient, ratio * learning_rate, out=gradient)
            if self.momentum:
                velocity = slots[0]
                np.multiply(velocity, self.momentum, out=velocity)
                np.add(velocity, gradient, out=velocity)
                if self.nesterov:
                    np.multiply(velocity, self.momentum, out=block)
                    np.add(gradient, block, out=gradient)
                else:
                    np.copyto(gradient, velocity)
            np.subtract(parameter, gradient, out=parameter)

        return update


def LARS(
    learning_rate: float | Schedule = 0.01,
    momentum: float = 0.9,
    weight_decay_rate: float = 0.0,
    eeta: float = 0.001,
    nesterov: bool = False,
    *,
    name: str = "LARS",
    **options: Unpack[OptionKeywords],
) -> Optimizer:
    """Local. Make a LARS optimizer (You, Gitman and Ginsburg 2017), with the arguments of TensorFlow's model garden.

    Args:
        learning_rate: A number or a schedule.
        momentum: The momentum of the steps, 0 to 1.
        weight_decay_rate: Enters the gradient and the ratio of norms; `weight_decay` is decoupled from both.
        eeta: The trust coefficient: the length of a variable's step as a fraction of the variable's norm.
        nesterov: Nesterov momentum; needs `momentum`.
        name: A name for the texts of errors.
        options: The options of every optimizer; see `OptimizerOptions`.

    Returns:
        The optimizer.

    Raises:
        ValueError: A hyperparameter is out of range.
        TypeError: A hyperparameter is no number, or an argument does not exist.
    """
    share(momentum=momentum)
    positive(weight_decay_rate=weight_decay_rate, eeta=eeta)
    if flag("nesterov", nesterov) and not momentum:
        raise ValueError("`nesterov=True` needs a `momentum` above 0")
    return Optimizer(LARSKernel(momentum, weight_decay_rate, eeta, nesterov), learning_rate, name=name, **options)
