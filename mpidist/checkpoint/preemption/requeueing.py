"""The decision whether a job that has saved its last checkpoint is requeued, and its steps."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

from mpidist.checkpoint.manager import CheckpointManager
from mpidist.cluster.slurm import job

logger = logging.getLogger("mpidist")


class StepCounts:
    """The number of steps, in this program and in those before it; a checkpoint saves it.

    Attributes:
        count: The number.
        restored: The number that the last checkpoint had.
    """

    def __init__(self) -> None:
        self.count = self.restored = 0

    def state(self) -> dict[str, Any]:
        """Local. The number."""
        return {"count": self.count}

    def load_state(self, saved: Mapping[str, Any]) -> None:
        """Local. Take the saved number."""
        self.count = self.restored = int(saved["count"])


class Requeueing:
    """Local. The conditions under which the job is requeued.

    Args:
        manager: The manager that saves the checkpoints; it has restored the latest one.
        most: The largest number of requeues; None: no limit.
        has_come_further: A function that returns whether steps were made since then.
    """

    def __init__(self, manager: CheckpointManager, most: int | None, has_come_further: Callable[[], bool]) -> None:
        self._manager = manager
        self._most = most
        self._has_come_further = has_come_further
        self._started_from = self._latest()

    def requeue(self, saved: object) -> None:
        """Local. Let Slurm requeue the job, or warn with the reason why it does not.

        Args:
            saved: The path of the checkpoint, or what the user's function returned.
        """
        count = job.restart_count()
        if self._most is not None and count >= self._most:
            logger.warning(
                "the job is not requeued: it was requeued %d time(s), and `max_requeues` is %d", count, self._most
            )
        elif self._is_new(saved):
            try:
                logger.warning("job %s is requeued", job.requeue())
            except Exception as error:
                # For any error: the checkpoint is saved, and the program ends with the requested exit code.
                logger.warning("the job is not requeued: %s", str(error) or repr(error))
        else:
            logger.warning(
                "the job is not requeued: no newer checkpoint was saved since its start (the last one is %s), so it "
                "would never finish. Give it more time, or shorten its steps",
                self._started_from[0] or "none",
            )

    def _is_new(self, saved: object) -> bool:
        """Whether there is a checkpoint that is newer than the start of this program, and further."""
        is_own = isinstance(saved, (str, os.PathLike)) and os.path.exists(saved)
        latest = self._latest()
        return self._has_come_further() and (is_own or (bool(latest[0]) and latest != self._started_from))

    def _latest(self) -> tuple[str, int]:
        """The latest checkpoint, and the time at which it was written."""
        path = self._manager.latest_checkpoint
        if path is None:
            return "", 0
        try:
            return path, os.stat(path).st_mtime_ns
        except OSError:
            return "", 0
