"""The matching of a checkpoint file's arrays to the objects of a program."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpidist.checkpoint.file.layout import unescape
from mpidist.checkpoint.file.saved import Saved, SavedArray, SavedFile
from mpidist.checkpoint.walk.found import Found
from mpidist.checkpoint.walk.states import State
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
        paths: All variables, also those of a state, with their paths in the file.
    """

    variables: dict[str, tuple[BaseVariable, SavedArray]] = field(default_factory=dict)
    states: dict[str, tuple[State, Saved]] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
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
        CheckpointError: Lists the variables that have another shape, dtype or kind than was saved.
    """
    match = Match()
    wrong: list[str] = []
    for path, leaf in found.leaves.items():
        if leaf.is_named or isinstance(leaf.value, SavedArray):
            continue  # its object looks for it under the path that the variable had when it was saved
        saved = _find(found, file, path)
        if saved is None:
            match.missing.extend(_lacking(found, path))
            continue
        if not isinstance(leaf.value, BaseVariable):
            continue  # its object takes it back as it was saved
        if isinstance(saved, SavedArray) and leaf.value.restored_by <= number:
            match.paths.append((leaf.value, saved.name))
        if (
            _fits(path, leaf.value, saved, wrong, in_state=leaf.in_state)
            and not leaf.in_state and leaf.value.restored_by <= number and done.isdisjoint(found.names_of(path))
        ):
            match.variables[path] = leaf.value, saved
    for path, state in found.states.items():
        saved = _find(found, file, path)
        if saved is not None and done.isdisjoint(found.names_of(path)):
            match.states[path] = state, saved
    if wrong:
        more = f", and {len(wrong) - 8} more" if len(wrong) > 8 else ""
        raise CheckpointError(
            f"{file.contents.path!r} does not fit the objects: {'; '.join(wrong[:8])}{more}. Nothing was changed. "
            "Build the objects as they were when it was saved, or leave out those that differ"
        )
    return match


def state_apart(found: Found, file: SavedFile, path: str, state: State) -> tuple[list[str], list[str]]:
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


def _fits(path: str, variable: BaseVariable, saved: Saved, wrong: list[str], *, in_state: bool) -> bool:
    if not isinstance(saved, SavedArray):
        wrong.append(f"{path!r} is a variable of shape {variable.shape}, but several arrays were saved below that path")
    elif variable.is_per_replica and not saved.replicas:
        wrong.append(
            f"{path!r} has a component of shape {variable.shape} on each replica (ON_READ with aggregation NONE), but "
            f"one value of shape {saved.shape} was saved for all"
        )
    elif saved.replicas and not variable.is_per_replica:
        wrong.append(
            f"{path!r} has one value of shape {variable.shape} for all replicas, but components of {saved.replicas} "
            f"replicas (ON_READ with aggregation NONE) were saved, of shape {saved.shape}"
        )
    elif saved.replicas and saved.shape[1:] != variable.shape:
        wrong.append(
            f"{path!r} has a component of shape {variable.shape} on each replica, but {saved.shape} was saved, of "
            f"{saved.replicas} replicas"
        )
    elif not saved.replicas and saved.shape != variable.shape:
        wrong.append(f"{path!r} has shape {variable.shape}, but {saved.shape} was saved")
    elif saved.dtype not in _loaded_dtypes(variable) and not (
        # Earlier versions kept it so.
        in_state and is_half(saved.dtype) and variable.dtype == np.float32
    ):
        wrong.append(f"{path!r} has dtype {variable.dtype}, but {saved.dtype} was saved")
    else:
        return True
    return False


def _loaded_dtypes(variable: BaseVariable) -> set[np.dtype[Any]]:
    """The dtypes of which a variable takes saved values."""
    own, wide = variable.dtype.newbyteorder("="), np.dtype(np.int64)
    is_sum = isinstance(variable, OnReadVariable) and variable.aggregation is VariableAggregation.SUM
    if not is_sum or own.kind not in "iu" or own == np.uint64:
        return {own}
    # A sum of integers is saved as int64; by earlier versions in the variable's dtype.
    return {np.dtype(one) for one in "bBhHiIq"} if own == wide else {own, wide}
