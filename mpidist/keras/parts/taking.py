"""The parts of a model that take part in distribution: optimizers, losses, seeds; and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from mpidist.keras.backends.choice import is_jax
from mpidist.keras.binding import ModelBinding
from mpidist.keras.derive import derive
from mpidist.keras.parts.loss import take_loss
from mpidist.keras.parts.metric import require_sums
from mpidist.keras.parts.optimizer import take_optimizer
from mpidist.keras.parts.seeds import DistributedSeedGenerator
from mpidist.keras.private import CompileLoss, layers_of, resolved_losses
from mpidist.options import ReduceOp

_KINDS = (keras.optimizers.Optimizer, keras.losses.Loss, keras.random.SeedGenerator)


def _attributes(thing: Any) -> Iterator[Any]:
    for value in list(vars(thing).values()):
        if isinstance(value, dict):
            yield from value.values()
        elif isinstance(value, (list, tuple)):
            yield from value
        else:
            yield value


def _found(model: Any) -> list[Any]:
    # A GAN's `compile` sets optimizers that Keras's own does not know; each that is left out lets the ranks drift.
    values = (value for layer in layers_of(model) for value in _attributes(layer) if isinstance(value, _KINDS))
    return list({id(value): value for value in values}.values())


def _outermost(found: list[Any]) -> list[Any]:
    """The optimizers without those inside of others."""
    optimizers = [one for one in found if isinstance(one, keras.optimizers.Optimizer)]
    inner = {id(one.inner_optimizer) for one in optimizers if isinstance(one, keras.optimizers.LossScaleOptimizer)}
    return [one for one in optimizers if id(one) not in inner]


def optimizers_of(model: Any) -> list[Any]:
    """Local. All optimizers in the attributes of a model and of the models in it, without those inside of others."""
    return _outermost(_found(model))


def take_parts(model: Any, binding: ModelBinding) -> None:
    """Local. Distribute all parts of a model over a strategy's replicas; parts that are distributed already stay.

    Raises:
        ValueError: Something of the model cannot be distributed; the error names it.
    """
    found = _found(model)
    for optimizer in _outermost(found):
        take_optimizer(optimizer, binding)
    if binding.size > 1:
        require_known(model)
        own = [one for one in found if isinstance(one, keras.losses.Loss)]
        losses = [*own, *resolved_losses(model), *_compiled_losses(model)]
        for loss in {id(loss): loss for loss in losses}.values():
            if not isinstance(loss, CompileLoss):
                take_loss(loss, binding)
    for one in found:
        if isinstance(one, keras.random.SeedGenerator):
            derive(one, DistributedSeedGenerator, binding)


def _compiled_losses(model: Any) -> list[Any]:
    given = keras.tree.flatten(getattr(model, "loss", None))
    return [loss for loss in given if isinstance(loss, keras.losses.Loss)]


def require_known(model: Any) -> None:
    """Local. Raise ValueError for what would be wrong in silence."""
    if not is_jax() and model.compiled and model.jit_compile:
        raise ValueError(
            "jit_compile=True: torch.compile cannot trace the reduction over the replicas. Expected jit_compile=False, "
            "Keras's default for this backend"
        )
    if model.compiled:
        require_sums(model.metrics)


def merge_statistics(model: Any, binding: ModelBinding) -> None:
    """Collective. Give the moving statistics of batch normalization their mean over the replicas."""
    if binding.is_merged or binding.size == 1:
        return
    binding.is_merged = True
    variables = [
        variable for layer in layers_of(model) if isinstance(layer, keras.layers.BatchNormalization) and layer.built
        for variable in (layer.moving_mean, layer.moving_variance)
    ]
    if not variables:
        return
    own = [np.array(keras.ops.convert_to_numpy(variable)) for variable in variables]
    means = binding.extended.all_reduce(ReduceOp.MEAN, own, name="moving statistics")
    for variable, mean in zip(variables, means, strict=True):
        variable.assign(mean)
