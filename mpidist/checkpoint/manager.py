"""The manager of a directory of checkpoints: numbers them, keeps the last ones, and restores the latest."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, TypeVar, cast

from mpidist.arguments import described, flag, number, whole
from mpidist.attributes import FixedAttributes
from mpidist.checkpoint.checkpoint import Checkpoint
from mpidist.checkpoint.directory.latest import latest_checkpoint
from mpidist.checkpoint.directory.leftovers import delete_checkpoints, remove_leftovers
from mpidist.checkpoint.directory.lock import DirectoryLock
from mpidist.checkpoint.directory.state import (
    CheckpointEntry,
    DirectoryState,
    DirectoryWork,
    as_path,
    candidates,
    file_of,
    numbers_of,
    read_state,
    retire,
    unnamed,
    write_state,
)
from mpidist.comm.group.agreement import exchange, require_same
from mpidist.comm.group.communicator import Communicator
from mpidist.errors import CheckpointError, DamagedCheckpointError
from mpidist.variables.variable import BaseVariable

__all__ = ["CheckpointManager", "latest_checkpoint"]

logger = logging.getLogger("mpidist")
T = TypeVar("T")

SECONDS_PER_HOUR = 3600.0


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

    Raises:
        ValueError: An argument is out of range, or needs a `step_counter` that is not given.
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
    ) -> None:
        if not isinstance(checkpoint, Checkpoint):
            raise TypeError(
                f"`checkpoint` must be a mpidist.Checkpoint, got {described(checkpoint)}. Put the object into one: "
                "CheckpointManager(mpidist.Checkpoint(model=...), ...)"
            )
        if max_to_keep is not None and whole("max_to_keep", max_to_keep) <= 0:
            raise ValueError(f"`max_to_keep` must be a positive integer, or None to keep all, got {max_to_keep!r}")
        steps = {"checkpoint_interval": checkpoint_interval, "last_checkpoint_step": last_checkpoint_step}
        for argument, value in steps.items():
            if value is not None and step_counter is None:
                raise ValueError(f"`{argument}={value!r}` needs a `step_counter`, got None")
        if step_counter is not None and not callable(getattr(step_counter, "value", None)):
            raise TypeError(f"`step_counter` must be a variable that counts steps, got {described(step_counter)}")
        if not isinstance(checkpoint_name, str):
            raise TypeError(f"`checkpoint_name` must be a string, got {described(checkpoint_name)}")
        if os.sep in checkpoint_name or not checkpoint_name:
            raise ValueError(
                f"`checkpoint_name` must be a plain file name, got {checkpoint_name!r}. A directory is for `directory`"
            )
        self._checkpoint = checkpoint
        self._directory = as_path("directory", directory)
        self._place = os.path.abspath(self._directory)
        self._max_to_keep = max_to_keep
        hours = keep_checkpoint_every_n_hours
        self._keep_every_seconds = None if hours is None else number(
            "keep_checkpoint_every_n_hours", hours, least=0
        ) * SECONDS_PER_HOUR
        self._name = checkpoint_name
        self._step_counter = step_counter
        self._interval = None if checkpoint_interval is None else whole(
            "checkpoint_interval", checkpoint_interval, least=0
        )
        self._init_fn = init_fn
        self._last_step = None if last_checkpoint_step is None else whole("last_checkpoint_step", last_checkpoint_step)
        self._lock = DirectoryLock(self._directory)
        # Damage and loss are errors of the methods that need the latest one; a program may restore an older one.
        self._state = self._present(read_state(self._directory, DirectoryState(last_preserved=time.time())))
        self._unnamed = [] if self._state.latest else [*self._numbers_of(candidates(self._directory, None))]

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
        """Local. Path of the checkpoint that this program, or an earlier one, saved last; None if there is none.

        Raises:
            DamagedCheckpointError: There were checkpoints when the manager was made, and no state file named them.
        """
        if self._state.latest is None and self._unnamed:
            raise unnamed(self._directory, self._unnamed)
        return None if self._state.latest is None else self._path(self._state.latest)

    @property
    def checkpoints(self) -> list[str]:
        """Local. Paths of the checkpoints that are kept for now, the latest last."""
        return [self._path(entry.name) for entry in self._state.entries]

    def save(self, checkpoint_number: int | BaseVariable | None = None, check_interval: bool = True) -> str | None:
        """Collective. Save the next checkpoint, and delete the oldest ones beyond `max_to_keep`.

        A manager deletes only what managers with its `checkpoint_name` have saved to the directory. If the directory
        has checkpoints that the state file does not name (it was lost), the numbers continue after theirs.

        Args:
            checkpoint_number: Number in the file's name, an integer or a variable that holds one; default: the number
                of saves. A file that has the number is replaced.
            check_interval: Save only when `checkpoint_interval` steps have been made since the last save.

        Returns:
            The path, or None where it is too early to save.

        Raises:
            CheckpointError: On every rank: another job saves to the directory, or has done so while this one waited for
                its lock; values of an earlier restore still wait for an object; or the path now names another
                directory, since the program has changed its working directory.
            OSError: On every rank, if any rank cannot write. The checkpoints and the state file do not change.
            MismatchError: The ranks hold different objects, or have another directory or number.
            TypeError, ValueError: On every rank: the number is no integer, or negative.
        """
        found = self._checkpoint.find_objects()
        if self._checkpoint.pending is not None:
            self._checkpoint.pending.require_restored(found)
        step = self._step()
        given: Any = checkpoint_number
        if isinstance(checkpoint_number, BaseVariable):
            given = checkpoint_number.numpy()[()]
        group = found.group()
        with found.calls(group).during("save"):
            # Rank 0 decides, and its list of checkpoints counts: what another rank has read of the directory may be
            # old.
            choice = "check_interval", check_interval
            is_due, number, self._state = self._agree(group, lambda: self._decide(step, check_interval), choice, given)
        if not is_due:
            return None
        count = number
        if given is not None:
            number, count = int(given), self._checkpoint.save_counter + 1
        path = self._path(f"{self._name}-{number}")
        name = os.path.basename(path)
        work = DirectoryWork(
            (self._take_directory, partial(remove_leftovers, self._directory, self._name)),
            lambda: self._announce(name), lambda now: self._update(self._with_entry(name, now)),
        )
        saved_at = self._checkpoint.save_found(found, path, work, count)
        self._state, _ = self._retire(self._with_entry(name, saved_at))
        self._last_step = step
        return path

    def restore_or_initialize(self, fallback: bool = False) -> str | None:
        """Collective. Restore the latest checkpoint, or call `init_fn` when there is none.

        Args:
            fallback: Where the latest checkpoint is damaged, or the state file is lost, take the latest one that is
                whole, with a warning that names the others.

        Returns:
            The path, or None.

        Raises:
            DamagedCheckpointError: On every rank: the checkpoint or the state file is damaged, or the state file is
                missing though there are checkpoints; with `fallback`: all checkpoints are damaged.
            FileNotFoundError: On every rank: another job has just deleted it.
            CheckpointError: On every rank: the checkpoint does not fit the objects; or the path names another
                directory, as for `save`.
            MismatchError: The ranks have different directories.
        """
        found = self._checkpoint.find_objects()
        group = found.group()
        with found.calls(group).during("restore"):
            names = self._agree(group, lambda: self._candidates(fallback=fallback), ("fallback", fallback))
        for name in names:
            try:
                self._checkpoint.restore_found(found, self._path(name))
            except (DamagedCheckpointError, FileNotFoundError) as error:
                if name == names[-1]:
                    raise
                if group.rank == 0:
                    logger.warning("%s. Continuing with the previous checkpoint", str(error))
                continue
            self._last_step = self._step()
            if self._state.latest is None:
                self._state = replace(self._state, latest=name)
            return self._path(name)
        if self._init_fn is not None:
            self._init_fn()
        return None

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

    def _has(self, name: str) -> bool:
        return os.path.isfile(self._path(name))

    def _numbers_of(self, names: Iterable[str]) -> dict[str, int]:
        return numbers_of(names, self._name)

    def _step(self) -> int | None:
        return None if self._step_counter is None else int(self._step_counter.value())

    def _is_due(self, step: int | None, check_interval: bool) -> bool:
        if self._interval is None or step is None or self._last_step is None:
            return True
        return step != self._last_step and not (check_interval and step < self._last_step + self._interval)

    def _agree(self, group: Communicator, decide: Callable[[], T], choice: tuple[str, Any], number: Any = None) -> T:
        """Collective. Call `decide` on rank 0 for all; raise on all where directories or numbers differ or are none.

        Args:
            group: The ranks.
            decide: Called on rank 0.
            choice: The name and the value of an argument that is True or False.
            number: The number of a checkpoint.
        """
        decision: T | None = None
        error: Exception | None = None
        try:
            number = None if number is None else whole("checkpoint_number", number, least=0)
            self._require_place()
            flag(*choice)
            decision = decide() if group.rank == 0 else None
        except Exception as caught:
            error = caught
        mine = self._directory, self._name, number
        everyone = exchange(group, f"looking into {self._directory!r}", (mine, decision), error)
        require_same(
            [place for place, _ in everyone], "directory, name and number of a CheckpointManager's checkpoint",
            "Pass the same ones on every rank.",
        )
        return cast(T, everyone[0][1])

    def _require_place(self) -> None:
        place = os.path.abspath(self._directory)
        if place != self._place:
            # It would delete old checkpoints of another job that saves there.
            raise CheckpointError(
                f"`directory` {self._directory!r} of a CheckpointManager was expected to be {self._place!r} as when it "
                f"was made, got {place!r}: the program has changed its working directory. Pass an absolute path"
            )

    def _present(self, state: DirectoryState) -> DirectoryState:
        """The part of a state file whose files exist: checkpoints of managers of this name, and the latest of all."""
        own = self._numbers_of(entry.name for entry in state.entries)
        present = tuple(entry for entry in state.entries if entry.name in own and self._has(entry.name))
        latest = state.latest if state.latest is not None and self._has(state.latest) else None
        if latest is None and present:
            latest = present[-1].name
        return DirectoryState(present, state.last_preserved, latest)

    def _take_directory(self) -> None:
        # What to write and to delete was decided before. While this rank waited for the lock, its holder may have saved
        # and ended.
        if self._lock.acquire() and self._present(read_state(self._directory, self._state)) != self._state:
            raise CheckpointError(
                f"another job saved checkpoints to {self._directory!r} and ended while this one waited for the lock: "
                "nothing was saved. Save again to continue after its checkpoints, or save to another directory"
            )

    def _decide(self, step: int | None, check_interval: bool) -> tuple[bool, int, DirectoryState]:
        number, state = self._checkpoint.save_counter + 1, self._state
        if not self._is_due(step, check_interval):
            return False, number, state
        there = self._numbers_of(candidates(self._directory, None))
        known = {entry.name for entry in state.entries}
        if any(other >= number and name not in known for name, other in there.items()):
            number = max(there.values()) + 1
        # Another manager of this name, of this program or of a job that has ended, may have saved since.
        return True, number, self._present(read_state(self._directory, state))

    def _candidates(self, *, fallback: bool) -> list[str]:
        state = self._state
        if state.latest is None:
            # Another manager may have saved since.
            state = self._present(read_state(self._directory, state if fallback else None) or state)
        there = candidates(self._directory, state)
        own = self._numbers_of(there)
        if fallback:
            return [name for name in there if name == state.latest or name in own]
        if state.latest is None and own:
            raise unnamed(self._directory, own)
        return [] if state.latest is None else [state.latest]

    def _announce(self, name: str) -> None:
        # Managers delete only what the state file names, and a kill may come as soon as the file has its name.
        if not self._has(name):
            self._write(replace(self._with_entry(name, time.time()), latest=self._state.latest))

    def _with_entry(self, name: str, now: float) -> DirectoryState:
        entries = tuple(old for old in self._state.entries if old.name != name)
        return DirectoryState((*entries, CheckpointEntry(name, now)), self._state.last_preserved, name)

    def _retire(self, state: DirectoryState) -> tuple[DirectoryState, list[str]]:
        return retire(state, self._max_to_keep, self._keep_every_seconds)

    def _update(self, state: DirectoryState) -> None:
        # First the state file names the new checkpoint, then old ones go: after a kill in between there is always a
        # latest checkpoint, and its file is there.
        self._write(state)
        kept, gone = self._retire(state)
        if kept != state:
            delete_checkpoints(self._directory, gone)
            self._write(kept)

    def _write(self, state: DirectoryState) -> None:
        """Write the state file; the entries of managers of other names stay in it."""
        present = read_state(self._directory, state).entries
        own = self._numbers_of(entry.name for entry in present)
        others = tuple(entry for entry in present if entry.name not in own)
        write_state(self._directory, replace(state, entries=(*others, *state.entries)))
