"""Embeddings whose table is on the servers, in shards: a process computes with the rows of its ids only.

The chief's layer reads rows when it is called. A worker learns the ids of a batch first, by a pass through the model
in which its layers only note them, and pulls these rows, each once; the step of the model, which may be compiled, then
computes with them. So neither has the table, and its gradient is of those rows.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from mpidist.keras.backends.choice import serving
from mpidist.keras.binding import ModelBinding
from mpidist.keras.derive import binding_of, derive, plain_class
from mpidist.keras.private import is_symbolic, layers_of, unlocked, untrack
from mpidist.strategy.default import Variable

if TYPE_CHECKING:
    from keras.layers import Embedding as _Embedding
else:
    _Embedding = object

ops = keras.ops

# The name by which workers find their class of layers in the description of a model.
WORKER_CLASS = "mpidist>EmbeddingOfRows"
# Sorts behind every id.
_NONE = np.iinfo(np.int32).max


class _Mode(threading.local):
    def __init__(self) -> None:
        # Layers and the ids that they were called with, while ids are noted.
        self.noted: list[tuple[Any, Any]] | None = None
        # Whether shapes only are wanted.
        self.is_building = False
        # Whether tables are listed among the weights of a model, in their places.
        self.is_listing = False


_mode = _Mode()


@contextmanager
def noting() -> Iterator[list[tuple[Any, Any]]]:
    """Local. Inside, layers note the ids that they are called with, and return zeros."""
    noted: list[tuple[Any, Any]] = []
    _mode.noted = noted
    try:
        yield noted
    finally:
        _mode.noted = None


@contextmanager
def building() -> Iterator[None]:
    """Local. Inside, the chief's layers return zeros: only shapes are needed."""
    _mode.is_building = True
    try:
        yield
    finally:
        _mode.is_building = False


def trainables_of(model: Any) -> list[Any]:
    """Local. The trainable variables of the chief's model in Keras's order, with tables in the places of theirs."""
    _mode.is_listing = True
    try:
        return list(model.trainable_weights)
    finally:
        _mode.is_listing = False


class _Rows(_Embedding):  # type: ignore[misc]
    """An embedding that computes with rows of its table."""

    def call(self, inputs: Any) -> Any:
        """Local. As in Keras."""
        ids = inputs if inputs.dtype in ("int32", "int64") else ops.cast(inputs, "int32")
        if _mode.noted is not None:
            _mode.noted.append((self, ids))
        if _mode.noted is not None or _mode.is_building or is_symbolic(ids):
            return ops.zeros((*ids.shape, self.output_dim), self.compute_dtype)
        return ops.cast(self._mpidist_rows(ids), self.compute_dtype)

    def _mpidist_rows(self, ids: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__} does not define how it gets the rows of ids")


class ChiefTable(_Rows):
    """The chief's layer. It reads the rows that it is called with; `embeddings` is the served variable."""

    @property
    def weights(self) -> list[Any]:
        """Local. Empty: the layer has no variable of Keras."""
        return [self._mpidist_table] if _mode.is_listing and self.built else []

    def get_weights(self) -> list[Any]:
        """Local. The whole table."""
        return [self._mpidist_table.numpy()]

    def set_weights(self, weights: Any) -> None:
        """Local. Set the whole table."""
        (value,) = weights
        self._mpidist_table.assign(np.asarray(value))

    def save_own_variables(self, store: Any) -> None:
        """Local. As in Keras, with the whole table."""
        store["0"] = self._mpidist_table.numpy()

    def load_own_variables(self, store: Any) -> None:
        """Local. As in Keras, with the whole table."""
        self._mpidist_table.assign(np.asarray(store["0"]))

    def _mpidist_rows(self, ids: Any) -> Any:
        if not serving.is_concrete(ids):
            raise RuntimeError(
                f"layer {self.name!r}: the chief reads the rows of a table that is on parameter servers when the layer "
                "is called, which a compiled function cannot do. Call the model outside of jax.jit, or train and "
                "evaluate on workers, with a DatasetCreator"
            )
        wanted = np.asarray(ops.convert_to_numpy(ids))
        unique, places = np.unique(wanted, return_inverse=True)
        rows = self._mpidist_table.sparse_read(unique) if unique.size else np.zeros((0, self.output_dim), "float32")
        return ops.convert_to_tensor(np.asarray(rows)[places.reshape(wanted.shape)])


