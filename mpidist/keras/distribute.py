"""`distribute(model)`: the model, its optimizers, losses and seeds take part in a strategy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import keras

from mpidist.keras.backends.choice import serving
from mpidist.keras.binding import ModelBinding
from mpidist.keras.derive import binding_of, derive
from mpidist.keras.parts.metric import take_metric
from mpidist.keras.parts.optimizer import take_optimizer
from mpidist.keras.parts.taking import take_parts
from mpidist.keras.parts.values import share_values
from mpidist.keras.served.model import serve_model
from mpidist.keras.served.tables import is_table, take_table
from mpidist.keras.training.callbacks import variables_of
from mpidist.keras.training.model import DistributedModel
from mpidist.strategy.central_storage import CentralStorageStrategy
from mpidist.strategy.chosen import chosen_strategy
from mpidist.strategy.default import DefaultStrategy
from mpidist.strategy.mirrored import MirroredStrategy
from mpidist.strategy.multi_worker import MultiWorkerMirroredStrategy
from mpidist.strategy.one_device import OneDeviceStrategy
from mpidist.strategy.parameter_server.strategy import ParameterServerStrategy
from mpidist.strategy.tpu.strategy import TPUStrategy

if TYPE_CHECKING:
    from mpidist.strategy.base import Strategy

M = TypeVar("M")

_TAKEN = (
    OneDeviceStrategy, MirroredStrategy, MultiWorkerMirroredStrategy,
    CentralStorageStrategy, DefaultStrategy,
)


def distribute(model: M, strategy: Strategy | None = None) -> M:
    """Collective. Distribute a Keras model over the replicas of a strategy: `fit` then trains one model on all ranks.

    The model stays the same object, and so do its optimizers and losses: their classes become derived ones of the same
    name. Batch sizes are global. It may be called before or after `compile` and building, and again; all ranks get the
    first one's weights. An optimizer or a metric of a loop of one's own is distributed likewise.

    Args:
        model: A `keras.Model`, a `keras.optimizers.Optimizer` or a `keras.metrics.Metric`.
        strategy: Default: that of the scope, else the only open one.

    Returns:
        `model`.

    Raises:
        TypeError: `model` is something else.
        ValueError: There is no strategy, or several; the model belongs to another strategy, or something of it cannot
            be distributed, for instance a metric whose state is no sum.
    """
    chosen = chosen_strategy(strategy, "mpidist.keras.distribute")
    if not isinstance(model, (keras.Model, keras.optimizers.Optimizer, keras.metrics.Metric)):
        raise TypeError(
            "mpidist.keras.distribute: expected a keras.Model, a keras.optimizers.Optimizer or a keras.metrics.Metric, "
            f"got {type(model).__name__}"
        )
    if isinstance(chosen, ParameterServerStrategy):
        return serve(model, chosen)
    require_plain_replicas(chosen)
    before = binding_of(model)
    binding = before if before is not None and before.strategy is chosen else ModelBinding(chosen)
    if isinstance(model, keras.Model):
        _distribute_model(model, binding)
    elif isinstance(model, keras.optimizers.Optimizer):
        take_optimizer(model, binding)
        if model.built:
            share_values(binding, list(model.variables), "the variables of the optimizer")
    else:
        take_metric(model, binding)
    return model


def serve(thing: M, strategy: ParameterServerStrategy) -> M:
    """Local. Put the variables of the chief's model on the servers; an optimizer or a metric stays as it is.

    Args:
        thing: A model; or a layer, whose table is put there if it is Keras's `Embedding`.
        strategy: The strategy.

    Raises:
        ValueError: See `distribute`.
    """
    before = binding_of(thing)
    binding = before if before is not None and before.strategy is strategy else ModelBinding(strategy)
    if isinstance(thing, keras.Model):
        serve_model(thing, binding)
    elif isinstance(thing, keras.layers.Embedding) and is_table(thing):
        take_table(thing, binding)
    return thing


def _distribute_model(model: Any, binding: ModelBinding) -> None:
    def take() -> list[Any]:
        derive(model, DistributedModel, binding)
        take_parts(model, binding)
        model.train_function = model.test_function = model.predict_function = None
        return [(one.path, tuple(one.shape)) for one in variables_of(model)] if model.built else []

    serving.share_cores(binding)
    binding.together("the model", take, lambda shapes: [shape for _, shape in shapes])
    if model.built:
        share_values(binding, variables_of(model), "the variables of the model")


def require_plain_replicas(strategy: Strategy) -> None:
    """Local. Raise ValueError where a replica is several ranks, where groups differ, or where variables are served."""
    if isinstance(strategy, TPUStrategy):
        devices = strategy.device_assignment.num_cores_per_replica
        if devices > 1:
            raise ValueError(
                f"mpidist.keras.distribute: expected one logical device for each replica, got {devices}. A Keras model "
                "is not cut over devices; mpidist.parallel has layers that are"
            )
    elif not isinstance(strategy, _TAKEN):
        raise ValueError(
            "mpidist.keras.distribute: expected a strategy whose replicas train together, got "
            f"{type(strategy).__name__}. Use MultiWorkerMirroredStrategy()"
        )
