"""The matching of a checkpoint file's arrays to the objects of a program."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from mpidist.checkpoint.file.choice import can_cast
from mpidist.checkpoint.file.layout import unescape
from mpidist.checkpoint.file.saved import Saved, SavedArray, SavedFile
from mpidist.checkpoint.walk.found import Found, Leaf
from mpidist.checkpoint.walk.registered import RegisteredState, why_not
from mpidist.checkpoint.walk.states import Stateful
from mpidist.comm.arithmetic.combine import is_half
from mpidist.errors import CheckpointError
from mpidist.options import VariableAggregation
from mpidist.variables.kinds.sync_on_read import OnReadVariable
from mpidist.variables.update.halves import MASTER_COPY
from mpidist.variables.update.options import COMPRESSION
from mpidist.variables.variable import BaseVariable


@dataclass
class Match:
    """The saved arrays of each object.

    Attributes:
        variables: Variables that are restored one by one, each with its saved array.
        states: Objects that restore themselves, each with everything saved of it.
        missing: Paths of variables and objects of which nothing was saved.
        unfit: The reasons why values do not fit, by path, where a part may be restored.
        paths: All variables, also those of a state, with their paths in the file.
    """

    variables: dict[str, tuple[BaseVariable, SavedArray]] = field(default_factory=dict)
    states: dict[str, tuple[Stateful, Saved]] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    unfit: dict[str, str] = field(default_factory=dict)
    paths: list[tuple[BaseVariable, str]] = field(default_factory=list)


def match_objects(found: Found, file: SavedFile, done: set[str], number: int) -> Match:
    """Local. Choose the values to restore, and check that all of them fit before one is restored.

    Args:
        found: The objects.
        file: The checkpoint file.
        done: Paths of the objects that this restore has restored already.
        number: The number of this restore; variables that a later one has set are left out.

    Returns:
        The objects with their saved arrays.

    Raises:
        CheckpointError: Lists the variables that have another shape, dtype or kind than was saved, unless a part may be
            restored; or integers are out of the range of the dtype that they are converted to.
    """
    match, choice = Match(), file.choice
    # By path, but for variables in states: of these a state restores what fits.
    wrong: dict[str, str] = {}
    foreign = [path for path, state in found.states.items() if isinstance(state, RegisteredState)]
    for path, leaf in found.leaves.items():
        if leaf.is_named or isinstance(leaf.value, SavedArray):
            continue  # its object looks for it under the path that the variable had when it was saved
        if not any(map(choice.takes, found.names_of(path))):
            continue
        saved = _find(found, file, path)
        if saved is None:
            match.missing.extend(_lacking(found, path))
            continue
        why = _why_not_leaf(path, leaf, saved, foreign if choice.partial else [])
        if why is not None:
            wrong[path] = why
        elif isinstance(leaf.value, BaseVariable) and leaf.value.restored_by <= number:
            match.paths.append((leaf.value, saved.name))
            if not leaf.in_state and done.isdisjoint(found.names_of(path)):
                match.variables[path] = leaf.value, saved
    _match_states(match, found, file, done, wrong)
    if wrong and not choice.partial:
        raise _misfit(file, list(wrong.values()))
    match.unfit = wrong
    return match


def _why_not_leaf(path: str, leaf: Leaf, saved: Saved, foreign: list[str]) -> str | None:
    """Why a leaf cannot take what was saved; None where it can, and of values that their objects take back as saved.

    Args:
        path: The path of the leaf.
        leaf: The leaf.
        saved: What was saved.
        foreign: The paths of objects that take a part of their plain values.
    """
    if isinstance(leaf.value, BaseVariable):
        return _why_not(path, leaf.value, saved, in_state=leaf.in_state)
    if any(path.startswith(f"{one}/") for one in foreign):
        why = why_not(leaf.value, saved)
        return None if why is None else f"{path!r}: {why}"
    return None


def _match_states(match: Match, found: Found, file: SavedFile, done: set[str], wrong: dict[str, str]) -> None:
    for path, state in found.states.items():
        if not any(map(file.choice.takes, found.names_of(path))):
            continue
        saved = _find(found, file, path)
        # These two take what fits; of another one nothing is certain.
        is_part = hasattr(type(state), "built_on") or isinstance(state, RegisteredState)
        is_whole = is_part or not any(one.startswith(f"{path}/") for one in wrong)
        if saved is not None and is_whole and done.isdisjoint(found.names_of(path)):
            match.states[path] = state, saved


def _misfit(file: SavedFile, texts: list[str]) -> CheckpointError:
    more = f", and {len(texts) - 8} more" if len(texts) > 8 else ""
    return CheckpointError(
        f"{file.contents.path!r} does not fit the objects: {'; '.join(texts[:8])}{more}. Nothing was changed. Build "
        "the objects as they were when it was saved, leave out those that differ, or restore what fits: `partial=True`"
    )


def state_apart(found: Found, file: SavedFile, path: str, state: Stateful) -> tuple[list[str], list[str]]:
    """Local. Find the values that an object with state by variables has not taken, since it has other variables.

    Args:
        found: The objects.
        file: The checkpoint file.
        path: The path of the object.
        state: The object, whose variables have their paths in the file.

    Returns:
        The paths of what the checkpoint has nothing for, and of what it holds of other variables.
    """
    own = {variable.saved_as for variable in getattr(state, "built_on", ())}
    named: dict[str, list[tuple[str, str]]] = {}
    for leaf_path, leaf in found.leaves.items():
        parent, _, last = leaf_path.rpartition("/")
        variable = found.leaves.get(unescape(last))
        if leaf.is_named and leaf_path.startswith(f"{path}/") and variable is not None:
            named.setdefault(parent, []).append((leaf_path, getattr(variable.value, "saved_as", "")))
    lacking: list[str] = []
    others: list[str] = []
    for parent, its in named.items():
        entries = _find(found, file, parent)
        # State that is stored by number is restored by number.
        if not isinstance(entries, dict) or any(map(str.isdecimal, entries)):
            continue
        # A variable is complete without these two, too.
        if not parent.rpartition("/")[2].startswith((COMPRESSION, MASTER_COPY)):
            lacking += [leaf_path for leaf_path, saved_as in its if saved_as not in entries]
        others += [array.name for key, array in entries.items() if key not in own]
    return lacking, others


def new_paths(found: Found, file: SavedFile, done: set[str], number: int) -> list[str]:
    """Local. List the objects that exist now, are not in `done`, and for which the file holds values.

    Variables that a later restore than `number` has set are not among them.
    """
    variables = (
        path for path, leaf in found.leaves.items()
        if isinstance(leaf.value, BaseVariable) and not leaf.in_state and leaf.value.restored_by <= number
    )
    return [
        path for path in itertools.chain(variables, found.states)
        if done.isdisjoint(found.names_of(path)) and _find(found, file, path) is not None
    ]


def _find(found: Found, file: SavedFile, path: str) -> Saved | None:
    """The saved state of the object at `path`, perhaps under another one of its paths."""
    return next((saved for name in found.names_of(path) if (saved := file.find(name)) is not None), None)


def _lacking(found: Found, path: str) -> list[str]:
    """The path of a leaf of which nothing was saved, unless it is part of a state that continues without it."""
    parts = path.split("/")
    for count in range(1, len(parts)):
        may_lack = getattr(found.states.get("/".join(parts[:count])), "may_lack", ())
        if parts[count] in may_lack or "/".join(parts[count : count + 2]) in may_lack:
            return []
    return [path]


class _Types(NamedTuple):
    """Both dtypes, as a text for a message."""

    variable: BaseVariable
    saved: SavedArray

    def __str__(self) -> str:
        return f"(dtype {self.variable.dtype}, saved {self.saved.type_name})"


def _why_not(path: str, variable: BaseVariable, saved: Saved, *, in_state: bool) -> str | None:
    """Why a variable cannot take what was saved, with both shapes and dtypes; None where it can."""
    if not isinstance(saved, SavedArray):
        return f"{path!r} is a variable of shape {variable.shape}, but several arrays were saved below that path"
    # Most fit: the text is made for those that do not.
    types = _Types(variable, saved)
    if variable.is_per_replica and not saved.replicas:
        return (
            f"{path!r} has a component of shape {variable.shape} on each replica (ON_READ with aggregation NONE), but "
            f"one value of shape {saved.shape} was saved for all {types}"
        )
    if saved.replicas and not variable.is_per_replica:
        return (
            f"{path!r} has one value of shape {variable.shape} for all replicas, but components of {saved.replicas} "
            f"replicas (ON_READ with aggregation NONE) were saved, of shape {saved.shape} {types}"
        )
    if saved.replicas and saved.shape[1:] != variable.shape:
        return (
            f"{path!r} has a component of shape {variable.shape} on each replica, but {saved.shape} was saved, of "
            f"{saved.replicas} replicas {types}"
        )
    if not saved.replicas and saved.shape != variable.shape:
        return f"{path!r} has shape {variable.shape}, but {saved.shape} was saved {types}"
    # Earlier versions kept the state of half precision so.
    is_older = in_state and is_half(saved.dtype) and variable.dtype == np.float32
    if not saved.kind and (saved.dtype in _loaded_dtypes(variable) or is_older):
        return None
    if saved.casts and not saved.kind and can_cast(saved.dtype, variable.saved_dtype):
        saved.require_range(variable.saved_dtype)
        return None
    hint = "" if saved.casts or saved.kind else "; `cast=True` converts it"
    if hint and not can_cast(saved.dtype, variable.saved_dtype):
        hint = ""
    return f"{path!r} has dtype {variable.dtype}, but {saved.type_name} was saved (shape {variable.shape}{hint})"


def _loaded_dtypes(variable: BaseVariable) -> set[np.dtype[Any]]:
    """The dtypes of which a variable takes saved values."""
    own, wide = variable.dtype.newbyteorder("="), np.dtype(np.int64)
    is_sum = isinstance(variable, OnReadVariable) and variable.aggregation is VariableAggregation.SUM
    if not is_sum or own.kind not in "iu" or own == np.uint64:
        return {own}
    # A sum of integers is saved as int64; by earlier versions in the variable's dtype.
    return {np.dtype(one) for one in "bBhHiIq"} if own == wide else {own, wide}
