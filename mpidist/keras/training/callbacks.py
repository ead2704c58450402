"""Callbacks: which of them run where, and the last one, which keeps the ranks together."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from mpidist.keras.backends.choice import serving
from mpidist.keras.binding import ModelBinding
from mpidist.keras.parts.taking import optimizers_of
from mpidist.keras.parts.values import differing, share_values
from mpidist.keras.private import get_initial_epoch, set_initial_epoch

# They write files.
_WRITERS = (
    keras.callbacks.BackupAndRestore, keras.callbacks.CSVLogger, keras.callbacks.ModelCheckpoint,
    keras.callbacks.ProgbarLogger, keras.callbacks.RemoteMonitor, keras.callbacks.TensorBoard,
)


def callbacks_here(binding: ModelBinding, callbacks: Any) -> list[Any]:
    """Local. The callbacks of this rank: all, without those that write files where it is not the first.

    Raises:
        TypeError: `callbacks` is a `CallbackList`.
    """
    if isinstance(callbacks, keras.callbacks.CallbackList):
        raise TypeError("callbacks: expected a list of callbacks, got a CallbackList. Pass the callbacks themselves")
    if isinstance(callbacks, keras.callbacks.Callback):
        callbacks = [callbacks]
    return [one for one in callbacks or () if binding.rank == 0 or not isinstance(one, _WRITERS)]


class Together(keras.callbacks.Callback):  # type: ignore[misc]
    """The last callback: what others have loaded on the first rank, and wishes to stop on any, are those of all ranks.

    Args:
        binding: The binding of the model.
        model: The model. Through `self.model` the backend jax would copy all variables after each step.
    """

    def __init__(self, binding: ModelBinding, model: Any) -> None:
        super().__init__()
        self._binding, self._trained, self._reductions = binding, model, 0

    def on_train_begin(self, logs: Any = None) -> None:  # noqa: ARG002  # Keras's signature
        """Collective. Give all the first rank's weights, optimizers and epoch: a callback may have loaded them."""
        binding, model = self._binding, self._trained
        share_values(binding, variables_of(model), "the variables of the model")
        epoch = binding.gather(get_initial_epoch(model))[0]
        set_initial_epoch(model, epoch)
        binding.wants_stop = binding.stops = False
        # The model is built only now.
        serving.copy_early(binding, model)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002  # Keras's signature
        """Local. Note the number of reductions."""
        self._reductions = self._binding.reductions

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002  # Keras's signature
        """Local. A wish to stop goes along with the next reduction; all ranks stop after the same step."""
        if self._trained.stop_training:
            self._binding.wants_stop = True
        self._trained.stop_training = self._binding.stops

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002  # Keras's signature
        """Collective. Agree on stopping, and check that the ranks have one model.

        Raises:
            RuntimeError: The epoch had no reduction, or variables differ between the ranks.
        """
        binding, model = self._binding, self._trained
        wish = float(model.stop_training or binding.wants_stop)
        model.stop_training = bool(binding.sum(np.array([wish]), "wishes to stop")[0])
        binding.wants_stop = binding.stops = False
        if binding.reductions == self._reductions:
            raise RuntimeError(
                f"epoch {epoch} ended without a reduction over the replicas: `train_step` of {type(model).__name__} "
                "does not use an optimizer that is an attribute of the model, so each rank trained alone. Set the "
                "optimizer as an attribute, and call its `apply`"
            )
        require_same(binding, model, epoch)


def variables_of(model: Any) -> list[Any]:
    """Local. The variables of a model and its optimizers, without those of its metrics."""
    metrics = {id(variable) for variable in model.metrics_variables}
    found = [*model.variables, *(variable for one in optimizers_of(model) for variable in one.variables)]
    return [one for one in {id(one): one for one in found}.values() if id(one) not in metrics]


def require_same(binding: ModelBinding, model: Any, epoch: int) -> None:
    """Collective. Raise RuntimeError where a trainable variable differs between the ranks, and name it."""
    variables = model.trainable_variables
    wrong = [variables[number].path for number in differing(binding, variables, "checksums of the variables")]
    if wrong:
        raise RuntimeError(
            f"epoch {epoch}: the ranks' copies of {', '.join(wrong)} differ. Something changed them on some ranks "
            "only: a callback, or an optimizer that is no attribute of the model. Change variables on all ranks alike"
        )
