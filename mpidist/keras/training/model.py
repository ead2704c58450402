"""The distributed model: `fit`, `evaluate`, `predict` over all replicas, over Keras's own methods."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from mpidist.keras.backends.choice import is_jax, serving
from mpidist.keras.binding import ModelBinding
from mpidist.keras.derive import binding_of, plainly
from mpidist.keras.input.choice import choose_input, draw_seed
from mpidist.keras.input.rows import RowsAdapter
from mpidist.keras.parts.metric import require_sums, summed_states
from mpidist.keras.parts.taking import merge_statistics, take_parts
from mpidist.keras.private import layers_of, split_for_validation
from mpidist.keras.step import ModelStep, current, enter, unwrap
from mpidist.keras.training.callbacks import Together, callbacks_here
from mpidist.keras.training.results import in_order
from mpidist.keras.training.saving import SavedByFirst
from mpidist.keras.training.whole_batch import WholeBatches

if TYPE_CHECKING:
    from keras import Model as _Model
else:
    _Model = object


def quiet(binding: ModelBinding, verbose: Any) -> Any:
    """Local. The bar of progress is the first rank's."""
    return verbose if binding.rank == 0 else 0


class DistributedModel(WholeBatches, SavedByFirst, _Model):  # type: ignore[misc]
    """A model whose steps are those of all replicas. Batches are global; each replica takes its rows."""

    train_function: Any

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Local. As in Keras."""
        super().compile(*args, **kwargs)
        if (binding := binding_of(self)) is not None:
            take_parts(self, binding)

    def train_step(self, *args: Any) -> Any:
        """Collective. Run Keras's or the user's step with the number of this replica's rows."""
        return self._step(super().train_step, args, is_training=True)

    def test_step(self, *args: Any) -> Any:
        """Local. Run Keras's or the user's step; a batch without rows for this replica counts nothing."""
        return self._step(super().test_step, args, is_training=False)

    def predict_step(self, *args: Any) -> Any:
        """Local. Run Keras's or the user's step."""
        return super().predict_step(*args[:-1], unwrap(args[-1])[1])

    def _step(self, function: Any, args: tuple[Any, ...], *, is_training: bool) -> Any:
        binding, (rows, data) = binding_of(self), unwrap(args[-1])
        if binding is None or rows is None:
            return function(*args[:-1], data)
        with enter(ModelStep(binding, rows, is_training=is_training)):
            if is_jax():
                logs, state = function(*args[:-1], data)
                return logs, _without_empty(rows, args[0], state)
            if rows:
                return function(data)
            variables = [*self.metrics_variables, *(one for one in self.non_trainable_variables if _is_float(one))]
            before = [np.array(keras.ops.convert_to_numpy(one)) for one in variables]
            logs = function(data)
            for variable, value in zip(variables, before, strict=True):
                variable.assign(value)
            return logs

    def make_train_function(self, force: bool = False) -> Any:
        """Local. As in Keras; a step is whole before an interrupt or a notice of the end counts."""
        if self.train_function is not None and not force:
            return self.train_function
        super().make_train_function(force)
        binding, plain = binding_of(self), self.train_function
        if binding is None or binding.size == 1:
            return plain

        def step(*args: Any) -> Any:
            with binding.extended.step("Model.fit"):
                return serving.finish(plain(*args))

        self.train_function = step
        return step

    def get_metrics_result(self) -> Any:
        """Collective outside of steps: the results over all replicas. Local in a step: this replica's."""
        binding = binding_of(self)
        if binding is None or binding.size == 1 or current() is not None:
            return super().get_metrics_result()
        merge_statistics(self, binding)
        require_sums(self.metrics)
        with summed_states(binding, self.metrics_variables), enter(ModelStep(binding, 0, is_training=False)):
            return super().get_metrics_result()

    def _get_metrics_result_or_logs(self, logs: Any) -> Any:
        result, binding = super()._get_metrics_result_or_logs(logs), binding_of(self)
        if binding is None or binding.size == 1 or result is not logs or not isinstance(logs, dict):
            return result
        # What a step of the user's returned: the mean over the replicas, so that callbacks decide alike everywhere.
        own = np.array([float(keras.ops.convert_to_numpy(value)) for value in logs.values()], np.float64)
        return dict(zip(logs, (binding.sum(own, "logs of a step") / binding.size).tolist(), strict=True))

    def _symbolic_build(self, iterator: Any = None, data_batch: Any = None) -> None:
        binding = binding_of(self)
        if binding is None:
            super()._symbolic_build(iterator=iterator, data_batch=data_batch)
            return
        adapter = getattr(iterator, "data_adapter", None)
        if isinstance(adapter, RowsAdapter):
            # Building may read a batch, which is Collective.
            binding.together("building the model", lambda: all(layer.built for layer in layers_of(self)), bool)
            iterator = [(0, 0, _First(adapter))]
        if data_batch is not None:
            data_batch = unwrap(data_batch)[1]
        with enter(ModelStep(binding, 0, is_training=False)):
            super()._symbolic_build(iterator=iterator, data_batch=data_batch)
        # Layers make seeds, and `compile` resolves losses, when they are built.
        self._take(binding)

    def fit(
        self, x: Any = None, y: Any = None, batch_size: int | None = None, epochs: int = 1, verbose: Any = "auto",
        callbacks: Any = None, **kwargs: Any,
    ) -> Any:
        """Collective. As in Keras, over all replicas. Batch sizes are global.

        Raises:
            ValueError: Ranks have other inputs, or something of the model cannot be distributed; on every rank.
            RuntimeError: An epoch without a reduction, or variables that differ between the ranks.
        """
        binding = binding_of(self)
        if binding is None:
            return super().fit(x, y, batch_size, epochs, verbose, callbacks, **kwargs)
        agreed = epochs, batch_size, kwargs.get("steps_per_epoch")
        binding.together("fit", lambda: self._begin(binding), lambda _: agreed)
        validation, fraction = kwargs.pop("validation_data", None), kwargs.pop("validation_split", 0.0)
        weights, shuffle = kwargs.pop("sample_weight", None), kwargs.pop("shuffle", True)
        if fraction and validation is None:
            (x, y, weights), validation = split_for_validation((x, y, weights), fraction)
        data = choose_input(
            binding, x, y, weights, batch_size=batch_size, shuffle=shuffle, seed=draw_seed(binding) if shuffle else 0,
            steps_per_epoch=kwargs.get("steps_per_epoch"), class_weight=kwargs.pop("class_weight", None),
        )
        if validation is not None:
            validation = choose_input(
                binding, *keras.utils.unpack_x_y_sample_weight(validation),
                batch_size=kwargs.get("validation_batch_size") or batch_size,
                steps_per_epoch=kwargs.get("validation_steps"),
            )
        callbacks = binding.together("callbacks", lambda: callbacks_here(binding, callbacks))
        if binding.size > 1:
            callbacks.append(Together(binding, self))
        try:
            return super().fit(
                data, None, None, epochs, quiet(binding, verbose), callbacks, validation_data=validation, shuffle=False,
                **kwargs,
            )
        finally:
            serving.copy_late(binding)

    def evaluate(
        self, x: Any = None, y: Any = None, batch_size: int | None = None, verbose: Any = "auto",
        sample_weight: Any = None, steps: int | None = None, callbacks: Any = None, **kwargs: Any,
    ) -> Any:
        """Collective. As in Keras, over all replicas; every rank gets the results."""
        binding = binding_of(self)
        if binding is None:
            return super().evaluate(x, y, batch_size, verbose, sample_weight, steps, callbacks, **kwargs)
        merge_statistics(self, binding)
        if not isinstance(callbacks, keras.callbacks.CallbackList):
            callbacks = callbacks_here(binding, callbacks)
        data = choose_input(binding, x, y, sample_weight, batch_size=batch_size, steps_per_epoch=steps)
        return super().evaluate(data, None, None, quiet(binding, verbose), None, steps, callbacks, **kwargs)

    def predict(
        self, x: Any, batch_size: int | None = None, verbose: Any = "auto", steps: int | None = None,
        callbacks: Any = None,
    ) -> Any:
        """Collective. As in Keras, over all replicas; every rank gets all rows, in their order."""
        binding = binding_of(self)
        if binding is None or binding.size == 1:
            return super().predict(x, batch_size, verbose, steps, callbacks)
        merge_statistics(self, binding)
        data = choose_input(binding, x, batch_size=batch_size, steps_per_epoch=steps)
        own = super().predict(data, None, quiet(binding, verbose), steps, callbacks_here(binding, callbacks))
        return in_order(binding, own, data.counts)

    def _begin(self, binding: ModelBinding) -> None:
        # Attributes may have been set since `compile`.
        self._take(binding)

    def _take(self, binding: ModelBinding) -> None:
        before = len(binding.members)
        take_parts(self, binding)
        if len(binding.members) > before:
            # A step that was compiled without them. To compile it again takes as long as many steps.
            self.train_function = None

    to_json = plainly("to_json")


class _First:
    """An iterator of one batch, the first of an input, which is read only where Keras builds the model with it."""

    def __init__(self, adapter: RowsAdapter) -> None:
        self._adapter = adapter

    def __next__(self) -> Any:
        return self._adapter.first()


def _is_float(variable: Any) -> bool:
    return bool(keras.backend.is_float_dtype(variable.dtype))


def _without_empty(rows: Any, before: tuple[Any, ...], after: tuple[Any, ...]) -> tuple[Any, ...]:
    """Local. A state of a traced step: its metrics, and statistics, only count where the replica has rows."""
    new = list(after)
    new[-1] = serving.keep(rows > 0, list(after[-1]), list(before[-1]))
    new[1] = [
        serving.keep(rows > 0, [one], [other])[0] if keras.backend.is_float_dtype(str(one.dtype)) else one
        for one, other in zip(after[1], before[1], strict=True)
    ]
    return tuple(new)
