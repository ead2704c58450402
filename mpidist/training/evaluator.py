"""Evaluation beside the training, by a rank of its own, or in turns with it."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from typing_extensions import override

from mpidist.arguments import described, whole
from mpidist.checkpoint.directory.state import as_path
from mpidist.checkpoint.following import checkpoints_iterator
from mpidist.training.callbacks.callback import Logs
from mpidist.training.callbacks.early_stopping import EarlyStopping
from mpidist.training.callbacks.hooks import CallbackHooks
from mpidist.training.callbacks.model_checkpoint import ModelCheckpoint
from mpidist.training.position import History
from mpidist.training.trainer import Trainer

logger = logging.getLogger("mpidist")

# An evaluator makes this file in the directory of the checkpoints to end the training.
STOP_FILE = "stop-training"
# Seconds between two looks at it.
_LOOK_SECONDS = 0.5


def train_and_evaluate(
    trainer: Trainer,
    train: Any,
    evaluate: Any,
    *,
    every: int | str = "epoch",
    epochs: int = 1,
    callbacks: Iterable[Any] = (),
    evaluate_callbacks: Iterable[Any] = (),
) -> History:
    """Collective. Train, and evaluate each checkpoint: `tf.estimator.train_and_evaluate`.

    With an evaluator in the cluster (`MPIClusterResolver(num_evaluators=1)`, or TF_CONFIG) training and evaluation run
    side by side: all ranks call this function, the evaluator's follows the checkpoints, and its error or death does not
    end the training. Without one all ranks train and evaluate in turns.

    An `EarlyStopping` that monitors a value of the evaluation (`val_…`) runs on the evaluator: when it stops, the
    training ends after at most one more checkpoint.

    Args:
        trainer: The trainer, with a `CheckpointManager` and an `evaluate_step`.
        train: The dataset of the training.
        evaluate: The dataset of the evaluation.
        every: The length of an epoch, at whose end a checkpoint is saved and evaluated: "epoch" for a pass over the
            data, or a number of steps.
        epochs: The number of epochs.
        callbacks: Callbacks of the training.
        evaluate_callbacks: Further callbacks of the evaluator, whose `on_epoch_end` gets the values of each evaluation.
            Without an evaluator they are called as others are.

    Returns:
        The values of the epochs; with an evaluator, on its rank those of the evaluations, on others those of the
        training.

    Raises:
        TypeError, ValueError: See `Trainer.fit`; or the trainer has no manager or no `evaluate_step`.
    """
    if not isinstance(trainer, Trainer):
        raise TypeError(f"`trainer` must be a mpidist.Trainer, got {described(trainer)}")
    if trainer.manager is None or trainer.evaluate_step is None:
        missing = "checkpoint=mpidist.CheckpointManager(...)" if trainer.manager is None else "an `evaluate_step`"
        raise ValueError(f"train_and_evaluate needs a Trainer with {missing}")
    steps = None if every == "epoch" else whole("every", every, least=1)
    given, others = [*callbacks], [*evaluate_callbacks]
    resolver = trainer.strategy.cluster_resolver
    if resolver is None or "evaluator" not in resolver.cluster_spec().jobs:
        return trainer.fit(train, epochs, steps, evaluate, callbacks=[*given, *others])
    if resolver.task_type == "evaluator":
        own = [one for one in given if _is_of_evaluation(one)]
        return SidecarEvaluator(trainer, evaluate, callbacks=[*own, *others]).start()
    saving = [one for one in given if isinstance(one, ModelCheckpoint)] or [ModelCheckpoint()]
    given = [one for one in given if not _is_of_evaluation(one) and one not in saving]
    evaluated = [EvaluatedCheckpoint(one.save_freq or "epoch") for one in saving]
    return trainer.fit(train, epochs, steps, callbacks=[*given, *evaluated])


def _is_of_evaluation(callback: Any) -> bool:
    return isinstance(callback, EarlyStopping) and callback.monitor.startswith("val_")


class SidecarEvaluator:
    """Local. Evaluates the checkpoints of a training beside it: `tf.keras.utils.SidecarEvaluator`.

    Args:
        trainer: A trainer whose checkpoint holds what is evaluated, with an `evaluate_step`.
        data: The dataset.
        checkpoint_dir: The directory to which the training saves; default: that of the trainer's manager.
        steps: The largest number of steps of an evaluation; default: the whole dataset.
        max_evaluations: The number of evaluations after which it ends; default: it ends with the training.
        callbacks: Callbacks, whose `on_epoch_end` gets the values of each evaluation; an `EarlyStopping` ends the
            training.

    Raises:
        TypeError, ValueError: An argument has a wrong type, or the trainer lacks what is needed.
    """

    def __init__(
        self,
        trainer: Trainer,
        data: Any,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        *,
        steps: int | None = None,
        max_evaluations: int | None = None,
        callbacks: Iterable[Any] = (),
    ) -> None:
        if not isinstance(trainer, Trainer):
            raise TypeError(f"`trainer` must be a mpidist.Trainer, got {described(trainer)}")
        if trainer.checkpoint is None or trainer.evaluate_step is None:
            missing = "a `checkpoint`" if trainer.checkpoint is None else "an `evaluate_step`"
            raise ValueError(f"a SidecarEvaluator needs a Trainer with {missing}")
        if checkpoint_dir is None and trainer.manager is None:
            raise ValueError("`checkpoint_dir` is needed where the Trainer has a Checkpoint and no CheckpointManager")
        self._trainer, self._data = trainer, data
        place = trainer.manager.directory if checkpoint_dir is None and trainer.manager else checkpoint_dir
        self._directory = as_path("checkpoint_dir", place)
        self._steps = None if steps is None else whole("steps", steps, least=1)
        self._most = None if max_evaluations is None else whole("max_evaluations", max_evaluations, least=1)
        self._hooks = CallbackHooks(callbacks, trainer, {"epochs": None, "steps": None})

    def start(self) -> History:
        """Collective over the trainer's ranks, on an evaluator alone. Evaluate each checkpoint until the training ends.

        Returns:
            The values of all evaluations, with the numbers of the epochs in which they were saved.

        Raises:
            Exception: See `Trainer.evaluate` and `mpidist.checkpoints_iterator`.
        """
        trainer, found = self._trainer, History()
        position = trainer.position
        self._hooks.call("on_train_begin", {})
        for path in checkpoints_iterator(self._directory, restore=trainer.checkpoint):
            values = trainer.evaluate(self._data, self._steps)
            logs = {f"val_{name}": value for name, value in values.items()}
            if trainer.is_writer:
                shown = ", ".join(f"{name} {value:.5g}" for name, value in sorted(logs.items()))
                logger.info("%s, step %d: %s", path, position.total, shown)
                self._report(path, logs)
            found.add(position.epoch, logs)
            self._hooks.call("on_epoch_end", max(0, position.epoch - 1), logs)
            if trainer.stop_training and trainer.is_writer:
                ask_to_stop(self._directory)
            if self._most is not None and len(found.epoch) >= self._most:
                break
        self._hooks.call("on_train_end", {})
        return found

    def _report(self, path: str, logs: Logs) -> None:
        """Local. Let the training's manager know the metrics of a checkpoint, for its `keep_best`."""
        if self._trainer.manager is not None:
            # It may have been deleted while it was evaluated.
            with suppress(FileNotFoundError):
                self._trainer.manager.report(path, logs)


