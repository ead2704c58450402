"""The manager of a directory of checkpoints: numbers them, keeps the last ones, and restores the latest."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from types import TracebackType

from mpidist.checkpoint.checkpoint import Checkpoint
from mpidist.checkpoint.directory import (
    CheckpointEntry,
    DirectoryState,
    DirectoryWork,
    delete_checkpoints,
    file_of,
    latest_checkpoint,
    read_state,
    remove_leftovers,
    retire,
    write_state,
)
from mpidist.checkpoint.lock import DirectoryLock
from mpidist.variables.variable import Variable

__all__ = ["CheckpointManager", "latest_checkpoint"]

SECONDS_PER_HOUR = 3600.0


class CheckpointManager:
    """Saves a checkpoint again and again to one directory, and deletes the oldest files.

    Local. The directory is locked from the first save until `close`, or until the program ends; restoring needs no
    lock. Files are called `ckpt-1.h5`, `ckpt-2.h5`, …; the file `checkpoint` names the latest.

    Args:
        checkpoint: The objects to save.
        directory: The directory; the first save makes it where it is missing.
        max_to_keep: Number of checkpoints that stay; None keeps all.
        keep_checkpoint_every_n_hours: A checkpoint that would be deleted stays for ever if it was saved at least so
            many hours after the last one that stays for ever.
        checkpoint_name: First part of the files' names.
        step_counter: A variable that counts the steps; needed for `checkpoint_interval`.
        checkpoint_interval: `save` does nothing until so many steps have been made since the last save.
        init_fn: `restore_or_initialize` calls it when there is nothing to restore.

    Raises:
        ValueError: An impossible argument, or an empty state file.
    """

    def __init__(  # noqa: PLR0913  # tf.train.CheckpointManager's signature
        self,
        checkpoint: Checkpoint,
        directory: str | os.PathLike[str],
        max_to_keep: int | None,
        keep_checkpoint_every_n_hours: float | None = None,
        checkpoint_name: str = "ckpt",
        step_counter: Variable | None = None,
        checkpoint_interval: int | None = None,
        init_fn: Callable[[], object] | None = None,
    ) -> None:
        if max_to_keep is not None and max_to_keep <= 0:
            raise ValueError(f"`max_to_keep` must be a positive integer, or None to keep all, got {max_to_keep!r}")
        if checkpoint_interval is not None and step_counter is None:
            raise ValueError(f"`checkpoint_interval={checkpoint_interval!r}` needs a `step_counter`, got None")
        if os.sep in checkpoint_name or not checkpoint_name:
            raise ValueError(
                f"`checkpoint_name` must be a plain file name, got {checkpoint_name!r}. A directory is for `directory`"
            )
        self._checkpoint = checkpoint
        self._directory = os.fsdecode(directory)
        self._max_to_keep = max_to_keep
        hours = keep_checkpoint_every_n_hours
        self._keep_every_seconds = None if hours is None else hours * SECONDS_PER_HOUR
        self._name = checkpoint_name
        self._step_counter = step_counter
        self._interval = checkpoint_interval
        self._init_fn = init_fn
        self._last_step: int | None = None
        self._lock = DirectoryLock(self._directory)
        state = read_state(self._directory) or DirectoryState((), time.time())
        present = tuple(entry for entry in state.entries if os.path.isfile(self._path(entry.name)))
        self._state = DirectoryState(present, state.last_preserved)

    @property
    def checkpoint(self) -> Checkpoint:
        """Local. The objects that are saved."""
        return self._checkpoint

    @property
    def directory(self) -> str:
        """Local. The directory to which they are saved."""
        return self._directory

    @property
    def checkpoint_interval(self) -> int | None:
        """Local. The smallest number of steps between two saves."""
        return self._interval

    @property
    def latest_checkpoint(self) -> str | None:
        """Local. Path of the checkpoint that this program, or an earlier one, saved last; None if there is none."""
        return self.checkpoints[-1] if self._state.entries else None

    @property
    def checkpoints(self) -> list[str]:
        """Local. Paths of the checkpoints that are kept for now, the latest last."""
        return [self._path(entry.name) for entry in self._state.entries]

    def save(self, checkpoint_number: int | None = None, check_interval: bool = True) -> str | None:
        """Collective. Save the next checkpoint, and delete the oldest ones beyond `max_to_keep`.

        Args:
            checkpoint_number: Number in the file's name; default: the number of saves.
            check_interval: Save only when `checkpoint_interval` steps have been made since the last save.

        Returns:
            The path, or None where it is too early to save.

        Raises:
            CheckpointError: On every rank: another job saves to the directory, or values of an earlier restore still
                wait for an object.
            OSError: On every rank, if any rank cannot write. The checkpoints and the state file are as before.
            MismatchError: The ranks hold different objects.
        """
        found = self._checkpoint.find_objects()
        if self._checkpoint.pending is not None:
            self._checkpoint.pending.require_restored(found)
        step = self._step()
        # Rank 0 decides, and its list of checkpoints counts: what another rank has read of the directory may be old.
        is_due, self._state = found.group().broadcast_object((self._is_due(step, check_interval), self._state))
        if not is_due:
            return None
        number = self._checkpoint.save_counter + 1 if checkpoint_number is None else checkpoint_number
        path = self._path(f"{self._name}-{number}")
        name = os.path.basename(path)
        work = DirectoryWork(self._prepare, lambda now: self._update(self._with_entry(name, now)))
        saved_at = self._checkpoint.save_found(found, path, work)
        self._state, _ = self._retire(self._with_entry(name, saved_at))
        self._last_step = step
        return path

    def restore_or_initialize(self) -> str | None:
        """Collective. Restore the latest checkpoint, or call `init_fn` when there is none.

        Returns:
            The path, or None.

        Raises:
            CheckpointError: On every rank: the checkpoint is damaged, or does not fit the objects.
        """
        found = self._checkpoint.find_objects()
        path = found.group().broadcast_object(self.latest_checkpoint)
        if path is None:
            if self._init_fn is not None:
                self._init_fn()
            return None
        self._checkpoint.restore_found(found, path)
        self._last_step = self._step()
        return path

    def close(self) -> None:
        """Local. Let another job save to the directory; a later `save` locks it again."""
        self._lock.release()

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _path(self, name: str) -> str:
        return file_of(os.path.join(self._directory, name))

    def _step(self) -> int | None:
        return None if self._step_counter is None else int(self._step_counter.value())

    def _is_due(self, step: int | None, check_interval: bool) -> bool:
        if self._interval is None or step is None or self._last_step is None:
            return True
        return step != self._last_step and not (check_interval and step < self._last_step + self._interval)

    def _prepare(self) -> None:
        self._lock.acquire()
        remove_leftovers(self._directory, self._name)

    def _with_entry(self, name: str, now: float) -> DirectoryState:
        entries = tuple(old for old in self._state.entries if old.name != name)
        return DirectoryState((*entries, CheckpointEntry(name, now)), self._state.last_preserved)

    def _retire(self, state: DirectoryState) -> tuple[DirectoryState, list[str]]:
        return retire(state, self._max_to_keep, self._keep_every_seconds)

    def _update(self, state: DirectoryState) -> None:
        # First the state file names the new checkpoint, then old ones go: after a kill in between there is always a
        # latest checkpoint, and its file is there.
        try:
            write_state(self._directory, state)
        except OSError:
            # No state file will ever name the new checkpoint, so nothing would delete it.
            with contextlib.suppress(OSError):
                os.unlink(self._path(state.entries[-1].name))
            raise
        kept, gone = self._retire(state)
        if kept != state:
            delete_checkpoints(self._directory, gone)
            write_state(self._directory, kept)
