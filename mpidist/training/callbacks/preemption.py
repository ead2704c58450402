"""`Preemption`: a training whose job is about to end saves, and ends with a code of its own."""

from __future__ import annotations

from types import TracebackType

from typing_extensions import override

from mpidist.checkpoint.preemption.handler import PreemptionCheckpointHandler
from mpidist.checkpoint.preemption.termination import TerminationConfig
from mpidist.training.callbacks.callback import Callback, Logs


class Preemption(Callback):
    """Collective. Makes the steps of a training by a `PreemptionCheckpointHandler`, also those of evaluations in it.

    At a notice of the job's end all ranks save at the same step and end with the code of the settings; the same
    program, started again, continues there. The handler watches for notices from the first `fit` on, until `close` or
    the end of the program.

    Args:
        termination_config: The settings of the handler.
    """

    def __init__(self, termination_config: TerminationConfig | None = None) -> None:
        self.termination_config = termination_config
        self.handler: PreemptionCheckpointHandler | None = None

    @override
    def restore(self) -> bool:
        """Collective. Restore the latest checkpoint, by the handler.

        Raises:
            ValueError: The trainer has no CheckpointManager.
        """
        trainer = self.trainer
        if trainer.manager is None:
            raise ValueError(
                "Preemption needs a CheckpointManager: give the Trainer checkpoint=mpidist.CheckpointManager(...)"
            )
        if self.handler is not None:
            return False
        if trainer.position.call:
            # It would bring back the state of an earlier save.
            trainer.save(check_interval=False)
        self.handler = PreemptionCheckpointHandler(
            trainer.strategy.cluster_resolver, trainer.manager, termination_config=self.termination_config
        )
        return True

    @override
    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Local. See `Callback.on_train_begin`."""
        if self.handler is not None:
            self.trainer.step_by(self.handler.run)

    def close(self) -> None:
        """Local. Watch for notices no longer."""
        if self.handler is not None:
            self.handler.close()
        self.handler = None

    @override
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self.handler is not None:
            handler, self.handler = self.handler, None
            handler.__exit__(kind, error, trace)
