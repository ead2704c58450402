"""A directory as one manager sees it: its files of one name, its state file and its lock."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace

from mpidist.checkpoint.directory.keeping import KeepingRules, forget_metrics, require_directory, write_metrics
from mpidist.checkpoint.directory.leftovers import delete_checkpoints, remove_leftovers
from mpidist.checkpoint.directory.lock import DirectoryLock
from mpidist.checkpoint.directory.state import (
    CheckpointEntry,
    DirectoryState,
    candidates,
    file_of,
    numbers_of,
    read_state,
    unnamed,
    write_state,
)
from mpidist.errors import CheckpointError


class ManagedDirectory:
    """Local. The checkpoints of managers of one name in a directory. The first rank alone writes to it.

    Args:
        directory: The directory.
        name: The first part of the names of files.
        rules: The rules by which checkpoints are kept.

    Attributes:
        directory: The constructor's argument.
        name: The constructor's argument.
        rules: The constructor's argument.
        lock: The right to save there.
        state: The content of the directory, as this manager knows it.

    Raises:
        CheckpointError: The state file is no regular file.
    """

    def __init__(self, directory: str, name: str, rules: KeepingRules) -> None:
        self.directory = directory
        self.name = name
        self.rules = rules
        self.lock = DirectoryLock(directory)
        self._place = os.path.abspath(directory)
        # Damage and loss are errors of the methods that need the latest one; a program may restore an older one.
        self.state = self._present(read_state(directory, DirectoryState(last_preserved=time.time())))
        self._unnamed = [] if self.state.latest else [*self._numbers_of(candidates(directory, None))]

    @property
    def latest(self) -> str | None:
        """Local. The path of the checkpoint that was saved last; None if there is none.

        Raises:
            DamagedCheckpointError: There were checkpoints at first, and no state file named them.
        """
        if self.state.latest is None and self._unnamed:
            raise unnamed(self.directory, self._unnamed)
        return None if self.state.latest is None else self.path(self.state.latest)

    @property
    def newest(self) -> CheckpointEntry:
        """Local. The latest checkpoint of this manager; without a name where there is none, or it is another one's."""
        found = [entry for entry in self.state.entries if entry.name == self.state.latest]
        return found[-1] if found else CheckpointEntry(self.state.latest or "", math.inf if self.state.latest else 0.0)

    def path(self, name: str) -> str:
        """Local. The path of a checkpoint."""
        return file_of(os.path.join(self.directory, name))

    def require_place(self) -> None:
        """Local. Raise CheckpointError if the path now names another directory."""
        place = os.path.abspath(self.directory)
        if place != self._place:
            # It would delete old checkpoints of another job that saves there.
            raise CheckpointError(
                f"`directory` {self.directory!r} of a CheckpointManager was expected to be {self._place!r} as when it "
                f"was made, got {place!r}: the program has changed its working directory. Pass an absolute path"
            )

    def next_save(self, count: int, *, is_written: bool) -> tuple[int, DirectoryState]:
        """Local. The number of the next checkpoint, and the state of the directory on the disk.

        Args:
            count: The number of saves with the next one. Where files of later numbers exist that the state file does
                not name, the number after theirs is taken.
            is_written: Whether this rank, or another one of its group, writes to the directory.

        Raises:
            FileNotFoundError: The directory is gone.
        """
        if not is_written:
            # Another rank's program does, now or later.
            return count, self.state
        require_directory(self.directory, self.state)
        there = self._numbers_of(candidates(self.directory, None))
        known = {entry.name for entry in self.state.entries}
        if any(other >= count and name not in known for name, other in there.items()):
            count = max(there.values()) + 1
        # Another manager of this name, of this program or of a job that has ended, may have saved since.
        state = self._present(read_state(self.directory, self.state))
        return count, self.rules.with_values(self.directory, state)

    def candidates(self, *, fallback: bool) -> list[str]:
        """Local. The names of the checkpoints to restore, the first one that is whole.

        Args:
            fallback: Whether others than the latest one may be taken.

        Raises:
            DamagedCheckpointError: The state file is damaged, or is missing though there are checkpoints.
        """
        state = self.state
        if state.latest is None:
            # Another manager may have saved since.
            state = self._present(read_state(self.directory, state if fallback else None) or state)
        there = candidates(self.directory, state)
        own = self._numbers_of(there)
        if fallback:
            return [name for name in there if name == state.latest or name in own]
        if state.latest is None and own:
            raise unnamed(self.directory, own)
        return [] if state.latest is None else [state.latest]

    def take(self) -> None:
        """Local. Take the lock, and delete what killed saves have left.

        Raises:
            CheckpointError: Another job saves there, or has done so while this one waited for the lock.
            OSError: The directory cannot be written.
        """
        # What to write and to delete was decided before. While this rank waited for the lock, its holder may have saved
        # and ended.
        if self.lock.acquire() and self._present(read_state(self.directory, self.state)) != self.state:
            raise CheckpointError(
                f"another job saved checkpoints to {self.directory!r} and ended while this one waited for the lock: "
                "nothing was saved. Save again to continue after its checkpoints, or save to another directory"
            )
        remove_leftovers(self.directory, self.name)

    def announce(self, entry: CheckpointEntry) -> None:
        """Local. Name a checkpoint whose file is about to get its name."""
        # Managers delete only what the state file names, and a kill may come as soon as the file has its name.
        if not self._has(entry.name):
            self._write(replace(self.with_entry(entry, time.time()), latest=self.state.latest))
        # Of one that is replaced.
        forget_metrics(self.path(entry.name))

    def with_entry(self, entry: CheckpointEntry, now: float) -> DirectoryState:
        """Local. The state with a checkpoint that was saved at `now`, as the latest one."""
        entries = tuple(old for old in self.state.entries if old.name != entry.name)
        return DirectoryState((*entries, replace(entry, timestamp=now)), self.state.last_preserved, entry.name)

    def update(self, state: DirectoryState, path: str, metrics: Mapping[str, float] | None) -> None:
        """Local. Name a new checkpoint as the latest one, and delete those that are too many.

        Args:
            state: The state that `with_entry` returned.
            path: The new checkpoint.
            metrics: Its metrics.
        """
        if metrics is not None:
            write_metrics(path, metrics)
        # First the state file names the new checkpoint, then old ones go: after a kill in between there is always a
        # latest checkpoint, and its file is there.
        self._write(state)
        kept, gone = self.rules.retire(state)
        if kept != state:
            delete_checkpoints(self.directory, gone)
            self._write(kept)

    def _has(self, name: str) -> bool:
        return os.path.isfile(self.path(name))

    def _numbers_of(self, names: Iterable[str]) -> dict[str, int]:
        return numbers_of(names, self.name)

    def _present(self, state: DirectoryState) -> DirectoryState:
        """The part of a state file whose files exist: checkpoints of managers of this name, and the latest of all."""
        own = self._numbers_of(entry.name for entry in state.entries)
        present = tuple(entry for entry in state.entries if entry.name in own and self._has(entry.name))
        latest = state.latest if state.latest is not None and self._has(state.latest) else None
        if latest is None and present:
            latest = present[-1].name
        return DirectoryState(present, state.last_preserved, latest)

    def _write(self, state: DirectoryState) -> None:
        """Write the state file; the entries of managers of other names stay in it."""
        present = read_state(self.directory, state).entries
        own = self._numbers_of(entry.name for entry in present)
        others = tuple(entry for entry in present if entry.name not in own)
        write_state(self.directory, replace(state, entries=(*others, *state.entries)))
