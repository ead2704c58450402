"""Optimizers of a distributed model: gradients are combined over the replicas before anything else is done to them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import keras

from mpidist.keras.backends.choice import serving
from mpidist.keras.binding import ModelBinding
from mpidist.keras.derive import binding_of, derive
from mpidist.keras.parts.values import share_values

if TYPE_CHECKING:
    from keras.optimizers import Optimizer as _Optimizer
else:
    _Optimizer = object


def _reduce(optimizer: Any, gradients: Any, method: str) -> list[Any]:
    given: list[Any] = list(gradients)
    binding = binding_of(optimizer)
    if binding is None or binding.size == 1:
        return given
    step = binding.step()
    if step is None:
        binding.require_run(f"`{method}`")
    is_weighed = step is not None and id(optimizer) in step.weighed
    reduced: list[Any] = serving.reduce_gradients(binding, given, step, is_weighed=is_weighed)
    return reduced


class DistributedOptimizer(_Optimizer):  # type: ignore[misc]
    """An optimizer whose gradients are those of all replicas: before clipping, decay and accumulation."""

    def build(self, variables: Any) -> None:
        """Collective. As in Keras; the variables get the values of the first replica."""
        super().build(variables)
        share_values(binding_of(self), list(variables), "the variables of an optimizer")

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Collective. As in Keras, with the gradients of all replicas.

        In a step of `fit` it is their mean, weighted by the replicas' rows; in `strategy.run` it is their sum.

        Raises:
            RuntimeError: The call is outside of both.
        """
        super().apply(_reduce(self, grads, "apply"), trainable_variables)


class DistributedLossScaleOptimizer(DistributedOptimizer):
    """A `LossScaleOptimizer` whose check for finite gradients sees those of all replicas, so that all ranks agree."""

    def scale_loss(self, loss: Any) -> Any:
        """Collective in a step of `fit`. As in Keras, times this replica's part of the rows.

        Weights on gradients, instead, come after float16 has rounded them, with other factors than on one rank: one
        sign among rounding errors changed there moves Adam by twice its learning rate.
        """
        loss, binding = super().scale_loss(loss), binding_of(self)
        step = None if binding is None or binding.size == 1 else binding.step()
        if step is None or not step.is_training:
            return loss
        rows = keras.ops.cast(keras.ops.convert_to_tensor(step.rows), "float32")
        total = serving.sum_small(step, keras.ops.reshape(rows, (1,)))[0]
        step.weighed.add(id(self))
        return loss * keras.ops.stop_gradient(keras.ops.cast(keras.ops.divide_no_nan(rows, total), loss.dtype))

    def stateless_apply(self, optimizer_variables: Any, grads: Any, trainable_variables: Any) -> Any:
        """Collective. As in Keras, with the gradients of all replicas."""
        grads = _reduce(self, grads, "stateless_apply")
        return super().stateless_apply(optimizer_variables, grads, trainable_variables)


def take_optimizer(optimizer: Any, binding: ModelBinding) -> None:
    """Local. Distribute an optimizer over the strategy's replicas.

    Raises:
        ValueError: It belongs to another strategy.
    """
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        derive(optimizer, DistributedLossScaleOptimizer, binding)
    else:
        derive(optimizer, DistributedOptimizer, binding)
