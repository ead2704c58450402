"""`ProgressBar`: shows the progress of a training on the chief."""

from __future__ import annotations

from contextlib import suppress
from types import TracebackType
from typing import TextIO

from typing_extensions import override

from mpidist.arguments import whole
from mpidist.observe.progress import Progress
from mpidist.training.callbacks.callback import Callback, Logs


class ProgressBar(Callback):
    """Local. Shows the steps of a training, and the values of epochs: a bar on a terminal, lines in a log file.

    Args:
        every: The number of epochs between two lines with values; the last epoch always has one. 0: none.
        stream: The output; default: stderr.

    Raises:
        TypeError, ValueError: `every` is no integer, or negative.
    """

    def __init__(self, every: int = 1, *, stream: TextIO | None = None) -> None:
        self.every = whole("every", every, least=0)
        self._stream = stream
        self._progress: Progress | None = None

    @override
    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Local. See `Callback.on_train_begin`."""
        steps, epochs = self.params["steps"], self.params["epochs"]
        position = self.trainer.position
        total = None if steps is None else max(steps * epochs, position.total)
        with suppress(ValueError):
            self._progress = Progress(total, description="training", initial=position.total, stream=self._stream)
        if position.total and self._progress is not None:
            self._progress.write(f"resumed after epoch {position.epoch}, step {position.total}")

    @override
    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Local. See `Callback.on_train_batch_end`."""
        if self._progress is not None:
            self._progress.update(1, **{name: value for name, value in (logs or {}).items() if name != "steps"})

    @override
    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Local. See `Callback.on_epoch_end`."""
        is_shown = self.every and ((epoch + 1) % self.every == 0 or epoch + 1 == self.params["epochs"])
        if self._progress is not None and is_shown:
            values = ", ".join(f"{name} {value:.5f}" for name, value in (logs or {}).items())
            self._progress.write(f"epoch {epoch + 1}: {values}")

    @override
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.close()
        self._progress = None
