"""`TrainingTimeLimit` and `TerminateOnNaN`: callbacks that leave a training."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

from typing_extensions import override

from mpidist.arguments import number
from mpidist.training.callbacks.callback import Callback, Logs

logger = logging.getLogger("mpidist")


class TrainingTimeLimit(Callback):
    """Local. Lets all ranks leave `fit` when the clock of any rank says that the time is over.

    The training is not complete then: the same program, started again, continues in the middle of the epoch.
    `Preemption` saves before the end of a job, and lets the job be requeued.

    Args:
        seconds: The time, from the beginning of `fit`.
        clock: A monotonic clock in seconds; tests pass their own.

    Raises:
        TypeError, ValueError: `seconds` is no number, or negative.
    """

    def __init__(self, seconds: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = number("seconds", seconds, least=0)
        self._clock = clock
        self._ends = math.inf

    @override
    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Local. See `Callback.on_train_begin`."""
        self._ends = self._clock() + self.seconds

    @override
    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Local. See `Callback.on_train_batch_end`."""
        if self._clock() >= self._ends:
            self.trainer.pause()


class TerminateOnNaN(Callback):
    """Local. Ends the training when a mean of a step is not finite.

    Args:
        monitor: The name of the value.
    """

    def __init__(self, monitor: str = "loss") -> None:
        self.monitor = monitor

    @override
    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Local. See `Callback.on_train_batch_end`."""
        value = (logs or {}).get(self.monitor)
        if value is not None and not math.isfinite(value):
            if self.trainer.is_writer:
                logger.warning("the training ends, since %r of step %d is %s", self.monitor, batch, value)
            self.trainer.stop_training = True
