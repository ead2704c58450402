"""The variables of the chief's model: those on the servers, the chief's copies, and the files that hold them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np

from mpidist.keras.binding import ModelBinding
from mpidist.keras.derive import as_plain
from mpidist.keras.private import layers_of
from mpidist.keras.served.optimizer import StateOfServers, served_optimizer
from mpidist.keras.served.tables import chief_tables, is_table, take_table, trainables_of
from mpidist.strategy.default import Variable

_STATE = "_mpidist_served"


class ServedState:
    """The served variables of one model. The chief's copies are those of the last `pull`; of tables it has none.

    Args:
        model: The chief's model.
        binding: The binding of the model.

    Attributes:
        dense: The served variables, in the order of the model's weights without tables.
        optimizer: The served optimizer, once the model has been trained or loaded.
    """

    def __init__(self, model: Any, binding: ModelBinding) -> None:
        self._model, self._binding = model, binding
        self.dense: tuple[Any, ...] = ()
        self.optimizer: Any = None
        self._of: Any = None

    @property
    def tables(self) -> tuple[Any, ...]:
        """Local. The served tables, in the order of the layers."""
        return tuple(layer.embeddings for layer in chief_tables(self._model))

    def place(self) -> None:
        """Local. Put the tables, and if the model is built all variables, on the servers.

        Raises:
            ValueError: A layer needs a whole table.
        """
        model, binding = self._model, self._binding
        for layer in layers_of(model):
            if is_table(layer):
                take_table(layer, binding)
        if model.built and not self.dense:
            with binding.strategy.scope():
                self.dense = tuple(Variable(_value(one), name=one.path) for one in model.weights)

    def build_optimizer(self) -> Any:
        """Local. Make the served optimizer for the model's optimizer.

        Raises:
            ValueError: The servers cannot do what Keras's does.
        """
        if self.optimizer is None or self._of is not self._model.optimizer:
            made = served_optimizer(self._model.optimizer)
            served = dict(zip(map(id, self._model.weights), self.dense, strict=True))
            made.build([served.get(id(one), one) for one in trainables_of(self._model)])
            self.optimizer, self._of = made, self._model.optimizer
        return self.optimizer

    def pull(self) -> None:
        """Local. Bring the variables to the chief's model."""
        for variable, served in zip(self._model.weights, self.dense, strict=bool(self.dense)):
            variable.assign(served.numpy())
        if self.optimizer is not None:
            self._of.iterations.assign(self.optimizer.iterations)

    def push(self) -> None:
        """Local. Give the servers the variables of the chief's model."""
        for variable, served in zip(self._model.weights, self.dense, strict=bool(self.dense)):
            served.assign(_value(variable))

    @contextmanager
    def as_file(self) -> Iterator[None]:
        """Local. Inside, Keras saves tables and the optimizer's state from the servers, and loads them there."""
        given = [(layer, layer) for layer in chief_tables(self._model)]
        if self.optimizer is not None:
            given.append((self._of, StateOfServers(self._of, self.optimizer)))
        methods = "save_own_variables", "load_own_variables"
        bound = [(thing, name, getattr(its, name)) for thing, its in given for name in methods]
        with as_plain(self._binding):
            for thing, name, method in bound:
                object.__setattr__(thing, name, method)
            try:
                yield
            finally:
                for thing, name, _ in bound:
                    object.__delattr__(thing, name)


def _value(variable: Any) -> Any:
    return np.array(keras.ops.convert_to_numpy(variable), order="C")


def state_of(model: Any) -> ServedState:
    """Local. The served variables of the chief's model."""
    state: ServedState = getattr(model, _STATE)
    return state


def give_state(model: Any, binding: ModelBinding) -> ServedState:
    """Local. The served variables of the chief's model, which the first call makes."""
    if getattr(model, _STATE, None) is None:
        # Around Keras's tracking.
        object.__setattr__(model, _STATE, ServedState(model, binding))
    return state_of(model)
