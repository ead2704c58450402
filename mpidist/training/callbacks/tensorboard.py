"""`TensorBoard`: writes the values of a training for TensorBoard."""

from __future__ import annotations

import os
from contextlib import ExitStack
from types import TracebackType

from typing_extensions import override

from mpidist import summary
from mpidist.arguments import whole
from mpidist.checkpoint.directory.state import as_path
from mpidist.comm.group.agreement import on_first_rank
from mpidist.summary.writer import SummaryWriter
from mpidist.training.callbacks.callback import Callback, Logs


class TensorBoard(Callback):
    """Collective. Writes the values of epochs for TensorBoard, as Keras's: below `train` and `validation`.

    It needs the extra `tensorboard`. The chief writes; an error of it is raised on every rank.

    Args:
        log_dir: The directory.
        update_freq: "epoch"; or also the means of each step: "batch", or every so many steps.

    Raises:
        TypeError, ValueError: An argument has a wrong type, or is out of range.
    """

    def __init__(self, log_dir: str | os.PathLike[str] = "logs", update_freq: str | int = "epoch") -> None:
        self.log_dir = as_path("log_dir", log_dir)
        named = {"epoch": 0, "batch": 1}
        self.update_freq = (
            named[update_freq] if isinstance(update_freq, str) and update_freq in named
            else whole("update_freq", update_freq, least=1)
        )
        self._writers: dict[str, SummaryWriter] = {}

    @override
    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Collective where values are written."""
        total = self.trainer.position.total
        if self.update_freq and total % self.update_freq == 0:
            self._write({f"batch_{name}": value for name, value in (logs or {}).items()}, total)

    @override
    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Collective. See `Callback.on_epoch_end`."""
        self._write({f"epoch_{name}": value for name, value in (logs or {}).items()}, epoch)

    def _write(self, values: dict[str, float], step: int) -> None:
        trainer = self.trainer

        def write() -> None:
            for name, value in values.items() if trainer.is_writer else ():
                is_validation = name.startswith("epoch_val_")
                part = "validation" if is_validation else "train"
                if part not in self._writers:
                    self._writers[part] = summary.create_file_writer(os.path.join(self.log_dir, part))
                with self._writers[part].as_default():
                    summary.scalar(name.replace("epoch_val_", "epoch_"), value, step=step)

        on_first_rank(trainer.strategy.replicas.everyone, f"writing to {self.log_dir!r}", write)

    @override
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with ExitStack() as stack:
            for writer in self._writers.values():
                stack.callback(writer.close)
        self._writers = {}