def ask_to_stop(directory: str) -> None:
    """Local. Ask the training that saves to a directory to end."""
    path = Path(directory, STOP_FILE)
    beside = path.with_name(f".{STOP_FILE}.{os.getpid()}")
    beside.write_text("the evaluator asks the training to end\n")
    beside.replace(path)


class EvaluatedCheckpoint(ModelCheckpoint):
    """Local; its hooks are Collective. Saves as `ModelCheckpoint`, for an evaluator, which reports the metrics.

    It ends the training when the evaluator asks for it; the chief looks, without a collective call.

    Args:
        save_freq: See `ModelCheckpoint`.
        clock: A monotonic clock in seconds; tests pass their own.
    """

    def __init__(self, save_freq: int | str = "epoch", clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(save_freq)
        self._clock = clock
        self._seen: object = None
        self._next_look = 0.0

    @override
    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Local. See `Callback.on_train_begin`."""
        super().on_train_begin(logs)
        # What an evaluation of an earlier training has asked for is over.
        self._seen = self._look()

    @override
    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Collective where a save may be due."""
        super().on_train_batch_end(batch, logs)
        if self._clock() >= self._next_look:
            self._stop_if_asked()

    @override
    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Collective where a save is due."""
        super().on_epoch_end(epoch, logs)
        self._stop_if_asked()

    @override
    def _metrics_of(self, logs: Logs) -> Logs | None:
        return None

    def _stop_if_asked(self) -> None:
        self._next_look = self._clock() + _LOOK_SECONDS
        if self._look() != self._seen:
            self.trainer.stop_training = True

    def _look(self) -> object:
        manager = self.trainer.manager
        if manager is None or not self.trainer.is_writer:
            return None
        try:
            status = os.stat(os.path.join(manager.directory, STOP_FILE))
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns
