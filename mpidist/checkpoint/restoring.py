"""Restoring: objects get the arrays of a checkpoint file, and the status says which ones have."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial

from mpidist.checkpoint.file.layout import SAVE_COUNTER
from mpidist.checkpoint.file.saved import Saved, SavedFile, arrays_in
from mpidist.checkpoint.transfer import verify
from mpidist.checkpoint.walk.found import Found
from mpidist.checkpoint.walk.listing import list_together, number_of
from mpidist.checkpoint.walk.matching import Match, match_objects, new_paths, state_apart
from mpidist.checkpoint.walk.objects import can_hold_variables, walk
from mpidist.checkpoint.walk.states import State
from mpidist.comm.group.agreement import together
from mpidist.comm.group.communicator import Communicator
from mpidist.errors import CheckpointError, MpidistError, mark_shared
from mpidist.variables.module import unwatch, watch

logger = logging.getLogger("mpidist")

_numbers = itertools.count(1)


class Status:
    """The outcome of a restore.

    Saved values wait for objects that do not exist yet. Each object takes its values once, and on all ranks:

    - as soon as it becomes an attribute of the `Checkpoint`, or of a `Module` that the checkpoint holds, or part of a
      list, dictionary or object that does;
    - where it comes otherwise, as an attribute of some other object or an item put into a list, at the next
      `restore_new` or `assert_...`. Saving without that is an error: only the program knows whether the object should
      take the saved values, or keep what it has learnt since (`end_waiting`).

    The latest restore counts: it ends the waiting of the former one of the same `Checkpoint`. While values wait, the
    file stays open, and if it is deleted it still takes its room on the disk. All calls are collective over the
    variables' ranks.

    Attributes:
        number: Place of this restore among all restores of the program.
        is_torn: Whether it has failed when some objects had their values, and others not.

    Args:
        find: Finds the checkpoint's objects as they are now.
        file: The file to restore from; None where there was nothing to restore.
        forget: Called with this status when nothing waits any more.
        with_counter: Whether the number of saves is part of the checkpoint.
    """

    # Without `__dict__`: modules and checkpoints keep a status, and a walk must not enter it.
    __slots__ = (
        "_file", "_find", "_forget", "_has_ended", "_is_busy", "_lacking", "_left", "_missing", "_restored", "_used",
        "_with_counter", "is_torn", "number",
    )

    def __init__(
        self, find: Callable[[], Found], file: SavedFile | None, forget: Callable[[Status], None], *,
        with_counter: bool,
    ) -> None:
        self.number = next(_numbers)
        self.is_torn = False
        self._find = find
        self._file = file
        self._forget = forget
        self._with_counter = with_counter
        self._restored: set[str] = set()
        self._used: set[str] = {SAVE_COUNTER}
        self._missing: list[str] = []
        # Parts of states whose rest was restored: parts that the file does not have, and parts that only it has.
        self._lacking: list[str] = []
        self._left: set[str] = set()
        self._is_busy = False
        self._has_ended = False

    def waits(self) -> bool:
        """Local. Whether values wait for objects that do not exist yet."""
        return self._file is not None and not self._has_ended and not self._file.arrays.keys() <= self._used

    def end_waiting(self) -> None:
        """Local. Restore no more objects that come later, except by `restore_new` and `assert_...`."""
        self._has_ended = True
        self._forget(self)

    def restore_new(self) -> Status:
        """Collective. Restore the objects that were added since the last call.

        Returns:
            The status itself.

        Raises:
            CheckpointError: An object has another shape or dtype than its saved value, the file is damaged, or a
                `load_state` has failed on some rank. No variable was overwritten.
            MismatchError: The ranks hold different objects.
        """
        if self._file is not None and not self._is_busy:
            self.restore_into(self._find())
        return self

    def restore_into(self, found: Found) -> None:
        """Collective. Do what `restore_new` does, with the objects that a walk has found."""
        if self._file is None:
            return
        servers = found.servers()
        # Setting attributes in `load_state` must not begin another restore.
        self._is_busy = True
        try:
            # No update comes between the variables that are restored.
            with nullcontext() if servers is None else servers.pause():
                self._restore(self._file, found)
        finally:
            self._is_busy = False
        if not self.waits():
            self._forget(self)

    def require_restored(self, found: Found) -> None:
        """Local. Raise if values wait for one of the objects, or some are missing; the same on every rank.

        Args:
            found: The checkpoint's objects as they are now.

        Raises:
            CheckpointError: Lists the objects.
        """
        if self.is_torn:
            raise mark_shared(CheckpointError(
                f"the restore of {self._name()} has failed half-way: saving now would mix its values with those from "
                "before. Restore it again, or another one. Call `end_waiting()` on `checkpoint.pending` instead if the "
                "objects should keep their values"
            ))
        if self._file is None or not self.waits():
            return
        late = new_paths(found, self._file, self._restored, self.number)
        if late:
            raise mark_shared(CheckpointError(
                f"{self._name()} still holds values for {listed(late)}, which were created after `restore`: saving now "
                "would lose these values. Call `restore_new()` on what `restore` returned (also in "
                "`checkpoint.pending`) as soon as new objects are made; attributes of a mpidist.Module do not need "
                "that. Call `end_waiting()` instead if the objects should keep their values"
            ))

    def attribute_set(self, value: object) -> None:
        """Local, and Collective where `value` has new objects. Note that an attribute was set to `value`."""
        if self._file is None or self._is_busy or not self.waits() or not can_hold_variables(value):
            return
        # Without new objects there must be no communication: one rank alone may set the attribute, or all of them in
        # every step.
        brought = walk([(("value",), value)])
        for module in brought.modules:
            watch(module, self)
        if brought.leaves or brought.states:
            found = self._find()
            if new_paths(found, self._file, self._restored, self.number):
                self.restore_into(found)

    def _restore(self, file: SavedFile, found: Found) -> None:
        communicator = found.group()

        def list_matches() -> tuple[Match, list[str]]:
            match = match_objects(found, file, self._restored, self.number)
            variables = [f"{path}{number_of(one, communicator)}" for path, (one, _) in match.variables.items()]
            return match, [*variables, *match.states]

        name = file.contents.path
        match = list_together(communicator, f"restoring checkpoint {name!r}", list_matches, name)
        saved = [array for _, array in match.variables.values()]
        saved += [array for _, tree in match.states.values() for array in arrays_in(tree)]
        names = {array.name for array in saved}
        verify(communicator, file, {*names, SAVE_COUNTER} if self._with_counter else names)
        for variable, path in match.paths:
            variable.saved_as = path
        # Objects with state come first: they may still reject what was saved, and then no variable has changed.
        for path, (state, tree) in match.states.items():
            # Agreed on one by one: some have collective calls of their own.
            try:
                together(communicator, f"restoring {path!r}", partial(self._load, path, state, tree), may_agree=True)
            except BaseException as error:
                # An object that rejects what was saved has taken nothing of it.
                self.is_torn = self.is_torn or not isinstance(error, CheckpointError)
                raise
            self.is_torn = True
        for variable, array in match.variables.values():
            self.is_torn = True
            variable.load(array.read_for(variable))
            variable.restored_by = self.number
        self.is_torn = False
        _warn_of_other_replicas(communicator, match)
        for path, (state, _) in match.states.items():
            lacking, others = state_apart(found, file, path, state)
            self._lacking += lacking
            self._left.update(others)
            if (lacking or others) and communicator.rank == 0:
                logger.warning(
                    "%s was saved for other variables than %r has: what it lacks starts from initial values (%s), what "
                    "else it holds is ignored (%s)", self._name(), path, listed(lacking), listed(others),
                )
        self._restored.update(match.variables, match.states)
        self._used |= names
        self._missing = [*match.missing, *self._lacking]
        if self._with_counter and SAVE_COUNTER not in file.arrays:
            self._missing.append(SAVE_COUNTER)
        change = watch if self.waits() else unwatch
        for module in found.modules:
            change(module, self)

    def _load(self, path: str, state: State, tree: Saved) -> None:
        try:
            state.load_state(tree)
        except CheckpointError as error:
            raise CheckpointError(f"{self._name()}, {path!r}: {error}") from error
        except MpidistError:
            raise
        # A number where the object expects a dictionary, for instance.
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{self._name()} holds for {path!r} a state that its {type(state).__name__} cannot load: "
                f"{type(error).__name__}: {error}. Build the object as it was when the checkpoint was saved"
            ) from error

    def assert_consumed(self) -> Status:
        """Collective. Raise unless all saved values and all objects were restored.

        Returns:
            The status itself.

        Raises:
            AssertionError: Lists the paths of what was not.
        """
        self.assert_existing_objects_matched()
        unused = self._unused()
        if unused:
            raise AssertionError(
                f"{self._name()} holds values that no object has taken: {listed(unused)}. To restore only a part, use "
                "assert_existing_objects_matched()"
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
            there = f"; it also holds {listed(unused)}" if unused else ""
            raise AssertionError(f"{self._name()} has nothing for {listed(self._missing)}{there}")
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
                f"nothing of {self._name()} fits the objects: it holds {listed(self._unused())}, the objects are "
                f"{listed(self._missing)}"
            )
        return self

    def expect_partial(self) -> Status:
        """Local. Return the status itself, without any effect: kept for code written for tf.train."""
        return self

    def _require_file(self) -> None:
        if self._file is None:
            raise AssertionError("no checkpoint was given (the path was None), so nothing was restored")

    def _name(self) -> str:
        return "no checkpoint" if self._file is None else f"checkpoint {self._file.contents.path!r}"

    def _unused(self) -> list[str]:
        return [] if self._file is None else sorted((self._file.arrays.keys() - self._used) | self._left)


def _warn_of_other_replicas(communicator: Communicator, match: Match) -> None:
    other = {
        path: f"{array.replicas} replicas saved a component each, {variable.group.size} restore"
        for path, (variable, array) in match.variables.items()
        if variable.is_per_replica and array.replicas != variable.group.size
    }
    if other and communicator.rank == 0:
        logger.warning(
            "of %s %s: of n components, replica r takes component r %% n", listed(other), next(iter(other.values()))
        )


def listed(paths: Iterable[str]) -> str:
    """Local. Some paths, 20 at most, as a text for a message."""
    names = list(paths)
    more = f" and {len(names) - 20} more" if len(names) > 20 else ""
    return ", ".join(repr(name) for name in names[:20]) + more if names else "nothing"
