"""`ModelCheckpoint`: saves checkpoints while a training runs."""

from __future__ import annotations

from typing_extensions import override

from mpidist.arguments import whole
from mpidist.checkpoint.manager import CheckpointManager
from mpidist.training.callbacks.callback import Callback, Logs


class ModelCheckpoint(Callback):
    """Local; its hooks are Collective. Saves by the trainer's `CheckpointManager`.

    A trainer with a manager has one that saves at the end of each epoch, unless its `fit` is given another one. It
    saves after what other callbacks do at the same moment, and at the end of `fit`, if there is something new. The
    values of an epoch are the metrics of the checkpoint at its end, for `keep_best` of the manager. Copies in memory
    (`memory` of the manager) are made after any step. What the manager saves in the background is complete when `fit`
    returns.

    Args:
        save_freq: "epoch", or a number of steps after which `CheckpointManager.save` is called; a `checkpoint_interval`
            of the manager decides which of these calls save.

    Raises:
        TypeError, ValueError: `save_freq` is neither "epoch" nor a positive integer.
    """

    def __init__(self, save_freq: int | str = "epoch") -> None:
        self.save_freq = None if save_freq == "epoch" else whole("save_freq", save_freq, least=1)
        self._saved: tuple[int, int, bool] = (0, 0, False)
        self._was_left_out = False

    @override
    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Local. See `Callback.on_train_begin`.

        Raises:
            ValueError: The trainer has no CheckpointManager.
        """
        self._manager()
        self._saved = self._place()

    @override
    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Collective where a save may be due."""
        total, before = self.trainer.position.total, self._saved[1]
        if self.save_freq is not None and total // self.save_freq != before // self.save_freq:
            self._save(None, check_interval=True)
        elif self.trainer.manager is not None:
            self.trainer.manager.copy()

    @override
    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Collective where a save is due."""
        if self.save_freq is None:
            self._save(self._metrics_of(logs or {}), check_interval=True)

    @override
    def on_train_end(self, logs: Logs | None = None) -> None:
        """Collective. Save what is new, and wait for what is saved in the background."""
        if self._saved != self._place() or self._was_left_out:
            self._save(None, check_interval=False)
        self._manager().sync()

    def _metrics_of(self, logs: Logs) -> Logs | None:
        """The metrics of the checkpoint at the end of an epoch; None where others report them."""
        return logs

    def _save(self, logs: Logs | None, *, check_interval: bool) -> None:
        path = self.trainer.save(logs, check_interval=check_interval)
        # While another one was under way in the background.
        self._was_left_out = path is None and self._manager().checkpoint.saving is not None
        if path is not None or check_interval:
            self._saved = self._place()

    def _manager(self) -> CheckpointManager:
        manager = self.trainer.manager
        if manager is None:
            raise ValueError(
                "ModelCheckpoint needs a CheckpointManager: give the Trainer checkpoint=mpidist.CheckpointManager(...)"
            )
        return manager

    def _place(self) -> tuple[int, int, bool]:
        position = self.trainer.position
        return position.epoch, position.total, position.is_ended
