"""Loss scaling keeps small gradients of half precision from vanishing, and skips steps in which one overflows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mpidist.arguments import described, whole
from mpidist.arrays import AnyArray
from mpidist.attributes import FixedAttributes
from mpidist.errors import CheckpointError
from mpidist.missing import Missing
from mpidist.optimizers.optimizer import Optimizer
from mpidist.variables.update.kernel import Schedule
from mpidist.variables.variable import BaseVariable, Gradient

# Four times as much is infinite in float32.
LARGEST_SCALE = 2.0**126


class LossScaleOptimizer(FixedAttributes):
    """Local. An optimizer for the gradients of a loss that was multiplied by `scale_loss`.

    If the sum of a gradient over all replicas is not finite, every rank skips the step and halves the scale; after
    `dynamic_growth_steps` updates in a row the scale is doubled. Gradients of half precision are unscaled in float32.
    Micikevicius and others, "Mixed precision training", 2018.

    Args:
        inner_optimizer: The optimizer that applies the unscaled gradients.
        initial_scale: The first scale, above 0.
        dynamic_growth_steps: The number of updates in a row after which the scale is doubled, at least 1.
        name: A name for the texts of errors.

    Raises:
        ValueError: The scale or the number of steps is out of range.
        TypeError: `inner_optimizer` is no optimizer of this package, or another argument is no number.

    Attributes:
        dynamic_scale: The present scale, the same on every rank. Only it and `learning_rate` may be set; to set another
            attribute is an AttributeError.
    """

    minimize = Missing()
    _assignable = frozenset({"dynamic_scale", "learning_rate", "name"})
    _fixed = frozenset({"dynamic_growth_steps", "inner_optimizer"})

    def __init__(
        self,
        inner_optimizer: Optimizer,
        initial_scale: float = 2.0**15,
        dynamic_growth_steps: int = 2000,
        *,
        name: str = "LossScaleOptimizer",
    ) -> None:
        if not isinstance(inner_optimizer, Optimizer):
            raise TypeError(f"`inner_optimizer` must be an optimizer of mpidist, got {inner_optimizer!r}")
        if isinstance(initial_scale, bool) or not isinstance(initial_scale, (int, float, np.number)):
            raise TypeError(f"`initial_scale` must be a number, got {described(initial_scale)}")
        if not 0 < initial_scale <= LARGEST_SCALE:
            raise ValueError(f"`initial_scale` must be above 0 and at most 2**126, got {initial_scale!r}")
        self.inner_optimizer = inner_optimizer
        self.dynamic_growth_steps = whole("dynamic_growth_steps", dynamic_growth_steps, least=1)
        self.name = name
        self.dynamic_scale = float(initial_scale)
        self._smallest = min(1.0, self.dynamic_scale)
        self._good_steps = 0
        self._settle(LossScaleOptimizer)

    @property
    def iterations(self) -> int:
        """Local. The iterations of the inner optimizer, which do not count skipped steps."""
        return self.inner_optimizer.iterations

    @property
    def learning_rate(self) -> float | Schedule:
        """Local. The learning rate of the inner optimizer; it may be set."""
        return self.inner_optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, learning_rate: float | Schedule) -> None:
        self.inner_optimizer.learning_rate = learning_rate

    @property
    def variables(self) -> list[BaseVariable]:
        """Local. The state of the inner optimizer."""
        return self.inner_optimizer.variables

    def scale_loss(self, loss: npt.ArrayLike) -> AnyArray:
        """Local. Multiply the loss, or the gradient at which back-propagation starts, by the scale; its dtype stays.

        In float16 a scale above 65504 is infinite. The step is then skipped and the scale halved.

        Raises:
            TypeError: `loss` is no number, and no array of numbers.
        """
        try:
            with np.errstate(over="ignore"):
                return np.asarray(np.multiply(loss, self.dynamic_scale))
        except TypeError:
            raise TypeError(
                f"{self.name}: `loss` must be a number or an array of numbers, got {described(loss)}"
            ) from None

    def build(self, variables: Iterable[BaseVariable]) -> None:
        """Collective. See `Optimizer.build`."""
        self.inner_optimizer.build(variables)

    def gradients(self, variables: Iterable[BaseVariable]) -> tuple[AnyArray, ...]:
        """Collective at the first call, then Local. See `Optimizer.gradients`."""
        return self.inner_optimizer.gradients(variables)

    def apply_gradients(
        self, grads_and_vars: Iterable[tuple[Gradient | None, BaseVariable]], *,
        skip_gradients_aggregation: bool = False,
    ) -> None:
        """Collective. Unscale the gradients and apply them, or skip the step; see `Optimizer.apply_gradients`."""
        # The scale is adjusted within the step, so that no interrupt parts the two.
        self.inner_optimizer.apply_scaled_gradients(
            grads_and_vars, self.dynamic_scale, skip_gradients_aggregation=skip_gradients_aggregation,
            then=self._adjust,
        )

    def flush(self) -> None:
        """Collective. Apply the accumulated gradients, or skip them; see `Optimizer.flush`."""
        self.inner_optimizer.flush_scaled(then=self._adjust)

    def _adjust(self, was_applied: bool) -> None:
        if not was_applied:
            self.dynamic_scale = max(self.dynamic_scale / 2, self._smallest)
            self._good_steps = 0
            return
        self._good_steps += 1
        if self._good_steps >= self.dynamic_growth_steps:
            self.dynamic_scale = min(self.dynamic_scale * 2, LARGEST_SCALE)
            self._good_steps = 0

    def finalize_variable_values(self, variables: Iterable[BaseVariable] | None = None) -> None:
        """Collective. See `Optimizer.finalize_variable_values`."""
        self.inner_optimizer.finalize_variable_values(variables)

    @property
    def built_on(self) -> Sequence[BaseVariable]:
        """Local. See `Optimizer.built_on`."""
        return self.inner_optimizer.built_on

    @property
    def may_lack(self) -> frozenset[str]:
        """Local. See `Optimizer.may_lack`."""
        return frozenset(f"inner/{name}" for name in self.inner_optimizer.may_lack)

    def state(self) -> dict[str, Any]:
        """Local. The tree that a checkpoint stores."""
        return {
            "dynamic_scale": self.dynamic_scale, "good_steps": self._good_steps, "inner": self.inner_optimizer.state()
        }

    def load_state(self, saved: Mapping[str, Any]) -> None:
        """Collective. Set the state; see `Optimizer.load_state`.

        Raises:
            CheckpointError: The state is of another kind of optimizer.
        """
        expected = {"dynamic_scale", "good_steps", "inner"}
        if set(saved) != expected:
            raise CheckpointError(
                f"{self.name} needs {sorted(expected)}, but the checkpoint holds {sorted(saved)}: it was saved with "
                "another optimizer"
            )
        self.inner_optimizer.load_state(saved["inner"])
        self.dynamic_scale = float(saved["dynamic_scale"].numpy())
        self._good_steps = int(saved["good_steps"].numpy())

    def __repr__(self) -> str:
        return f"<{self.name} dynamic_scale={self.dynamic_scale:g} of {self.inner_optimizer!r}>"
