"""A worker's copy of the chief's model: it pulls variables, computes a step as Keras does, and pushes gradients."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from mpidist.coordinator.worker_side import experimental_get_current_worker_index
from mpidist.indexed_slices import IndexedSlices
from mpidist.keras.backends.choice import serving
from mpidist.keras.input.rows import map_batch
from mpidist.keras.private import build_with, layers_of
from mpidist.keras.served.sending import Description, make
from mpidist.keras.served.tables import EmbeddingOfRows, noting, worker_tables


class Gradients(keras.optimizers.Optimizer):  # type: ignore[misc]
    """The optimizer of a worker's model: it takes the gradients, and changes nothing.

    Attributes:
        taken: The gradients of the last step that was not traced.
    """

    def __init__(self) -> None:
        super().__init__(learning_rate=0.0)
        self.taken: list[Any] = []

    def build(self, variables: Any) -> None:
        """Local. There is no state."""
        del variables
        self.built = True

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Local. Take the gradients."""
        del trainable_variables
        self.taken = list(grads)

    def stateless_apply(self, optimizer_variables: Any, grads: Any, trainable_variables: Any) -> Any:
        """Local. The gradients in place of the new variables."""
        del trainable_variables
        return grads, optimizer_variables


class WorkerModel:
    """A worker's copy.

    Args:
        description: The description of the model.
        index: The number of the worker: its random numbers differ from those of other workers.
    """

    def __init__(self, description: Description, index: int) -> None:
        self._gradients = Gradients()
        self.model = make(description, self._gradients)
        self._functions: dict[str, Any] = {}
        self._index = index
        self._is_ready = self._is_checked = False

    def _prepare(self, batch: Any) -> None:
        if self._is_ready:
            return
        build_with(self.model, batch)
        seeds = [one for layer in layers_of(self.model) for one in vars(layer).values()]
        for seed in seeds:
            if isinstance(seed, keras.random.SeedGenerator) and self._index:
                state = np.array(keras.ops.convert_to_numpy(seed.state))
                state[0] += state.dtype.type(self._index * 7919)
                seed.state.assign(state)
        self._is_ready = True

    def _dense(self) -> list[Any]:
        own = {id(one) for layer in worker_tables(self.model) for one in (layer.rows, layer.known)}
        return [one for one in self.model.weights if id(one) not in own]

    def _pull(self, batch: Any, dense: tuple[Any, ...], tables: tuple[Any, ...]) -> Any:
        """Bring the variables, and the rows of the batch, to this process; returns the batch as Keras takes it."""
        batch = map_batch(_standard, batch)
        self._prepare(batch)
        for variable, served in zip(self._dense(), dense, strict=True):
            variable.assign(served.numpy())
        inputs = keras.utils.unpack_x_y_sample_weight(batch)[0]
        if tables:
            with noting() as noted:
                ids = serving.call_for_notes(self.model, inputs, noted, self._functions)
            for layer, table in zip(worker_tables(self.model), tables, strict=True):
                wanted = [np.asarray(keras.ops.convert_to_numpy(one)).ravel() for owner, one in ids if owner is layer]
                unique = np.unique(np.concatenate(wanted)) if wanted else np.zeros(0, np.int64)
                rows = table.sparse_read(unique) if unique.size else np.zeros((0, layer.output_dim), np.float32)
                layer.take(unique, rows)
        self.model.reset_metrics()
        return map_batch(keras.ops.convert_to_tensor, batch)

    def train(self, batch: Any, dense: tuple[Any, ...], tables: tuple[Any, ...], optimizer: Any) -> list[Any]:
        """Local, in a closure. A step; returns what it adds to the states of metrics.

        Args:
            batch: A batch of this worker's dataset.
            dense: The served variables, in the order of the model's weights without tables.
            tables: The served tables, in the order of the layers.
            optimizer: The served optimizer.

        Raises:
            ValueError: The step changes variables that are not trained.
        """
        data = self._pull(batch, dense, tables)
        gradients = serving.gradients_of(self.model, data, self._gradients, self._functions)
        by_variable = dict(zip(map(id, self._dense()), dense, strict=True))
        owners = zip(worker_tables(self.model), tables, strict=True)
        tables_of = {id(layer.rows): (layer, table) for layer, table in owners}
        pairs: list[tuple[Any, Any]] = []
        for variable, gradient in zip(self.model.trainable_variables, gradients, strict=True):
            value = None if gradient is None else np.asarray(keras.ops.convert_to_numpy(gradient), np.float32)
            if id(variable) in tables_of:
                layer, table = tables_of[id(variable)]
                pairs.append((_of_rows(layer, table, value), table))
            else:
                pairs.append((value, by_variable[id(variable)]))
        self._check(dense)
        optimizer.apply_gradients([(gradient, served) for gradient, served in pairs if gradient is not None])
        return self._metrics()

    def test(self, batch: Any, dense: tuple[Any, ...], tables: tuple[Any, ...]) -> list[Any]:
        """Local, in a closure. A step of `evaluate`; returns what it adds to the states of metrics."""
        data = self._pull(batch, dense, tables)
        serving.test(self.model, data, self._functions)
        return self._metrics()

    def _metrics(self) -> list[Any]:
        return [np.array(keras.ops.convert_to_numpy(one)) for one in self.model.metrics_variables]

    def _check(self, dense: tuple[Any, ...]) -> None:
        """Layers whose state is not trained would keep it on this worker, unseen; the first step shows it."""
        if self._is_checked:
            return
        for variable, served in zip(self._dense(), dense, strict=True):
            if not variable.trainable and not np.array_equal(keras.ops.convert_to_numpy(variable), served.numpy()):
                raise ValueError(
                    f"variable {variable.path!r} changes in a step without being trained, as moving averages do. Under "
                    "ParameterServerStrategy each worker would have its own. Use a layer without such a state"
                )
        self._is_checked = True


def _standard(array: Any) -> Any:
    array = np.asarray(array)
    return array.astype(keras.backend.floatx()) if array.dtype == np.float64 else array


def _of_rows(layer: EmbeddingOfRows, table: Any, gradient: Any) -> Any:
    """The gradient of a table: that of the rows that the layer has."""
    if gradient is None:
        return None
    known = np.asarray(keras.ops.convert_to_numpy(layer.known))
    count = int(np.searchsorted(known, np.iinfo(np.int32).max))
    return IndexedSlices(gradient[:count], known[:count], table.shape)


def make_here(description: Description) -> WorkerModel:
    """Local, on a worker. Make the worker's copy of a model."""
    return WorkerModel(description, experimental_get_current_worker_index())


def train(made: WorkerModel, dense: tuple[Any, ...], tables: tuple[Any, ...], optimizer: Any, batches: Any) -> Any:
    """Local, in a closure. A step on the next batch of this worker."""
    return made.train(next(batches), dense, tables, optimizer)


def test(made: WorkerModel, dense: tuple[Any, ...], tables: tuple[Any, ...], batches: Any) -> Any:
    """Local, in a closure. A step of `evaluate` on the next batch of this worker."""
    return made.test(next(batches), dense, tables)


def shapes(batches: Any) -> Any:
    """Local, in a closure. The shapes and dtypes of the next batch of this worker, in its structure."""
    return map_batch(lambda one: Spec(np.asarray(one)), next(batches))


class Spec:
    """The shape and dtype of an array of a batch, which Keras takes for the array when it builds a model.

    Args:
        array: The array.
    """

    def __init__(self, array: Any) -> None:
        self.shape, self.dtype = tuple(array.shape), str(_standard(array[:0]).dtype)
