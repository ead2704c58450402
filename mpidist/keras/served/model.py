"""The chief's model under `ParameterServerStrategy`: `fit` and `evaluate` of a `DatasetCreator` run on the workers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import keras

from mpidist.keras.backends.choice import is_jax
from mpidist.keras.binding import ModelBinding
from mpidist.keras.derive import binding_of, derive, plain_class, plainly
from mpidist.keras.input.creator import DatasetCreator
from mpidist.keras.private import get_initial_epoch, set_initial_epoch, validates
from mpidist.keras.served.checks import require_creator, require_servable
from mpidist.keras.served.state import give_state, state_of
from mpidist.keras.served.steps import WorkerSteps
from mpidist.keras.served.tables import building, chief_tables

if TYPE_CHECKING:
    from keras import Model as _Model
else:
    _Model = object


def serve_model(model: Any, binding: ModelBinding) -> None:
    """Local. Make a model one whose variables are on the servers.

    Raises:
        ValueError: A layer needs a whole table, or the model belongs to another strategy.
    """
    derive(model, ServedModel, binding)
    if model.compiled and model.optimizer is not None:
        # Listed, so that it is plain in files.
        derive(model.optimizer, ServedOptimizer, binding)
    give_state(model, binding).place()


class ServedOptimizer:
    """Keras's optimizer of such a model: it has the learning rate; its state is on the servers."""

    built: bool

    def build(self, variables: Any) -> None:
        """Local. There is no state here."""
        del variables
        self.built = True

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Local. An error: workers apply gradients.

        Raises:
            RuntimeError: Always.
        """
        del grads, trainable_variables
        raise RuntimeError(
            "the optimizer of a model under ParameterServerStrategy updates variables on servers: call `fit`, or use "
            "one of mpidist.optimizers in functions that ClusterCoordinator(strategy).schedule is given"
        )


class ServedModel(_Model):  # type: ignore[misc]
    """A model on the chief, whose variables are on servers."""

    run_eagerly: bool

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Local. As in Keras."""
        super().compile(*args, **kwargs)
        if (binding := binding_of(self)) is not None:
            serve_model(self, binding)

    def fit(  # noqa: PLR0913 - Keras's
        self, x: Any = None, y: Any = None, batch_size: int | None = None, epochs: int = 1, verbose: Any = "auto",
        callbacks: Any = None, validation_split: float = 0.0, validation_data: Any = None, shuffle: Any = True,
        class_weight: Any = None, sample_weight: Any = None, initial_epoch: int = 0,
        steps_per_epoch: int | None = None, validation_steps: int | None = None,
        validation_batch_size: int | None = None, validation_freq: Any = 1,
    ) -> Any:
        """Local. As in Keras, on the workers; each step is one worker's, on a batch of its own dataset.

        Args:
            x: A `DatasetCreator`.
            y: None, as `batch_size`, `validation_split`, `class_weight` and `sample_weight`.
            batch_size: See `y`.
            epochs: The argument of Keras's `fit`.
            verbose: The argument of Keras's `fit`.
            callbacks: The argument of Keras's `fit`; they run on the chief.
            validation_split: See `y`.
            validation_data: A `DatasetCreator`, for workers, or another input, for the chief.
            shuffle: Has no meaning here.
            class_weight: See `y`.
            sample_weight: See `y`.
            initial_epoch: The argument of Keras's `fit`.
            steps_per_epoch: The number of all workers' steps together.
            validation_steps: The argument of Keras's `fit`; required for a `DatasetCreator`.
            validation_batch_size: The argument of Keras's `fit`, for the chief.
            validation_freq: The argument of Keras's `fit`.

        Raises:
            TypeError: `x` is another input.
            ValueError: Something is missing, or cannot be done under parameter servers; or the data of all workers
                ended.
        """
        binding = binding_of(self)
        if binding is None:
            raise RuntimeError("this model is a copy of one under ParameterServerStrategy. Call distribute on it")
        del shuffle
        require_creator("fit", x, steps_per_epoch, "steps_per_epoch", {
            "y": y is not None, "batch_size": batch_size, "validation_split": validation_split,
            "class_weight": class_weight, "sample_weight": sample_weight is not None,
        })
        if isinstance(validation_data, DatasetCreator):
            require_creator("fit", validation_data, validation_steps, "validation_steps", {})
        require_servable(self)
        serve_model(self, binding)
        state = state_of(self)
        steps = WorkerSteps(self, binding, state, x)
        # Callbacks may load files, and the program may have set weights.
        function = steps.train()
        state.push()
        count = int(steps_per_epoch or 0)
        if not isinstance(callbacks, keras.callbacks.CallbackList):
            callbacks = keras.callbacks.CallbackList(
                callbacks, add_history=True, add_progbar=verbose != 0, verbose=1 if verbose == "auto" else verbose,
                epochs=epochs, steps=count, model=self,
            )
        self.stop_training = False
        callbacks.on_train_begin()
        batches, tests = steps.iterator(x), None
        logs: dict[str, float] = {}
        first = get_initial_epoch(self) or initial_epoch
        for epoch in range(first, epochs):
            callbacks.on_epoch_begin(epoch)
            logs = {}
            for number in self._executions(steps.run(function, batches, count, "steps_per_epoch"), count, callbacks):
                logs = steps.results()
                callbacks.on_train_batch_end(number, logs)
            state.pull()
            if validation_data is not None and validates(self, epoch, validation_freq):
                if isinstance(validation_data, DatasetCreator):
                    tests = tests or (steps.test(), steps.iterator(validation_data))
                    found = self._test(steps, *tests, validation_steps, callbacks, "validation_steps")
                else:
                    inputs, targets, weights = keras.utils.unpack_x_y_sample_weight(validation_data)
                    found = self.evaluate(
                        inputs, targets, sample_weight=weights, batch_size=validation_batch_size,
                        steps=validation_steps, callbacks=callbacks, return_dict=True, verbose=0,
                    )
                logs.update({f"val_{name}": value for name, value in found.items()})
            callbacks.on_epoch_end(epoch, logs)
            if self.stop_training:
                break
        callbacks.on_train_end(logs)
        set_initial_epoch(self, None)
        return self.history

    def _executions(self, numbers: Iterator[int], count: int, callbacks: Any) -> Iterator[int]:
        """The numbers of the last steps of each `steps_per_execution` steps."""
        begun = -1
        for number in numbers:
            if number > begun:
                begun = min(number + self.steps_per_execution, count) - 1
                callbacks.on_train_batch_begin(number)
            if number == begun:
                yield number

    def _test(
        self, steps: WorkerSteps, function: Any, batches: Any, count: Any, callbacks: Any, name: str
    ) -> dict[str, float]:
        callbacks.on_test_begin()
        for number in steps.run(function, batches, count, name):
            callbacks.on_test_batch_begin(number)
            callbacks.on_test_batch_end(number, None)
        logs = steps.results()
        callbacks.on_test_end(logs)
        return logs

    def evaluate(  # noqa: PLR0913 - Keras's
        self, x: Any = None, y: Any = None, batch_size: int | None = None, verbose: Any = "auto",
        sample_weight: Any = None, steps: int | None = None, callbacks: Any = None, return_dict: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Local. As in Keras: of a `DatasetCreator` on the workers, of any other input on the chief."""
        binding = binding_of(self)
        if binding is None or not isinstance(x, DatasetCreator):
            with self._chiefs():
                return super().evaluate(
                    x, y, batch_size, verbose, sample_weight, steps, callbacks, return_dict, **kwargs
                )
        require_creator("evaluate", x, steps, "steps", {
            "y": y is not None, "batch_size": batch_size, "sample_weight": sample_weight is not None,
        })
        require_servable(self)
        serve_model(self, binding)
        made = WorkerSteps(self, binding, state_of(self), x)
        if not isinstance(callbacks, keras.callbacks.CallbackList):
            callbacks = keras.callbacks.CallbackList(callbacks, model=self, verbose=0, epochs=1, steps=steps)
        logs = self._test(made, made.test(), made.iterator(x), steps, callbacks, "steps")
        return logs if return_dict else self._flatten_metrics_in_order(logs)

    def predict(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Local. As in Keras, on the chief.

        Raises:
            TypeError: The input is a `DatasetCreator`: the order of the workers' batches means nothing.
        """
        if isinstance(x, DatasetCreator):
            raise TypeError(
                "Model.predict under ParameterServerStrategy runs on the chief, and the batches of workers have no "
                "order: expected arrays or another input of Keras, got a DatasetCreator"
            )
        with self._chiefs():
            return super().predict(x, *args, **kwargs)

    @contextmanager
    def _chiefs(self) -> Iterator[None]:
        """The chief's own computing: with the variables as they are now, and with rows of tables by each call."""
        binding = binding_of(self)
        if binding is None:
            yield
            return
        state_of(self).pull()
        before = self.run_eagerly
        if is_jax() and chief_tables(self):
            self.run_eagerly = True
        try:
            yield
        finally:
            self.run_eagerly = before

    def _symbolic_build(self, *args: Any, **kwargs: Any) -> None:
        with building():
            super()._symbolic_build(*args, **kwargs)

    def train_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Local. An error: the chief does not train.

        Raises:
            RuntimeError: Always.
        """
        del args, kwargs
        raise RuntimeError(
            "Model.train_on_batch under ParameterServerStrategy: the chief does not train. Call `fit` with a "
            "mpidist.keras.utils.experimental.DatasetCreator"
        )

    def get_weights(self) -> Any:
        """Local. As in Keras, from the servers; without tables, which `layer.get_weights()` has."""
        if binding_of(self) is not None:
            state_of(self).pull()
        return super().get_weights()

    def set_weights(self, weights: Any) -> None:
        """Local. As in Keras, also on the servers; without tables."""
        super().set_weights(weights)
        if binding_of(self) is not None:
            state_of(self).push()

    def load_weights(self, *args: Any, **kwargs: Any) -> None:
        """Local. As in Keras, also on the servers, with tables and the optimizer's state."""
        self._mpidist_files("load_weights", args, kwargs)
        if binding_of(self) is not None:
            state_of(self).push()

    def save(self, *args: Any, **kwargs: Any) -> Any:
        """Local. As in Keras, from the servers, with tables; it loads as plain Keras."""
        return self._mpidist_files("save", args, kwargs)

    def save_weights(self, *args: Any, **kwargs: Any) -> Any:
        """Local. As in Keras, from the servers, with tables and the optimizer's state."""
        return self._mpidist_files("save_weights", args, kwargs)

    def _mpidist_files(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if binding_of(self) is None:
            return getattr(super(), method)(*args, **kwargs)
        state = state_of(self)
        if self.built and self.compiled and not method.startswith("load"):
            state.pull()
        elif self.built and self.compiled and self.optimizer is not None:
            state.place()
            state.build_optimizer()
        with state.as_file():
            return getattr(plain_class(self), method)(self, *args, **kwargs)

    to_json = plainly("to_json")
