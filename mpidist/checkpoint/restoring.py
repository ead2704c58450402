"""Bringing the arrays of a checkpoint file back into objects, and the status that says what has found its place."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from mpidist.checkpoint.layout import SAVE_COUNTER
from mpidist.checkpoint.objects import Found, State, require_same_objects
from mpidist.checkpoint.saved import Saved, SavedArray, SavedFile, arrays_in
from mpidist.checkpoint.transfer import verify
from mpidist.comm.agreement import together
from mpidist.errors import CheckpointError
from mpidist.variables.variable import Variable


@dataclass
class _Match:
    """Which saved arrays belong to which objects.

    Attributes:
        variables: Variables that are restored one by one, with what was saved of them.
        states: Objects that restore themselves, likewise.
        missing: Paths of variables and objects of which nothing was saved.
    """

    variables: dict[str, tuple[Variable, SavedArray]] = field(default_factory=dict)
    states: dict[str, tuple[State, Saved]] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)


class Status:
    """What became of a restore.

    Objects that did not exist yet can be restored later: each `assert_...`, and `restore_new`, first restores into
    what has come since. All these calls are collective over the variables' ranks.

    Args:
        walk: Finds the checkpoint's objects as they are now.
        file: What is restored from; None where there was nothing to restore.
        with_counter: Whether the number of saves is part of the checkpoint.
    """

    def __init__(self, walk: Callable[[], Found], file: SavedFile | None, *, with_counter: bool) -> None:
        self._walk = walk
        self._file = file
        self._with_counter = with_counter
        self._restored: set[str] = set()
        self._used: set[str] = {SAVE_COUNTER}
        self._missing: list[str] = []

    def restore_new(self) -> Status:
        """Collective. Restore into objects that have come since the last time.

        Returns:
            The status itself.

        Raises:
            CheckpointError: Something has another shape or dtype than what was saved, or the file is damaged; then
                nothing was overwritten.
            MismatchError: The ranks hold different objects.
        """
        if self._file is None:
            return self
        file, found = self._file, self._walk()
        communicator = found.group()
        match = together(
            communicator, f"restoring checkpoint {file.contents.path!r}", lambda: _match(found, file, self._restored)
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
            variable.load(array.read)
        self._restored.update(match.variables, match.states)
        self._used |= names
        self._missing = match.missing
        if self._with_counter and SAVE_COUNTER not in file.arrays:
            self._missing = [*match.missing, SAVE_COUNTER]
        return self

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


def _match(found: Found, file: SavedFile, done: set[str]) -> _Match:
    """What is to be restored, nothing of it before all of it is known to fit."""
    match = _Match()
    wrong: list[str] = []
    for path, leaf in found.leaves.items():
        saved = _find(found, file, path)
        if saved is None:
            match.missing.append(path)
        elif not isinstance(leaf, Variable):
            continue  # its object takes it back as it was saved
        elif _fits(path, leaf, saved, wrong) and path not in found.in_states and path not in done:
            match.variables[path] = leaf, saved
    for path, state in found.states.items():
        saved = _find(found, file, path)
        if saved is not None and path not in done:
            match.states[path] = state, saved
    if wrong:
        more = f", and {len(wrong) - 8} more" if len(wrong) > 8 else ""
        raise CheckpointError(
            f"{file.contents.path!r} does not fit the objects: {'; '.join(wrong[:8])}{more}. Nothing was changed. "
            "Build the objects as they were when this was saved, or leave out what differs"
        )
    return match


def _find(found: Found, file: SavedFile, path: str) -> Saved | None:
    """What was saved of the object at `path`, perhaps under another of its paths."""
    saved = file.find(path)
    if saved is not None:
        return saved
    for alias, first in found.shared.items():
        if path == first or path.startswith(first + "/"):
            saved = file.find(alias + path[len(first) :])
            if saved is not None:
                return saved
    return None


def _fits(path: str, variable: Variable, saved: Saved, wrong: list[str]) -> bool:
    if not isinstance(saved, SavedArray):
        wrong.append(f"{path!r} is a variable of shape {variable.shape}, but several arrays were saved below that path")
    elif saved.shape != variable.shape:
        wrong.append(f"{path!r} has shape {variable.shape}, but {saved.shape} was saved")
    elif saved.dtype != variable.dtype.newbyteorder("="):
        wrong.append(f"{path!r} has dtype {variable.dtype}, but {saved.dtype} was saved")
    else:
        return True
    return False


def _listed(paths: Iterable[str]) -> str:
    names = list(paths)
    more = f" and {len(names) - 20} more" if len(names) > 20 else ""
    return ", ".join(repr(name) for name in names[:20]) + more if names else "nothing"
