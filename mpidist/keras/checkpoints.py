"""Keras models and optimizers in checkpoints of mpidist."""

from __future__ import annotations

import json
from typing import Any

import keras
import numpy as np

from mpidist.checkpoint import register
from mpidist.keras.derive import binding_of
from mpidist.keras.parts.taking import merge_statistics

# The shapes of an optimizer's variables, as a text.
_SHAPES = "shapes"


def register_kinds() -> None:
    """Local. Let `mpidist.Checkpoint(model=model, optimizer=model.optimizer)` save and restore them."""
    register(keras.Model, _model_state, _load, group=_strategy_of)
    register(keras.optimizers.Optimizer, _optimizer_state, _load_optimizer, group=_strategy_of)


def _strategy_of(thing: Any) -> Any:
    binding = binding_of(thing)
    return None if binding is None else binding.strategy


def _named(thing: Any) -> dict[str, Any]:
    """The variables by number, and those of models by name too; the names of an optimizer's depend on the model's."""
    if not thing.built:
        raise ValueError(
            f"{thing.name!r} has no variables yet, so a checkpoint can neither save nor restore it. Build it first: "
            "model.build(shape), optimizer.build(model.trainable_variables)"
        )
    is_model = isinstance(thing, keras.Model)
    return {f"{number}_{one.name}" if is_model else str(number): one for number, one in enumerate(thing.variables)}


def _state(thing: Any) -> dict[str, Any]:
    return {name: np.array(keras.ops.convert_to_numpy(variable)) for name, variable in _named(thing).items()}


def _model_state(model: Any) -> dict[str, Any]:
    binding = binding_of(model)
    if binding is not None:
        merge_statistics(model, binding)
    return _state(model)


def _optimizer_state(optimizer: Any) -> dict[str, Any]:
    return {**_state(optimizer), _SHAPES: _shapes_of(optimizer)}


def _load_optimizer(optimizer: Any, saved: dict[str, Any]) -> None:
    """Its variables have numbers alone: with one parameter more, each would get the state of another one."""
    own = _shapes_of(optimizer)
    its = str(saved.get(_SHAPES, own))
    if its != own:
        raise ValueError(
            f"expected the state of an optimizer whose variables have the shapes {own:.200}, got {its:.200}"
        )
    _load(optimizer, {name: value for name, value in saved.items() if name != _SHAPES})


def _shapes_of(optimizer: Any) -> str:
    return json.dumps([list(variable.shape) for variable in optimizer.variables])


def _load(thing: Any, saved: dict[str, Any]) -> None:
    variables = _named(thing)
    if variables.keys() != saved.keys():
        missing, more = sorted(variables.keys() - saved.keys()), sorted(saved.keys() - variables.keys())
        raise ValueError(
            f"{thing.name!r}: expected its variables in the checkpoint, got none of {missing}, and {more} besides. "
            "Make it as it was when the checkpoint was saved"
        )
    for name, variable in variables.items():
        variable.assign(saved[name])
