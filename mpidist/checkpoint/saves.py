"""The record of a checkpoint's saves, and the warnings of a save."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from mpidist.checkpoint.background.save import BackgroundSave
from mpidist.checkpoint.background.together import CopyMemory, finish_together
from mpidist.checkpoint.directory.state import DirectoryWork
from mpidist.checkpoint.report import RestoreReport, listed
from mpidist.checkpoint.walk.found import Found

logger = logging.getLogger("mpidist")

# Called on every rank when a save has ended: with the time at which the file got its name, in seconds since 1970, or
# None where the save has failed.
Ended = Callable[[float | None], object]


class SaveOrder(NamedTuple):
    """The settings of a save, beside the objects.

    Attributes:
        path: The file's name.
        work: The work of rank 0 in the directory before and after the save.
        number: The number of saves with this one, which is part of the file; None does not count it.
        metadata: Notes of the program's own; None leaves them out.
        in_background: Whether a thread writes, where that is possible.
        ended: See `Ended`.
    """

    path: str
    work: DirectoryWork
    number: int | None = None
    metadata: Mapping[str, Any] | None = None
    in_background: bool = False
    ended: Ended | None = None


class Saves:
    """The record of a checkpoint's saves.

    Attributes:
        count: Their number, in this program and before the restored checkpoint.
        seconds: The duration of the last save on this rank; None before the first one of this program.
        metadata: The program's notes in the checkpoint that was last saved or restored.
        report: The report about values that the last restore in part left out; None where there is nothing to warn of.
        background: The save in the background that has begun, and not ended by a call of all ranks; else None.
        memory: The memory for the copies.
    """

    def __init__(self) -> None:
        self.count = 0
        self.seconds: float | None = None
        self.metadata: dict[str, Any] = {}
        self.report: RestoreReport | None = None
        self.background: BackgroundSave | None = None
        self.memory = CopyMemory()
        self._before: tuple[int, dict[str, Any]] = 0, {}
        self._ended: Ended | None = None
        self._told_foreground = False
        # By path, as they were when a walk first found them; None where a warning has named them.
        self._numbers: dict[str, tuple[object, ...] | None] = {}
        self._told_caches = False

    def begin_with(self, found: Found) -> None:
        """Local. Note the plain numbers of objects that the checkpoint gets."""
        self._numbers.update(found.numbers)

    def begin(self, order: SaveOrder, save: BackgroundSave) -> None:
        """Local. Note a save in the background that has begun, before it counts.

        Args:
            order: The settings of the save.
            save: The save.
        """
        self.background, self._before, self._ended = save, (self.count, self.metadata), order.ended

    def tell_foreground(self, why: str) -> None:
        """Local. Warn once why a save is not made in the background; the first rank does."""
        if not self._told_foreground:
            logger.warning("this checkpoint is saved in the foreground, not in the background: %s", why)
        self._told_foreground = True

    def finish(self) -> None:
        """Collective. Wait for the save in the background, if there is one.

        An interrupt of the wait, and a call that is refused, leave it under way.

        Raises:
            OSError, CheckpointError: On every rank, if any rank could not write. The save does not count.
            RuntimeError: Another thread is in a call of these ranks.
        """
        save = self.background
        if save is None:
            return
        if not save.is_own:
            # This is a child after a fork.
            self.background = self._ended = None
            return
        group = save.group
        # Where its strategy was closed each rank waits by itself, and raises what it knows.
        with contextlib.nullcontext() if group.is_closed else group.calls.during("save"):
            try:
                saved_at = save.finish() if group.is_closed else finish_together(group, save)
            except Exception:
                self._end(save, None)
                raise
        if not group.is_closed:
            group.order.last_checkpoint = save.path
        self.seconds = save.seconds
        self._end(save, saved_at)

    def _end(self, save: BackgroundSave, saved_at: float | None) -> None:
        """Note the end of a save, unless another thread has done so meanwhile."""
        if self.background is save:
            ended = self._ended
            self.background = self._ended = None
            if saved_at is None:
                self.count, self.metadata = self._before
            if ended is not None:
                ended(saved_at)

    def finish_here(self) -> None:
        """Local. Wait for this rank's thread. The next call of all ranks raises its error, or the end logs it."""
        if self.background is not None:
            self.background.join()

    def warn(self, found: Found, path: str) -> None:
        """Local. Warn of what a save has left out though the program may need it.

        Args:
            found: The objects that were saved.
            path: The path of the file.
        """
        if found.caches and not self._told_caches:
            self._told_caches = True
            logger.warning(
                "checkpoint %r does not hold %s: arrays in attributes of modules that begin with `_` count as caches",
                path, listed(found.caches),
            )
        changed = []
        for name, numbers in found.numbers.items():
            if self._numbers.setdefault(name, numbers) not in (numbers, None):
                self._numbers[name] = None
                changed.append(name)
        if changed:
            logger.warning(
                "checkpoint %r does not hold %s: plain numbers, which have changed since the Checkpoint was made. Make "
                "each number that must be restored a mpidist.Variable, or give its object `state` and `load_state`",
                path, listed(sorted(changed)),
            )
