"""The manager of a directory of checkpoints: numbers them, keeps the last ones, and restores the latest."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from mpidist.arguments import flag, whole
from mpidist.attributes import FixedAttributes
from mpidist.checkpoint.background.save import wait_for_saves
from mpidist.checkpoint.checkpoint import Checkpoint
from mpidist.checkpoint.deciding import Given, check_names, checked_checkpoint, decide_together
from mpidist.checkpoint.directory.keeping import checked_metrics, keeping_rules, write_metrics
from mpidist.checkpoint.directory.latest import latest_checkpoint
from mpidist.checkpoint.directory.managed import ManagedDirectory
from mpidist.checkpoint.directory.state import CheckpointEntry, DirectoryState, DirectoryWork, as_path, file_of
from mpidist.checkpoint.file.choice import Choice, Rename
from mpidist.checkpoint.options import CheckpointOptions, is_in_background
from mpidist.checkpoint.saves import SaveOrder
from mpidist.checkpoint.walk.found import Found
from mpidist.comm.first_use import at_first_use
from mpidist.errors import DamagedCheckpointError
from mpidist.failures.restart.notes import note
from mpidist.variables.variable import BaseVariable

if TYPE_CHECKING:
    from mpidist.checkpoint.memory.copies import MemoryCopies, memory_copies
else:
    memory_copies = at_first_use("mpidist.checkpoint.memory.copies", "memory_copies")

__all__ = ["CheckpointManager", "latest_checkpoint"]

logger = logging.getLogger("mpidist")
T = TypeVar("T")

# In the place of a number: a save in the background is under way.
UNDER_WAY = -1


class CheckpointManager(FixedAttributes):
    """Local. Saves numbered checkpoints to one directory, and deletes the oldest ones.

    The directory is locked from the first save until `close`, or until the program ends; restoring needs no
    lock. Files are called `ckpt-1.h5`, `ckpt-2.h5`, …; the file `checkpoint` names the latest.

    Args:
        checkpoint: The objects to save.
        directory: The directory; the first save makes it where it is missing.
        max_to_keep: Number of checkpoints to keep; None keeps all.
        keep_checkpoint_every_n_hours: A checkpoint that would be deleted is kept permanently if it was saved at least
            this many hours after the last one that was kept permanently.
        checkpoint_name: First part of the files' names.
        step_counter: A variable that counts the steps; needed for `checkpoint_interval`.
        checkpoint_interval: `save` does nothing until this many steps have been made since the last save.
        init_fn: `restore_or_initialize` calls it when there is nothing to restore.
        last_checkpoint_step: The step of the last save, for `checkpoint_interval`, where nothing is restored.
        keep_best: The name of a metric: beside the latest ones, the checkpoint with its best value is kept, also by a
            program that resumes. One without a value stays for at most `max_to_keep` more saves, and is never the best.
        mode: Whether "min" or "max" of it is the best.
        keep_every_n_steps: A checkpoint whose step, by `step_counter`, is a multiple of this is kept permanently.
        memory: In a job that `mpidist run` has started: the number of steps (by `step_counter`, or calls of `save`)
            after which the objects are copied into the memory of the nodes, from which a restart continues. True: the
            number with which copies take a hundredth of the time. `checkpoint_interval` is that of the disk.
        background: Whether `save` copies the values and returns, while a thread writes; see `Checkpoint.save`.
        skip_while_saving: Whether `save` returns None, and does not wait, while a save in the background is under way.

    Raises:
        ValueError: An argument is out of range, or needs a `step_counter` that is not given.
        NotImplementedError: Copies in memory under `ParameterServerStrategy` or `HybridStrategy`.
        TypeError: `checkpoint` is no `Checkpoint`, `directory` no path, or another argument has a wrong type.
        CheckpointError: The state file is no regular file.
    """

    _is_settled = True

    def __init__(  # noqa: PLR0913  # tf.train.CheckpointManager's signature
        self,
        checkpoint: Checkpoint,
        directory: str | os.PathLike[str],
        max_to_keep: int | None,
        keep_checkpoint_every_n_hours: float | None = None,
        checkpoint_name: str = "ckpt",
        step_counter: BaseVariable | None = None,
        checkpoint_interval: int | None = None,
        init_fn: Callable[[], object] | None = None,
        last_checkpoint_step: int | None = None,
        *,
        keep_best: str | None = None,
        mode: str = "min",
        keep_every_n_steps: int | None = None,
        memory: bool | int = False,
        background: bool = False,
        skip_while_saving: bool = False,
    ) -> None:
        self._checkpoint = checked_checkpoint(checkpoint)
        rules = keeping_rules(max_to_keep, keep_checkpoint_every_n_hours, keep_best, mode, keep_every_n_steps)
        check_names(checkpoint_name, step_counter, {
            "checkpoint_interval": checkpoint_interval, "last_checkpoint_step": last_checkpoint_step,
            "keep_every_n_steps": keep_every_n_steps,
        })
        self._in_background = flag("background", background)
        self._skips = flag("skip_while_saving", skip_while_saving)
        self._step_counter = step_counter
        self._interval = None if checkpoint_interval is None else whole(
            "checkpoint_interval", checkpoint_interval, least=0
        )
        self._init_fn = init_fn
        self._last_step = None if last_checkpoint_step is None else whole("last_checkpoint_step", last_checkpoint_step)
        self._files = ManagedDirectory(as_path("directory", directory), checkpoint_name, rules)
        self._memory: MemoryCopies | None = None
        if memory is not False and memory is not None:
            self._memory = memory_copies(checkpoint, (self._files.directory, checkpoint_name), memory)

    @property
    def checkpoint(self) -> Checkpoint:
        """Local. The objects that are saved."""
        return self._checkpoint

    @property
    def directory(self) -> str:
        """Local. The directory to which they are saved."""
        return self._files.directory

    @property
    def checkpoint_interval(self) -> int | None:
        """Local. The smallest number of steps between two saves."""
        return self._interval

    @property
    def latest_checkpoint(self) -> str | None:
        """Local. Path of the checkpoint that this program, or an earlier one, saved last; None if there is none.

        Raises:
            DamagedCheckpointError: There were checkpoints when the manager was made, and no state file named them.
        """
        return self._files.latest

    @property
    def metadata(self) -> dict[str, Any]:
        """Local. The notes in the checkpoint that was last saved or restored; empty where it has none."""
        return self._checkpoint.metadata

    @property
    def checkpoints(self) -> list[str]:
        """Local. Paths of the checkpoints that are kept for now, the latest last."""
        return [self._files.path(entry.name) for entry in self._files.state.entries]

    @property
    def best_checkpoint(self) -> str | None:
        """Local. Path of the checkpoint with the best value of the metric `keep_best`; None where none has a value."""
        files = self._files
        best = files.rules.best_of(files.rules.with_values(files.directory, files.state).entries)
        return None if best is None else files.path(best.name)

    @property
    def copies_memory(self) -> bool:
        """Local. Whether the objects are copied into memory between two checkpoints; see the argument `memory`."""
        return self._memory is not None and self._memory.is_on

    def copy(self) -> bool:
        """Collective where a copy in memory is due, else Local. Copy the objects, and nothing else.

        `save` does that, too, where the time for a checkpoint on the disk has not come.

        Returns:
            Whether they were copied.

        Raises:
            CheckpointError, MismatchError, ValueError: See `save`.
        """
        if self._memory is None:
            return False
        saving = self._checkpoint.saving
        under_way = "" if saving is None else os.path.basename(saving.path)
        return self._memory.offer(self._step(), self._last_step, (self._files.newest.timestamp, under_way))

    def report(self, path: str | os.PathLike[str], metrics: Mapping[str, Any]) -> None:
        """Local. Note metrics of a checkpoint in a file beside it; any process may do so, an evaluator for instance.

        The manager that saves reads them before it deletes checkpoints.

        Args:
            path: The checkpoint.
            metrics: Numbers by name; they replace those of the same names.

        Raises:
            FileNotFoundError: There is no such checkpoint, or no longer.
            TypeError: `metrics` is no dictionary of numbers.
            OSError: They cannot be written.
        """
        write_metrics(file_of(path), checked_metrics(metrics) or {})

    def save(
        self, checkpoint_number: int | BaseVariable | None = None, check_interval: bool = True,
        options: CheckpointOptions | None = None, *, metadata: Mapping[str, Any] | None = None,
        metrics: Mapping[str, Any] | None = None, background: bool | None = None,
    ) -> str | None:
        """Collective. Save the next checkpoint, and delete the oldest ones beyond `max_to_keep`.

        A manager deletes only what managers with its `checkpoint_name` have saved to the directory. If the directory
        has checkpoints that the state file does not name (it was lost), the numbers continue after theirs.

        Args:
            checkpoint_number: Number in the file's name, an integer or a variable that holds one; default: the number
                of saves. A file that has the number is replaced.
            check_interval: Save only when `checkpoint_interval` steps have been made since the last save.
            options: See `Checkpoint.save`.
            metadata: The program's own notes, see `Checkpoint.save`.
            metrics: Numbers by name, the same on all ranks; see `keep_best`.
            background: See `Checkpoint.save`; default: the argument of the constructor. `checkpoints` and
                `latest_checkpoint` change, and old files are deleted, at the next call after the file is complete.

        Returns:
            The path, or None where it is too early to save, or where `skip_while_saving` leaves this one out.

        Raises:
            CheckpointError: On every rank: another job saves to the directory, or has done so while this one waited for
                its lock; values of an earlier restore still wait for an object; or the path now names another
                directory, since the program has changed its working directory.
            OSError: On every rank, if any rank cannot write, or a directory is gone that had checkpoints. The
                checkpoints and the state file do not change.
            MismatchError: The ranks hold different objects, or have another directory, number, metrics or rules.
            TypeError, ValueError: On every rank: the number is no integer, or negative; JSON cannot hold the metadata;
                or a metric is no number.
        """
        step = self._step()
        if self._memory is not None and check_interval is True and not self._is_due(step, check_interval):
            # By what all ranks know: a call that copies nothing communicates nothing.
            self.copy()
            return None
        found = self._checkpoint.find_objects()
        if self._checkpoint.pending is not None:
            self._checkpoint.pending.require_restored(found)
        given: Any = checkpoint_number
        if isinstance(checkpoint_number, BaseVariable):
            given = checkpoint_number.numpy()[()]
        group = found.group()
        in_background = is_in_background(options, self._in_background if background is None else background)
        number = self._next_number(found, step, Given("check_interval", check_interval, given, metrics))
        if number is None:
            # It may be due, and left out while another one is written.
            self.copy()
            return None
        count = number
        if given is not None:
            number, count = int(given), self._checkpoint.save_counter + 1
        files = self._files
        path = files.path(f"{files.name}-{number}")
        noted = checked_metrics(metrics)
        value = files.rules.value_in(noted)
        entry = CheckpointEntry(os.path.basename(path), 0.0, files.rules.is_for_good(step), value=value)
        work = DirectoryWork(
            (files.take,), partial(files.announce, entry),
            lambda now: files.update(files.with_entry(entry, now), path, noted),
        )
        ended = partial(self._ended, entry, self._last_step)
        self._checkpoint.save_found(found, SaveOrder(path, work, count, metadata, in_background, ended))
        self._last_step = step
        if group.rank == 0:
            files.rules.warn_of(path, noted)
        if self._memory is not None:
            self._memory.count_from(step)
        return path

    def _ended(self, entry: CheckpointEntry, last_step: int | None, saved_at: float | None) -> None:
        """Local. Note the end of a save, with the step of the one before: None was saved where `saved_at` is None."""
        if saved_at is None:
            self._last_step = last_step
        else:
            self._files.state, _ = self._files.rules.retire(self._files.with_entry(entry, saved_at))

    def sync(self) -> None:
        """Collective. Wait until a save in the background is complete. See `Checkpoint.sync`, also for its errors."""
        self._checkpoint.sync()

    def restore_or_initialize(
        self, fallback: bool = False, *, partial: bool = False, rename: Rename | None = None, cast: bool = False,
        only: str | Sequence[str] | None = None,
    ) -> str | None:
        """Collective. Restore the latest checkpoint, or call `init_fn` when there is none.

        A copy in memory that is newer than the latest checkpoint, and whole, is taken instead; see `memory`.

        Args:
            fallback: Where the latest checkpoint is damaged, or the state file is lost, take the latest one that is
                whole, with a warning that names the others.
            partial: See `Checkpoint.restore`, also for the other arguments.
            rename: The paths in the program by those in the file.
            cast: Whether values are converted to the dtypes of the variables.
            only: The paths in the program that are restored.

        Returns:
            The path, or None; of copies in memory their directory.

        Raises:
            DamagedCheckpointError: On every rank: the checkpoint or the state file is damaged, or the state file is
                missing though there are checkpoints; with `fallback`: all checkpoints are damaged.
            FileNotFoundError: On every rank: another job has just deleted it.
            CheckpointError: On every rank: the checkpoint does not fit the objects; or the path names another
                directory, as for `save`.
            MismatchError: The ranks have different directories.
        """
        self._checkpoint.sync()
        found, choice = self._checkpoint.find_objects(), Choice(partial, rename, cast, only)
        group = found.group()
        with found.calls(group).during("restore"):
            names = decide_together(
                group, self._files, None, lambda: self._files.candidates(fallback=fallback), Given("fallback", fallback)
            )
        if self._memory is not None and (facts := self._memory.restore(found, choice, self._files.newest)) is not None:
            self._last_step = facts["last_step"]
            return str(facts["path"])
        for name in names:
            try:
                self._checkpoint.restore_found(found, self._files.path(name), choice)
            except (DamagedCheckpointError, FileNotFoundError) as error:
                if name == names[-1]:
                    raise
                if group.rank == 0:
                    logger.warning("%s. Continuing with the previous checkpoint", str(error))
                continue
            self._last_step = self._step()
            if self._files.state.latest is None:
                self._files.state = replace(self._files.state, latest=name)
            if group.rank == 0:
                note("restored", path=self._files.path(name), step=self._last_step)
            return self._files.path(name)
        if group.rank == 0:
            note("restored", path="")
        if self._init_fn is not None:
            self._init_fn()
        return None

    def close(self) -> None:
        """Local, but Collective where a save in the background has begun. Let another job save, until the next `save`.

        Raises:
            OSError, CheckpointError: On every rank, if any rank could not write what was saved in the background.
        """
        try:
            self._checkpoint.sync()
        finally:
            self._end()

    def _end(self) -> None:
        self._checkpoint.release()
        self._files.lock.release()

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            # Other ranks may be anywhere. What was saved in the background is completed.
            self._end()

    def _step(self) -> int | None:
        return None if self._step_counter is None else int(self._step_counter.value())

    def _is_due(self, step: int | None, check_interval: bool) -> bool:
        if self._interval is None or step is None or self._last_step is None:
            return True
        return step != self._last_step and not (check_interval and step < self._last_step + self._interval)

    def _next_number(self, found: Found, step: int | None, given: Given) -> int | None:
        """Collective. Decide whether to save; wait for a save in the background if so. None: not now."""
        group, files, number = found.group(), self._files, UNDER_WAY
        while number == UNDER_WAY:
            saving, decide = self._checkpoint.saving, partial(self._decide, found, step, given.value)
            with found.calls(group).during("save"):
                # Rank 0 decides, and its list of checkpoints counts: what another rank has read of the directory may be
                # old.
                is_due, number, self._files.state = decide_together(group, files, saving, decide, given)
            if saving is not None:
                if number == UNDER_WAY and (not is_due or (self._skips and given.value)):
                    return None
                # Also where it is too early to save: an error is raised soon.
                self._checkpoint.sync()
                number = UNDER_WAY
        return number if is_due else None

    def _decide(self, found: Found, step: int | None, check_interval: bool) -> tuple[bool, int, DirectoryState]:
        saving = self._checkpoint.saving
        if saving is not None:
            # Its thread works with the state.
            return self._is_due(step, check_interval), UNDER_WAY if saving.is_running else 0, self._files.state
        wait_for_saves(self._files.directory)
        count = self._checkpoint.save_counter + 1
        if not self._is_due(step, check_interval):
            return False, count, self._files.state
        return True, *self._files.next_save(count, is_written=found.is_written_here(found.group()))