def _serve(layer: Any, value: Any) -> None:
    binding = binding_of(layer)
    if binding is None:
        raise RuntimeError(f"layer {layer.name!r} is a copy of one whose table is on parameter servers. Make a new one")
    with binding.strategy.scope():
        table = Variable(value, name=f"{layer.path or layer.name}/embeddings", sparse_gradient=True)
    # Around Keras's tracking.
    object.__setattr__(layer, "_mpidist_table", table)
    object.__setattr__(layer, "_embeddings", table)


def is_table(layer: Any) -> bool:
    """Local. Whether a layer is Keras's `Embedding`, whose table is kept in rows. Classes over it are whole."""
    return plain_class(layer) is keras.layers.Embedding


def take_table(layer: Any, binding: ModelBinding) -> None:
    """Local. Put the table of the chief's layer on the servers.

    Raises:
        ValueError: Something in the layer, a regularizer for instance, needs the whole table.
    """
    if binding_of(layer) is not None:
        derive(layer, ChiefTable, binding)
        return
    needs = {
        "embeddings_regularizer": layer.embeddings_regularizer, "embeddings_constraint": layer.embeddings_constraint,
        "lora_rank": layer.lora_rank, "quantization": layer.quantization_mode,
    }
    wrong = [name for name, value in needs.items() if value]
    if wrong:
        raise ValueError(
            f"layer {layer.name!r}: `{wrong[0]}` needs the whole table, of which workers under ParameterServerStrategy "
            "have rows only. Leave it out"
        )
    was_built = layer.built
    derive(layer, ChiefTable, binding)
    if was_built:
        variable = layer._embeddings  # noqa: SLF001 - Keras's name, checked by a unit test
        value = np.array(ops.convert_to_numpy(variable))
        untrack(layer, variable)
        _serve(layer, value)
    else:
        # Drawn whole, as Keras draws it. Keras has wrapped `build` of this object; it is built from here on.
        drawn = layer.embeddings_initializer((layer.input_dim, layer.output_dim), layer.variable_dtype)
        _serve(layer, np.array(ops.convert_to_numpy(drawn)))
        layer.built = True


class EmbeddingOfRows(_Rows, keras.layers.Embedding):  # type: ignore[misc]
    """A worker's layer: a variable has the rows of a batch, and another one their ids.

    The number of rows is a power of two that only grows, since a compiled step is compiled again for each.
    """

    built: bool

    def build(self, input_shape: Any = None) -> None:  # noqa: ARG002 - Keras's
        """Local. Make the variables."""
        if not self.built:
            self._mpidist_make(1)
            self.built = True

    def _mpidist_make(self, capacity: int) -> None:
        with unlocked(self):
            self.rows = self.add_weight(
                shape=(capacity, self.output_dim), initializer="zeros", name="rows", trainable=self.trainable
            )
            self.known = self.add_weight(
                shape=(capacity,), initializer="zeros", dtype="int32", name="ids", trainable=False
            )
        self.known.assign(np.full(capacity, _NONE, np.int32))

    def take(self, ids: Any, rows: Any) -> None:
        """Local. Take the rows of a batch.

        Args:
            ids: Different ones, in ascending order; int, shape (n,).
            rows: Float, shape (n, output_dim).
        """
        capacity, count = self.known.shape[0], len(ids)
        if count > capacity:
            capacity = 1 << (count - 1).bit_length()
            for variable in (self.rows, self.known):
                untrack(self, variable)
            self._mpidist_make(capacity)
        known, values = np.full(capacity, _NONE, np.int32), np.zeros((capacity, self.output_dim), np.float32)
        known[:count], values[:count] = ids, rows
        self.known.assign(known)
        self.rows.assign(values)

    def _mpidist_rows(self, ids: Any) -> Any:
        flat = ops.cast(ops.reshape(ids, (-1,)), "int32")
        known = ops.convert_to_tensor(self.known)
        places = ops.minimum(ops.searchsorted(known, flat), known.shape[0] - 1)
        # An id that the first pass did not see, since it depends on another table: not a number, never a wrong row.
        is_known = ops.expand_dims(ops.equal(ops.take(known, places), flat), -1)
        rows = ops.take(ops.convert_to_tensor(self.rows), places, axis=0)
        rows = ops.where(is_known, rows, ops.full_like(rows, np.nan))
        return ops.reshape(rows, (*ids.shape, self.output_dim))


def worker_tables(model: Any) -> list[EmbeddingOfRows]:
    """Local. The tables of a worker's model, in the order of those of the chief's."""
    return [layer for layer in layers_of(model) if isinstance(layer, EmbeddingOfRows)]


def chief_tables(model: Any) -> list[Any]:
    """Local. The layers of the chief's model whose tables are on servers."""
    return [layer for layer in layers_of(model) if isinstance(layer, ChiefTable)]
