"""`EarlyStopping`: ends the training when a value has stopped getting better."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from typing_extensions import override

from mpidist.arguments import flag, number, whole
from mpidist.arrays import AnyArray
from mpidist.strategy.hybrid.strategy import HybridStrategy
from mpidist.training.callbacks.callback import Callback, Logs
from mpidist.variables.variable import BaseVariable

logger = logging.getLogger("mpidist")

# The names of the best weights in the state, each with a number after it.
_WEIGHT = "weight_"
# Values that are better when they are larger, by parts of their names.
_LARGER = ("acc", "auc", "precision", "recall", "f1", "iou")


class EarlyStopping(Callback):
    """Local. Ends the training when a value of the epochs has not become better for some epochs.

    The values are the same on every rank, so all ranks decide the same. A checkpoint keeps the best value, and for how
    many epochs there was no better one.

    Args:
        monitor: The name of the value.
        min_delta: A smaller change does not count as better.
        patience: The number of epochs without a better value after which the training ends.
        mode: "min", "max", or "auto": the larger value is the better one for names of accuracies, AUC, precision and
            recall.
        baseline: A value that must be surpassed; default: none.
        start_from_epoch: The number of epochs at the beginning that do not count.
        restore_best_weights: Whether at the end of `fit` the trainable variables of the trainer's checkpoint get the
            values that they had after the best epoch. Checkpoints then hold these, too.

    Raises:
        TypeError, ValueError: An argument has a wrong type, or is out of range.

    Attributes:
        best: The best value; NaN before the first one.
        stopped_epoch: The epoch at whose end it ended the training; 0 if it did not.
    """

    def __init__(
        self, monitor: str = "val_loss", min_delta: float = 0, patience: int = 0, *, mode: str = "auto",
        baseline: float | None = None, start_from_epoch: int = 0, restore_best_weights: bool = False,
    ) -> None:
        self.monitor = monitor
        self.min_delta = number("min_delta", min_delta, least=0)
        self.patience = whole("patience", patience, least=0)
        if mode not in ("auto", "min", "max"):
            raise ValueError(f"`mode` must be 'auto', 'min' or 'max', got {mode!r}")
        is_larger = mode == "max" or (mode == "auto" and any(part in monitor for part in _LARGER))
        self._sign = -1.0 if is_larger else 1.0
        self._baseline = None if baseline is None else number("baseline", baseline)
        self.start_from_epoch = whole("start_from_epoch", start_from_epoch, least=0)
        self.restore_best_weights = flag("restore_best_weights", restore_best_weights)
        self.best = math.nan
        self.wait = self.stopped_epoch = 0
        self._weights: dict[str, AnyArray] = {}
        self._is_loaded = False

    @override
    def state(self) -> dict[str, Any]:
        """Local. See `Callback.state`."""
        return {"best": self.best, "wait": self.wait, "stopped_epoch": self.stopped_epoch, **self._weights}

    @override
    def load_state(self, saved: Mapping[str, Any]) -> None:
        """Local. See `Callback.load_state`."""
        self.best, self.wait = float(saved["best"]), int(saved["wait"])
        self._weights = {name: np.asarray(value) for name, value in saved.items() if name.startswith(_WEIGHT)}
        self._is_loaded = True

    @override
    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Local. See `Callback.on_train_begin`.

        Raises:
            ValueError: The best weights are to be restored, and the trainer has no checkpoint.
            NotImplementedError: The same under HybridStrategy.
        """
        if not self._is_loaded:
            self.best, self.wait, self._weights = math.nan, 0, {}
        self._is_loaded, self.stopped_epoch = False, 0
        if self.restore_best_weights:
            self._require_weights()

    def _require_weights(self) -> None:
        if self.trainer.checkpoint is None:
            raise ValueError(
                "EarlyStopping: `restore_best_weights=True` needs a checkpoint of the Trainer, which names the "
                "variables, got None. Give the Trainer checkpoint=mpidist.Checkpoint(...)"
            )
        if isinstance(self.trainer.strategy, HybridStrategy):
            raise NotImplementedError(
                "EarlyStopping: `restore_best_weights=True` is not supported under HybridStrategy, whose groups have "
                "different weights after an epoch. Keep the best checkpoint: CheckpointManager(..., keep_best=...)"
            )

    @override
    def on_train_end(self, logs: Logs | None = None) -> None:
        """Collective if the best weights are restored. See `Callback.on_train_end`."""
        position = self.trainer.position
        # One that pauses continues with the weights that it has.
        is_complete = position.is_ended or position.epoch >= position.epochs
        if self.restore_best_weights and self._weights and is_complete:
            for variable, value in zip(self._variables(), self._weights.values(), strict=True):
                variable.assign(value)

    def _variables(self) -> list[BaseVariable]:
        """The trainable variables, in the order of the checkpoint."""
        checkpoint = self.trainer.checkpoint
        leaves = {} if checkpoint is None else checkpoint.find_objects().leaves
        found = [leaf.value for leaf in leaves.values() if isinstance(leaf.value, BaseVariable) and not leaf.in_state]
        return [variable for variable in found if variable.trainable]

    @override
    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Local; Collective if weights are kept of which no rank has all. See `Callback.on_epoch_end`."""
        value = (logs or {}).get(self.monitor)
        if value is None:
            if self.trainer.is_writer:
                logger.warning(
                    "EarlyStopping: an epoch has no value %r, and this one does not count. It has %s",
                    self.monitor, ", ".join(sorted(logs or {})) or "none",
                )
            return
        if epoch < self.start_from_epoch:
            return
        self.wait += 1
        if self._is_better(value, self.best, self.min_delta):
            self.best = float(value)
            if self.restore_best_weights:
                kept = enumerate(self._variables())
                self._weights = {f"{_WEIGHT}{number:06}": variable.numpy() for number, variable in kept}
            if self._baseline is None or self._is_better(value, self._baseline, self.min_delta):
                self.wait = 0
        if self.wait >= max(1, self.patience) and epoch > 0:
            self.stopped_epoch = epoch
            self.trainer.stop_training = True

    def _is_better(self, value: float, reference: float, delta: float) -> bool:
        """Whether a value is better than another one; NaN never is, and any number is better than NaN."""
        if math.isnan(reference):
            return not math.isnan(value)
        return self._sign * (reference - value) > delta
