"""Refusals of `fit` under parameter servers, before anything is sent."""

from __future__ import annotations

from typing import Any

import keras

from mpidist.keras.derive import plain_class
from mpidist.keras.input.creator import DatasetCreator
from mpidist.keras.parts.metric import require_sums
from mpidist.keras.private import layers_of

_WHERE = "under ParameterServerStrategy"
_OWN_STEPS = (
    "train_step", "test_step", "make_train_function", "make_test_function", "compile", "compute_loss_and_updates",
)


def require_creator(method: str, x: Any, steps: Any, name: str, given: dict[str, Any]) -> None:
    """Local. Raise where the input is no `DatasetCreator` alone, or nothing says how many steps there are.

    Args:
        method: The method of the model.
        x: The input of the method.
        steps: The number of steps.
        name: The name of the argument with the number of steps.
        given: Other arguments, which must not be given with a `DatasetCreator`.

    Raises:
        TypeError: It is another input.
        ValueError: The number of steps is missing, or another argument is given.
    """
    if not isinstance(x, DatasetCreator):
        raise TypeError(
            f"Model.{method} {_WHERE}: expected a mpidist.keras.utils.experimental.DatasetCreator(dataset_fn), whose "
            f"function makes each worker's dataset, got {type(x).__name__}"
        )
    wrong = [key for key, value in given.items() if value]
    if wrong:
        raise ValueError(
            f"Model.{method} {_WHERE}: expected no `{wrong[0]}` beside a DatasetCreator. Let the dataset of "
            "`dataset_fn` give batches (inputs, targets) or (inputs, targets, sample_weights)"
        )
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise ValueError(
            f"Model.{method} {_WHERE}: `{name}` must be a number of steps of at least 1, since nothing says where the "
            f"data of a DatasetCreator end, got {steps!r}"
        )


def require_servable(model: Any) -> None:
    """Local. Raise for what workers could not do, or would do otherwise in silence.

    Raises:
        ValueError: The model has such a part; the error names it.
    """
    if not model.compiled:
        raise ValueError(f"model {model.name!r}: call compile() before `fit` or `evaluate`")
    kind = plain_class(model)
    for name in _OWN_STEPS:
        if getattr(kind, name, None) is not getattr(keras.Model, name, None):
            raise ValueError(
                f"model {model.name!r}: {kind.__name__} has a `{name}` of its own, which workers do not run {_WHERE}. "
                "Leave it out, or write the loop with ClusterCoordinator(strategy).schedule"
            )
    for layer in layers_of(model):
        if isinstance(layer, (keras.layers.BatchNormalization, keras.layers.SpectralNormalization)):
            raise ValueError(
                f"layer {layer.name!r} ({type(layer).__name__}) keeps statistics that each worker would have of its "
                f"own {_WHERE}. Use LayerNormalization or GroupNormalization"
            )
    constrained = [one.path for one in model.trainable_variables if one.constraint is not None]
    if constrained:
        raise ValueError(
            f"variable {constrained[0]!r} has a constraint, which the servers do not apply {_WHERE}. Leave it out"
        )
    require_sums(model.metrics)
