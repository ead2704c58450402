"""Restoring: objects get the arrays of a checkpoint file, and the status says which ones have."""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

from mpidist.checkpoint.file.layout import METADATA, SAVE_COUNTER
from mpidist.checkpoint.file.saved import Saved, SavedFile, arrays_in
from mpidist.checkpoint.report import RestoreReport, listed
from mpidist.checkpoint.walk.found import Found
from mpidist.checkpoint.walk.listing import list_together, number_of
from mpidist.checkpoint.walk.matching import Match, match_objects, new_paths, state_apart
from mpidist.checkpoint.walk.objects import can_hold_variables, walk
from mpidist.checkpoint.walk.registered import RegisteredState
from mpidist.checkpoint.walk.states import Stateful
from mpidist.comm.group.agreement import together
from mpidist.comm.group.communicator import Communicator
from mpidist.errors import CheckpointError, DamagedCheckpointError, MpidistError, mark_shared
from mpidist.variables.module import unwatch, watch
from mpidist.variables.reading import load_all
from mpidist.variables.update.options import PartialState

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

    Of a restore in part (`partial=True`) one warning lists what was not restored, once the status is deleted, or at the
    next restore or save; `expect_partial` silences it.

    Attributes:
        number: Place of this restore among all restores of the program.
        report: The content of the warning; empty unless a part was restored on the first rank.
        is_torn: Whether it has failed when some objects had their values, and others not.

    Args:
        find: A function that finds the checkpoint's objects as they are now.
        file: The file to restore from; None where there was nothing to restore.
        forget: A function that is called with this status when no value waits any more.
        with_counter: Whether the number of saves is part of the checkpoint.
    """

    # Without `__dict__`: modules and checkpoints keep a status, and a walk must not enter it.
    __slots__ = (
        "__weakref__", "_file", "_find", "_forget", "_has_ended", "_is_busy", "_lacking", "_left", "_missing",
        "_refused", "_restored", "_used", "_with_counter", "is_torn", "number", "report",
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
        # Why, by the path of the object.
        self._refused: dict[str, str] = {}
        # Parts of states whose rest was restored: parts that the file does not have, and parts that only it has.
        self._lacking: list[str] = []
        self._left: set[str] = set()
        self._is_busy = False
        self._has_ended = False
        self.report = RestoreReport(self._name())
        if file is not None and file.choice.partial:
            # Not by `__del__`, which would not run at the program's end.
            weakref.finalize(self, self.report.log)

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
            CheckpointError: An object has another shape or dtype than its saved value, or a `load_state` has failed on
                some rank. No variable was overwritten.
            DamagedCheckpointError: The file is damaged; see `Checkpoint.restore`.
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
            CheckpointError: There are such objects or values; the text lists them.
        """
        if self.is_torn:
            raise mark_shared(CheckpointError(
                f"the restore of {self._name()} has failed half-way: saving now would mix its values with those from "
                "before. Restore it again, or another one. Call `end_waiting()` on `checkpoint.pending` instead if the "
                "objects should keep their values"
            ))
        if self._file is None or not self.waits():
            return
        late = new_paths(found, self._file, self._done, self.number)
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
            if new_paths(found, self._file, self._done, self.number):
                self.restore_into(found)

    def _restore(self, file: SavedFile, found: Found) -> None:
        communicator = found.group()

        def list_matches() -> tuple[tuple[Match, set[str]], list[str]]:
            match = match_objects(found, file, self._done, self.number)
            variables = [
                f"{path}{number_of(one, communicator)}" + ("" if array.name == path else f" from {array.name}")
                for path, (one, array) in match.variables.items()
            ]
            names = {array.name for _, array in match.variables.values()}
            names.update(array.name for _, tree in match.states.values() for array in arrays_in(tree))
            # What is small is checked before anything changes; of what is large each block before it takes its place.
            file.hold({*names, METADATA, SAVE_COUNTER} if self._with_counter else {*names, METADATA})
            return (match, names), [*variables, *match.states]

        name = file.contents.path
        try:
            match, names = list_together(communicator, f"restoring checkpoint {name!r}", list_matches, name)
            refused = self._load_matches(communicator, file, found, match)
        finally:
            file.release()
        _warn_of_other_replicas(communicator, match)
        self._note_apart(communicator, file, found, match)
        self._restored.update(match.variables, match.states.keys() - refused.keys())
        self._refused.update(match.unfit, **refused)
        self._used |= names
        self._missing = [*match.missing, *self._lacking]
        if self._with_counter and SAVE_COUNTER not in file.arrays and file.choice.takes(SAVE_COUNTER):
            self._missing.append(SAVE_COUNTER)
        if file.choice.partial and communicator.rank == 0:
            unused = [path for path in self._unused() if path not in match.unfit]
            self.report.unfit, self.report.missing, self.report.unused = self._refused, self._missing, unused
        change = watch if self.waits() else unwatch
        for module in found.modules:
            change(module, self)

    def _load_matches(
        self, communicator: Communicator, file: SavedFile, found: Found, match: Match
    ) -> dict[str, str]:
        """Collective. Restore the objects; gives what `_load_states` gives."""
        for variable, path in match.paths:
            variable.saved_as = path
        # Objects with state come first: they may still reject what was saved, and then no variable has changed.
        refused = self._load_states(communicator, file, found, match)
        loads = [(variable, array.read_for(variable)) for variable, array in match.variables.values()]
        self.is_torn = self.is_torn or bool(loads)
        load_all(communicator, loads, f"restoring the variables of checkpoint {file.contents.path!r}")
        for variable, _ in loads:
            variable.restored_by = self.number
        self.is_torn = False
        return refused

    def _load_states(
        self, communicator: Communicator, file: SavedFile, found: Found, match: Match
    ) -> dict[str, str]:
        """Collective. Restore the objects with state; where a part is restored, say why some have rejected theirs."""
        refused: dict[str, str] = {}
        for path, (state, tree) in match.states.items():
            # Agreed on one by one: some have collective calls of their own.
            load = partial(self._load, path, state, _in_part(tree) if file.choice.partial else tree, found)
            try:
                together(communicator, f"restoring {path!r}", load, may_agree=True)
            except BaseException as error:
                # An object that rejects what was saved has taken nothing of it.
                if file.choice.partial and type(error) is CheckpointError:
                    refused[path] = f"{path!r}: {error}"
                    continue
                is_refusal = isinstance(error, CheckpointError) and not isinstance(error, DamagedCheckpointError)
                self.is_torn = self.is_torn or not is_refusal
                raise
            self.is_torn = True
        return refused

    def _note_apart(self, communicator: Communicator, file: SavedFile, found: Found, match: Match) -> None:
        for path, (state, _) in match.states.items():
            lacking, others = state_apart(found, file, path, state)
            self._lacking += lacking
            self._left.update(others)
            if (lacking or others) and communicator.rank == 0 and not file.choice.partial:
                logger.warning(
                    "%s was saved for other variables than %r has: what it lacks starts from initial values (%s), what "
                    "else it holds is ignored (%s)", self._name(), path, listed(lacking), listed(others),
                )

    @property
    def _done(self) -> set[str]:
        return self._restored | self._refused.keys() if self._refused else self._restored

    def _load(self, path: str, state: Stateful, tree: Saved, found: Found) -> None:
        try:
            state.load_state(tree)
        except CheckpointError as error:
            # The object knows its variables by name, and most have none.
            fresh = [
                name for variable in getattr(state, "built_on", ()) if not variable.saved_as
                for name, leaf in found.leaves.items() if leaf.value is variable
            ]
            hint = f". Of its variables {listed(fresh)} were not restored" if fresh else ""
            raise CheckpointError(
                f"{self._name()}, {path!r}: {error}{hint}. `partial=True` restores what fits"
            ) from error
        except MpidistError:
            raise
        # A number where the object expects a dictionary, for instance; and whatever another library raises.
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and not isinstance(state, RegisteredState):
                raise
            raise CheckpointError(
                f"{self._name()} holds for {path!r} a state that its {type(state).__name__} cannot load: "
                f"{type(error).__name__}: {error}. Build the object as it was when the checkpoint was saved"
            ) from error

    def assert_consumed(self) -> Status:
        """Collective. Raise unless all saved values and all objects were restored.

        Returns:
            The status itself.

        Raises:
            AssertionError: Something was not restored; the text lists the paths.
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
            AssertionError: Some were not restored; the text lists their paths.
        """
        self._require_file()
        self.restore_new()
        if self._refused:
            raise AssertionError(f"{self._name()} does not fit the objects: {'; '.join(self._refused.values())}")
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
            AssertionError: Nothing was restored.
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
        """Local. Log no warning of what a restore in part has left out, and return the status itself."""
        self.report.silence()
        return self

    def initialize_or_restore(self, session: object = None) -> None:
        """Collective. Do what `restore_new` does: objects begin with their values when they are made.

        Args:
            session: Not used; an argument of tf.train.
        """
        del session
        self.restore_new()

    def _require_file(self) -> None:
        if self._file is None:
            raise AssertionError("no checkpoint was given (the path was None), so nothing was restored")

    def _name(self) -> str:
        return "no checkpoint" if self._file is None else f"checkpoint {self._file.contents.path!r}"

    def _unused(self) -> list[str]:
        return [] if self._file is None else sorted((self._file.arrays.keys() - self._used) | self._left)


def _in_part(tree: Saved) -> Saved:
    """The tree, in the class that tells an object to take the part that fits."""
    return PartialState({key: _in_part(child) for key, child in tree.items()}) if isinstance(tree, dict) else tree


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
