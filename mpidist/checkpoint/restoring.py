"""Bringing the arrays of a checkpoint file back into objects, and the status that says what has found its place."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable

from mpidist.checkpoint.layout import SAVE_COUNTER
from mpidist.checkpoint.matching import Match, match_objects, new_paths
from mpidist.checkpoint.objects import Found, can_hold_variables, require_same_objects, walk
from mpidist.checkpoint.saved import SavedFile, arrays_in
from mpidist.checkpoint.transfer import verify
from mpidist.comm.agreement import together
from mpidist.comm.communicator import Communicator
from mpidist.errors import CheckpointError, mark_shared
from mpidist.variables.module import unwatch, watch

logger = logging.getLogger("mpidist")

_numbers = itertools.count(1)


class Status:
    """What became of a restore.

    What was saved waits for objects that do not exist yet. Each takes its values once, and all ranks alike:

    - as soon as it becomes an attribute of the `Checkpoint`, or of a `Module` that the checkpoint holds, or part of a
      list, dictionary or object that does;
    - where it comes otherwise, as an attribute of some other object or an item put into a list, at the next
      `restore_new` or `assert_...`. Saving without that is an error: only the program knows whether the object should
      take what was saved, or keep what it has learnt meanwhile (`end_waiting`).

    The latest restore counts, and ends the waiting of the same `Checkpoint`'s former one. While values wait the file
    stays open, and its room on the disk taken though the file is deleted. All calls are collective over the variables'
    ranks.

    Attributes:
        number: Restores are counted in their order in the program.

    Args:
        walk: Finds the checkpoint's objects as they are now.
        file: What is restored from; None where there was nothing to restore.
        with_counter: Whether the number of saves is part of the checkpoint.
    """

    # Without `__dict__`: modules and checkpoints keep a status, which is no object for a walk to look into.
    __slots__ = (
        "_file", "_has_ended", "_is_busy", "_missing", "_restored", "_used", "_walk", "_with_counter", "number",
    )

    def __init__(self, walk: Callable[[], Found], file: SavedFile | None, *, with_counter: bool) -> None:
        self.number = next(_numbers)
        self._walk = walk
        self._file = file
        self._with_counter = with_counter
        self._restored: set[str] = set()
        self._used: set[str] = {SAVE_COUNTER}
        self._missing: list[str] = []
        self._is_busy = False
        self._has_ended = False

    @property
    def waits(self) -> bool:
        """Local. Whether values wait for objects that do not exist yet."""
        return self._file is not None and not self._has_ended and not self._file.arrays.keys() <= self._used

    def end_waiting(self) -> None:
        """Local. Restore nothing any more that comes later, unless it is asked for by a call."""
        self._has_ended = True

    def restore_new(self) -> Status:
        """Collective. Restore into objects that have come since the last time.

        Returns:
            The status itself.

        Raises:
            CheckpointError: Something has another shape or dtype than what was saved, or the file is damaged; then
                nothing was overwritten.
            MismatchError: The ranks hold different objects.
        """
        if self._file is None or self._is_busy:
            return self
        self._is_busy = True
        try:
            self._restore(self._file, self._walk())
        finally:
            self._is_busy = False
        return self

    def require_restored(self) -> None:
        """Local. Raise where something waits for an object that is there: the same on every rank.

        Raises:
            CheckpointError: Lists the objects.
        """
        if self._file is None or not self.waits:
            return
        late = new_paths(self._walk(), self._file, self._restored, self.number)
        if late:
            raise mark_shared(CheckpointError(
                f"{self._name()} still holds values for {_listed(late)}, which came after `restore`: saving now would "
                "leave them behind. On what `restore` returned (`checkpoint.pending` has it, too) call `restore_new()` "
                "as soon as new objects are made, which attributes of a mpidist.Module do not need, or "
                "`end_waiting()` if they shall keep the values that they have"
            ))

    def attribute_set(self, value: object) -> None:
        """Local, and Collective where `value` brings what waits for its values. An attribute was set to `value`."""
        if self._file is None or self._is_busy or not self.waits or not can_hold_variables(value):
            return
        # What brings nothing that waits is no reason to communicate: one rank alone may set it, or all in every step.
        brought = walk([(("value",), value)])
        for module in brought.modules:
            watch(module, self)
        if (brought.leaves or brought.states) and new_paths(self._walk(), self._file, self._restored, self.number):
            self.restore_new()

    def _restore(self, file: SavedFile, found: Found) -> None:
        communicator = found.group()
        match = together(
            communicator, f"restoring checkpoint {file.contents.path!r}",
            lambda: match_objects(found, file, self._restored, self.number),
        )
        require_same_objects(communicator, [*match.variables, *match.states])
        saved = [array for _, array in match.variables.values()]
        saved += [array for _, tree in match.states.values() for array in arrays_in(tree)]
        names = {array.name for array in saved}
        verify(communicator, file, names)
        # States first: they may still find that what was saved is not theirs.
        for state, tree in match.states.values():
            state.load_state(tree)
        for variable, array in match.variables.values():
            variable.load(array.read_for(variable))
            variable.restored_by = self.number
        _warn_of_other_replicas(communicator, match)
        self._restored.update(match.variables, match.states)
        self._used |= names
        self._missing = match.missing
        if self._with_counter and SAVE_COUNTER not in file.arrays:
            self._missing = [*match.missing, SAVE_COUNTER]
        change = watch if self.waits else unwatch
        for module in found.modules:
            change(module, self)

    def assert_consumed(self) -> Status:
        """Collective. Raise unless everything was restored: all that was saved, and all that there is.

        Returns:
            The status itself.

        Raises:
            AssertionError: Lists the paths of what was not.
        """
        self.assert_existing_objects_matched()
        unused = self._unused()
        if unused:
            raise AssertionError(
                f"{self._name()} holds what no object has taken: {_listed(unused)}. If only a part is meant to be "
                "restored, use assert_existing_objects_matched()"
            )
        return self

    def assert_existing_objects_matched(self) -> Status:
        """Collective. Raise unless every variable and object with state was restored.

        Returns:
            The status itself.

        Raises:
            AssertionError: Lists the paths of those that were not.
        """
        self._require_file()
        self.restore_new()
        if self._missing:
            unused = self._unused()
            there = f"; it also holds {_listed(unused)}" if unused else ""
            raise AssertionError(f"{self._name()} has nothing for {_listed(self._missing)}{there}")
        return self

    def assert_nontrivial_match(self) -> Status:
        """Collective. Raise unless at least something was restored.

        Returns:
            The status itself.

        Raises:
            AssertionError: Nothing was.
        """
        self._require_file()
        self.restore_new()
        if not self._restored:
            raise AssertionError(
                f"nothing of {self._name()} fits the objects: it holds {_listed(self._unused())}, the objects are "
                f"{_listed(self._missing)}"
            )
        return self

    def expect_partial(self) -> Status:
        """Local. Say that not everything need be restored; kept for code written for tf.train, it changes nothing."""
        return self

    def _require_file(self) -> None:
        if self._file is None:
            raise AssertionError("no checkpoint was given (the path was None), so nothing was restored")

    def _name(self) -> str:
        return "no checkpoint" if self._file is None else f"checkpoint {self._file.contents.path!r}"

    def _unused(self) -> list[str]:
        return [] if self._file is None else sorted(self._file.arrays.keys() - self._used)


def _warn_of_other_replicas(communicator: Communicator, match: Match) -> None:
    other = {
        path: f"{array.replicas} replicas saved a component each, {variable.group.size} restore"
        for path, (variable, array) in match.variables.items()
        if variable.is_per_replica and array.replicas != variable.group.size
    }
    if other and communicator.rank == 0:
        logger.warning(
            "of %s %s: of n components, replica r takes component r %% n", _listed(other), next(iter(other.values()))
        )


def _listed(paths: Iterable[str]) -> str:
    names = list(paths)
    more = f" and {len(names) - 20} more" if len(names) > 20 else ""
    return ", ".join(repr(name) for name in names[:20]) + more if names else "nothing"
