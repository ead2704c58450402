"""The description of a model, from which each worker makes its own copy."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import cloudpickle
import keras

from mpidist.keras.binding import ModelBinding
from mpidist.keras.derive import as_plain
from mpidist.keras.private import layers_of
from mpidist.keras.served.tables import WORKER_CLASS, EmbeddingOfRows

# Arguments of `compile` that a worker's copy has its own of.
_OF_THE_CHIEF = ("optimizer", "steps_per_execution", "jit_compile", "auto_scale_loss", "run_eagerly")


class Description(NamedTuple):
    """The description of a model that is sent.

    Attributes:
        config: The model, as Keras describes it.
        compiled: The arguments of `compile`.
        custom: The program's own classes and functions in them by their names, pickled.
        backend: The chief's backend of Keras.
    """

    config: dict[str, Any]
    compiled: dict[str, Any]
    custom: bytes
    backend: str


def describe(model: Any, binding: ModelBinding, tables: list[Any]) -> Description:
    """Local. The description of a compiled model.

    Args:
        model: The chief's model.
        binding: The binding of the model.
        tables: The layers of the model whose tables are on servers.

    Raises:
        ValueError: Keras cannot describe it.
    """
    try:
        with as_plain(binding):
            config = keras.saving.serialize_keras_object(model)
            compiled = model.get_compile_config()
            kinds = {type(layer) for layer in layers_of(model)}
    except Exception as error:
        raise ValueError(
            f"model {model.name!r}: each worker makes its own copy from Keras's description of the model, which "
            f"failed: {type(error).__name__}: {error}. Give its classes a `get_config`"
        ) from error
    _use_worker_tables(config, {layer.name for layer in tables})
    compiled = {name: value for name, value in compiled.items() if name not in _OF_THE_CHIEF}
    custom = {name: thing for one in (config, compiled) for name, thing in _own_things(one)}
    custom.update({kind.__name__: kind for kind in kinds if not kind.__module__.startswith("keras.")})
    for layer in layers_of(model):
        # Functions are described by their names. Methods that Keras has wrapped hold the layer.
        for name, value in vars(layer).items():
            is_own = isinstance(value, types.FunctionType) and not value.__module__.startswith("keras.")
            if is_own and not hasattr(type(layer), name):
                custom[value.__name__] = value
    return Description(config, compiled, cloudpickle.dumps(custom), keras.backend.backend())


def _nodes(config: Any) -> Iterator[dict[str, Any]]:
    if isinstance(config, dict):
        yield config
        for value in config.values():
            yield from _nodes(value)
    elif isinstance(config, (list, tuple)):
        for value in config:
            yield from _nodes(value)


def _use_worker_tables(config: dict[str, Any], names: set[str]) -> None:
    for node in _nodes(config):
        inner = node.get("config")
        if node.get("class_name") == "Embedding" and isinstance(inner, dict) and inner.get("name") in names:
            node.update(
                module="mpidist.keras.served.tables", class_name="EmbeddingOfRows", registered_name=WORKER_CLASS
            )


def _own_things(config: Any) -> Iterator[tuple[str, Any]]:
    """The classes and functions of the program that a description names, as far as its modules have them."""
    for node in _nodes(config):
        module, name = node.get("module"), node.get("class_name")
        if not isinstance(name, str) or (isinstance(module, str) and module.startswith("keras")):
            continue
        inner = node.get("config")
        wanted = inner if name == "function" and isinstance(inner, str) else name
        found = getattr(sys.modules.get(module or ""), wanted, None)
        if found is not None and module != "builtins":
            yield wanted, found
            if isinstance(node.get("registered_name"), str):
                yield node["registered_name"], found


def make(description: Description, optimizer: Any) -> Any:
    """Local, on a worker. The copy of the chief's model, compiled, not necessarily built.

    Args:
        description: See `describe`.
        optimizer: A Keras optimizer that takes the gradients.

    Raises:
        RuntimeError: This process has another backend.
    """
    if keras.backend.backend() != description.backend:
        raise RuntimeError(
            f"this worker's Keras has the backend {keras.backend.backend()!r}, the chief's {description.backend!r}. "
            "Set KERAS_BACKEND alike for all ranks, before the strategy is made"
        )
    custom = {**cloudpickle.loads(description.custom), WORKER_CLASS: EmbeddingOfRows}
    with keras.saving.custom_object_scope(custom):
        # The description is the chief's own program's: it may hold its lambdas.
        model = keras.saving.deserialize_keras_object(description.config, safe_mode=False)
        arguments = keras.saving.deserialize_keras_object(description.compiled, safe_mode=False)
    model.compile(**{**arguments, "optimizer": optimizer})
    return model
