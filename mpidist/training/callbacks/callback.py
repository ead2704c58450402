"""`Callback`: what is done at certain moments of a training; with the names of Keras's hooks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Protocol

from mpidist.checkpoint.checkpoint import Checkpoint
from mpidist.checkpoint.manager import CheckpointManager
from mpidist.strategy.base import Strategy
from mpidist.training.position import TrainingPosition

Logs = Mapping[str, float]


class Trained(Protocol):
    """The trainer, as a callback sees it.

    Attributes:
        stop_training: Set it to True on any rank to end the training on all of them.
    """

    stop_training: bool

    @property
    def strategy(self) -> Strategy:
        """Local. The strategy."""
        ...

    @property
    def position(self) -> TrainingPosition:
        """Local. The position of the training."""
        ...

    @property
    def is_writer(self) -> bool:
        """Local. Whether this rank prints and writes for all."""
        ...

    @property
    def checkpoint(self) -> Checkpoint | None:
        """Local. The Checkpoint of what is trained; None where the trainer has none."""
        ...

    @property
    def manager(self) -> CheckpointManager | None:
        """Local. The CheckpointManager; None where the trainer has none."""
        ...

    def pause(self) -> None:
        """Local. Leave `fit` on all ranks; another program continues there."""
        ...

    def save(self, metrics: Logs | None = None, *, check_interval: bool = True) -> str | None:
        """Collective. Save a checkpoint, after steps that are under way."""
        ...

    def step_by(self, around: Callable[[Callable[[], Any]], Any]) -> None:
        """Local. Let a function make each step: it gets the step as an argument, and calls it."""
        ...


class Callback:
    """Local. The base class of callbacks: each method does nothing.

    Every rank has its own object, and calls its methods at the same moments, between steps. So a method may make
    collective calls, if it makes them on every rank alike. An exception of one rank alone ends the job.

    A callback is entered as a context manager for the duration of `fit`.

    Attributes:
        trainer: The trainer, from the beginning of `fit` on.
        params: `epochs` and `steps` of the `fit`.
    """

    trainer: Trained
    params: Mapping[str, Any]

    def set_model(self, model: Trained) -> None:
        """Local. Take the trainer, which Keras's callbacks call a model."""
        self.trainer = model

    def set_params(self, params: Mapping[str, Any]) -> None:
        """Local. Take the parameters of `fit`."""
        self.params = params

    def state(self) -> dict[str, Any]:
        """Local. The numbers and arrays that a checkpoint keeps, by name; the same on every rank."""
        return {}

    def load_state(self, saved: Mapping[str, Any]) -> None:
        """Local. Take the arrays of a checkpoint; a number is one without dimensions."""

    def restore(self) -> bool:
        """Collective. Restore the latest checkpoint in the trainer's place; False if the trainer is to do it."""
        return False

    def __enter__(self) -> Callback:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Local. End what the callback has begun."""

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Local. Called at the beginning of `fit`, after a checkpoint was restored."""

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Local. Called at the end of `fit`, with the values of the last epoch."""

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Local. Called at the beginning of an epoch, or where it is resumed."""

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Local. Called at the end of an epoch, with its values, the same on every rank."""

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """Local. Called before a step."""

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Local. Called after a step, with the means over its global batch, without metrics."""

    def on_test_begin(self, logs: Logs | None = None) -> None:
        """Local. Called at the beginning of an evaluation."""

    def on_test_end(self, logs: Logs | None = None) -> None:
        """Local. Called at the end of an evaluation, with its values."""

    def on_test_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """Local. Called before a step of an evaluation."""

    def on_test_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Local. Called after a step of an evaluation, with the means over its global batch."""
