"""Stochastic gradient descent, with momentum and Nesterov's form of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mpidist.arguments import flag
from mpidist.arrays import AnyArray
from mpidist.optimizers.optimizer import Optimizer
from mpidist.variables.update.kernel import Schedule, Update, share

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from mpidist.variables.update.options import OptionKeywords


@dataclass(frozen=True)
class SGDKernel:
    """`m = momentum * m + rate * g; p -= m`; Nesterov: `p -= momentum * m + rate * g`, as in Keras.

    The momentum contains the rate, so that a change of the rate does not change earlier steps. PyTorch applies the
    present rate to the whole momentum. With a constant rate both are the same.

    Attributes:
        momentum: 0 gives plain descent, without state.
        nesterov: Look ahead along the momentum.
    """

    momentum: float = 0.0
    nesterov: bool = False

    @property
    def slots(self) -> Mapping[str, float]:
        """Local. The momentum, if any."""
        return {"momentum": 0.0} if self.momentum else {}

    @property
    def scratch_count(self) -> int:
        """Local. One block for Nesterov's step ahead."""
        return 1 if self.nesterov else 0

    def prepare(self, _step: int, learning_rate: float) -> Update:
        """Local. See `Kernel.prepare`."""

        def update(
            parameter: AnyArray, gradient: AnyArray, slots: Sequence[AnyArray], scratch: Sequence[AnyArray]
        ) -> None:
            np.multiply(gradient, learning_rate, out=gradient)
            if not self.momentum:
                np.subtract(parameter, gradient, out=parameter)
                return
            velocity = slots[0]
            np.multiply(velocity, self.momentum, out=velocity)
            np.add(velocity, gradient, out=velocity)
            if self.nesterov:
                np.multiply(velocity, self.momentum, out=scratch[0])
                np.add(gradient, scratch[0], out=gradient)
                np.subtract(parameter, gradient, out=parameter)
            else:
                np.subtract(parameter, velocity, out=parameter)

        return update


def SGD(
    learning_rate: float | Schedule = 0.01,
    momentum: float = 0.0,
    nesterov: bool = False,
    *,
    name: str = "SGD",
    **options: Unpack[OptionKeywords],
) -> Optimizer:
    """Local. Make an optimizer of gradient descent with momentum: `m = momentum * m + rate * g; p -= m`, as in Keras.

    Args:
        learning_rate: A number or a schedule.
        momentum: 0 to 1.
        nesterov: Nesterov momentum, `p -= momentum * m + rate * g`; needs `momentum`.
        name: A name for the texts of errors.
        options: The options of every optimizer; see `OptimizerOptions`.

    Returns:
        The optimizer.

    Raises:
        ValueError: A negative rate, a momentum out of range, or Nesterov without momentum.
        TypeError: A hyperparameter is no number, or an argument does not exist.
    """
    share(momentum=momentum)
    if flag("nesterov", nesterov) and not momentum:
        raise ValueError("`nesterov=True` needs a `momentum` above 0")
    return Optimizer(SGDKernel(momentum, nesterov), learning_rate, name=name, **options)
