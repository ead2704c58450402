"""FTRL-proximal: follow the regularized leader, which sets small weights to exactly zero.

McMahan and others, "Ad click prediction: a view from the trenches", 2013; shrinkage as in Keras.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from mpidist.arguments import number
from mpidist.arrays import AnyArray
from mpidist.optimizers.optimizer import Optimizer
from mpidist.variables.update.kernel import Schedule, Update, positive

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from mpidist.variables.update.options import OptionKeywords


@dataclass(frozen=True)
class FtrlKernel:
    """The closed form of the leader from accumulated squares `n` and a linear term `z`, as in Keras.

    `n' = n + g**2; z += g - (n'**-power - n**-power) / rate * p`, then
    `p = (clip(z, -l1, l1) - z) / (n'**-power / rate + 2 * l2)`.
    The initial value of a variable has no weight in it.

    Attributes:
        learning_rate_power: -0.5 for rates that fall as the root of the squares; 0 for a fixed one.
        initial_accumulator_value: The initial value of `n`.
        l1_regularization_strength: At least 0.
        l2_regularization_strength: At least 0.
        l2_shrinkage_regularization_strength: Adds `2 * shrinkage * p` to the gradient in `z`.
        beta: Added to `2 * l2` as `beta / rate`.
    """

    learning_rate_power: float
    initial_accumulator_value: float
    l1_regularization_strength: float
    l2_regularization_strength: float
    l2_shrinkage_regularization_strength: float
    beta: float

    scratch_count: ClassVar[int] = 2

    @property
    def slots(self) -> Mapping[str, float]:
        """Local. The squares and the linear term."""
        return {"accumulator": self.initial_accumulator_value, "linear": 0.0}

    def prepare(self, _step: int, learning_rate: float) -> Update:
        """Local. See `Kernel.prepare`."""
        if not learning_rate > 0:
            raise ValueError(f"Ftrl needs a learning rate above 0, got {learning_rate!r}")
        power = -self.learning_rate_power
        l1, l2 = self.l1_regularization_strength, 2 * self.l2_regularization_strength + self.beta / learning_rate

        def update(
            parameter: AnyArray, gradient: AnyArray, slots: Sequence[AnyArray], scratch: Sequence[AnyArray]
        ) -> None:
            squares, linear = slots
            old, new = scratch[0], scratch[1]
            np.power(squares, power, out=old)
            np.multiply(gradient, gradient, out=new)
            np.add(squares, new, out=squares)
            np.power(squares, power, out=new)
            np.subtract(new, old, out=old)
            # linear += gradient + (2 * shrinkage - (new - old) / rate) * parameter
            np.divide(old, learning_rate, out=old)
            np.subtract(2 * self.l2_shrinkage_regularization_strength, old, out=old)
            np.multiply(old, parameter, out=old)
            np.add(linear, old, out=linear)
            np.add(linear, gradient, out=linear)
            np.divide(new, learning_rate, out=new)
            np.add(new, l2, out=new)
            # Where no gradient has been accumulated yet, the numerator is zero, too.
            np.copyto(new, 1, where=new == 0)
            np.clip(linear, -l1, l1, out=old)
            np.subtract(old, linear, out=old)
            np.divide(old, new, out=parameter)

        return update


def Ftrl(  # noqa: PLR0913  # the arguments of tf.keras
    learning_rate: float | Schedule = 0.001,
    learning_rate_power: float = -0.5,
    initial_accumulator_value: float = 0.1,
    l1_regularization_strength: float = 0.0,
    l2_regularization_strength: float = 0.0,
    l2_shrinkage_regularization_strength: float = 0.0,
    beta: float = 0.0,
    *,
    name: str = "Ftrl",
    **options: Unpack[OptionKeywords],
) -> Optimizer:
    """Local. Make an FTRL-proximal optimizer (McMahan and others 2013).

    Args:
        learning_rate: A number or a schedule.
        learning_rate_power: At most 0.
        initial_accumulator_value: The initial value of the accumulated squares.
        l1_regularization_strength: At least 0.
        l2_regularization_strength: At least 0.
        l2_shrinkage_regularization_strength: At least 0; acts on the gradient alone.
        beta: At least 0.
        name: A name for the texts of errors.
        options: The options of every optimizer; see `OptimizerOptions`.

    Returns:
        The optimizer.

    Raises:
        ValueError: A hyperparameter is out of range.
        TypeError: A hyperparameter is no number, or an argument does not exist.
    """
    strengths = FtrlKernel(
        learning_rate_power, initial_accumulator_value, l1_regularization_strength, l2_regularization_strength,
        l2_shrinkage_regularization_strength, beta,
    )
    positive(**{key: value for key, value in asdict(strengths).items() if key != "learning_rate_power"})
    if number("learning_rate_power", learning_rate_power) > 0:
        raise ValueError(f"`learning_rate_power` must not be above 0, got {learning_rate_power!r}")
    return Optimizer(strengths, learning_rate, name=name, **options)
