"""The objects of a checkpoint: one walk finds the arrays that it holds of them, each with its path."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum, auto
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from mpidist.arrays import AnyArray
from mpidist.attributes import (
    CONTAINERS,
    PLAIN,
    SETS,
    attributes_of,
    children_of,
    has_children,
    is_array,
    is_number,
)
from mpidist.checkpoint.file.hdf5 import is_storable
from mpidist.checkpoint.file.layout import BYTES, NONE, TEXT, Record, join
from mpidist.checkpoint.file.saved import SavedArray
from mpidist.checkpoint.walk.found import Found, Leaf, NestedCheckpoint, Parts
from mpidist.checkpoint.walk.registered import Component
from mpidist.checkpoint.walk.states import Stateful, state_of
from mpidist.comm.group.communicator import Communicator
from mpidist.errors import CheckpointError
from mpidist.variables.module import Module
from mpidist.variables.variable import BaseVariable


class _Place(Enum):
    """The place of a value: ROOT: in the checkpoint, or in containers of it. OBJECT: in an object.

    CACHE: in an attribute of a module that begins with `_`, or in containers of it. OURS: in an object of this package.
    STATE: in the state of an object.
    """

    ROOT = auto()
    OBJECT = auto()
    CACHE = auto()
    OURS = auto()
    STATE = auto()


class _Member:
    """A part of a path below a set."""

    def __str__(self) -> str:
        return "(member)"


class _VariablePath(str):
    """The path of a variable as one part of another path."""

    __slots__ = ()


_PLAIN_PARTS = {str, int, _VariablePath}


def can_hold_variables(value: object) -> bool:
    """Local. Whether a checkpoint can hold `value`: a variable, a container, or an object with state or attributes."""
    if isinstance(value, SETS):
        return False
    return isinstance(value, (BaseVariable, NestedCheckpoint)) or state_of(value) is not None or has_children(value)


def walk(roots: Iterable[tuple[Parts, object]], *, into_states: bool = True) -> Found:
    """Local. Find everything that a checkpoint of `roots` holds.

    The walk follows attributes (also those in `__slots__`), lists, tuples, deques and dictionaries, in the order of
    names, numbers and indices. An object that several paths lead to counts under the first.

    Args:
        roots: Objects with their paths.
        into_states: Whether to look into objects with state, which costs what their `state` does, and into sets.

    Returns:
        All arrays and objects, each with its path.

    Raises:
        CheckpointError: A dtype that HDF5 cannot hold.
        ValueError: Two things with the same path; a dictionary key that is neither string nor integer on the way to
            a variable, or a set there; or a state that holds something other than arrays, variables, numbers and
            strings.
    """
    found = Found()
    seen: dict[int, str] = {}
    waiting = [(parts, value, _Place.ROOT) for parts, value in roots][::-1]
    # What is walked after all else: sets, whose members may have a path elsewhere; then states; then states by the
    # paths of variables.
    later: tuple[list[tuple[Parts, object]], ...] = ([], [], [])
    # In the state that is walked, paths of variables take the place of these numbers.
    names: dict[int, object] = {}
    while waiting or (into_states and any(later)):
        if not waiting:
            waiting, names = _entries_of(*next(filter(None, later)).pop(0), seen)
            continue
        parts, value, place = waiting.pop()
        is_leaf = isinstance(value, BaseVariable) or (place is _Place.STATE and not isinstance(value, CONTAINERS))
        state = None if is_leaf or place is _Place.STATE else state_of(value)
        if not (is_leaf or state or isinstance(value, NestedCheckpoint) or has_children(value)):
            _note_unsaved(found, parts, value, place)
            continue
        path = join(parts)
        if _is_known(found, seen, path, value, place):
            continue
        if is_leaf:
            _add_leaf(found, parts, path, value, place is _Place.STATE)
        elif state is not None:
            if not path or not _PLAIN_PARTS.issuperset(map(type, parts)):
                _require_path(parts, path)
            found.states[path] = state
            later[2 if hasattr(type(state), "built_on") else 1].append((parts, state))
        elif isinstance(value, SETS):
            found.numbers[path] = tuple(filter(is_number, value))
            later[0].append((parts, value))
        elif isinstance(value, NestedCheckpoint):
            waiting.extend([((*parts, *more), child, _Place.OBJECT) for more, child in reversed(value.held_objects())])
        else:
            _push_children(waiting, found, parts, value, place, names)
    return found


def _is_known(found: Found, seen: dict[int, str], path: str, value: object, place: _Place) -> bool:
    """Whether another path has led to an object before; notes the object else."""
    if isinstance(value, (Module, NestedCheckpoint)):
        found.modules.append(value)
    # Of a state only the variables are noted. Its containers were made for this walk: when one of them is gone,
    # another object may get its address, and would be taken for it.
    if place is _Place.STATE and not isinstance(value, BaseVariable):
        return False
    if id(value) not in seen:
        seen[id(value)] = path
        return False
    if path != seen[id(value)]:
        found.shared[path] = seen[id(value)]
    return True


def _add_leaf(found: Found, parts: Parts, path: str, value: object, in_state: bool) -> None:
    # Most paths are of names and numbers.
    if not path or not _PLAIN_PARTS.issuperset(map(type, parts)):
        _require_path(parts, path)
    if path in found.leaves:
        raise ValueError(
            f"two arrays of one checkpoint have the path {path!r}; keys such as 1 and '1' give the same path"
        )
    group: Communicator | None = None
    replicas, kind = 0, ""
    dtype: np.dtype[Any] | None = None
    if isinstance(value, BaseVariable):
        group, dtype = value.group, value.saved_dtype
        replicas = group.size if value.is_per_replica else 0
    elif isinstance(value, SavedArray):
        replicas, kind = value.replicas, value.kind
    elif isinstance(value, Component):
        replicas = value.group.size
    else:
        value, kind = _as_array(path, value)
    dtype = dtype or value.dtype
    if not is_storable(dtype):
        raise CheckpointError(
            f"{path!r}: expected a boolean, integer, floating or complex dtype, got {dtype}, which HDF5 cannot hold. "
            "Store it as another dtype, such as float32"
        )
    shape = (replicas, *value.shape) if replicas and isinstance(value, BaseVariable) else value.shape
    record = Record(path, shape, dtype.newbyteorder("="), replicas, kind)
    found.leaves[path] = Leaf(record, value, group, in_state, _VariablePath in map(type, parts))


def _entries_of(
    parts: Parts, value: object, paths: dict[int, str]
) -> tuple[list[tuple[Parts, object, _Place]], dict[int, object]]:
    """The members of a set; or what an object with state gives, and the names of the numbers in it."""
    if isinstance(value, SETS):
        return [((*parts, _Member()), member, _Place.OBJECT) for member in value], {}
    tree = cast(Stateful, value).state()
    names: dict[int, object] = {}
    for number, variable in enumerate(getattr(value, "built_on", ())):
        if id(variable) in paths:
            names[number] = _VariablePath(paths[id(variable)])
    return [(parts, tree, _Place.STATE)], names


def _require_path(parts: Parts, path: str) -> None:
    for part in parts:
        if isinstance(part, _Member):
            raise ValueError(
                f"{path!r}: members of a set have no names under which a checkpoint could hold them; use a list or a "
                "dictionary"
            )
        if not isinstance(part, (str, int)):
            raise ValueError(
                f"{path!r}: a dictionary that holds what is saved must have strings or integers as keys, got {part!r} "
                f"of type {type(part).__name__}"
            )
    if not path:
        raise ValueError("a root cannot be a variable or a single array; give it a name: Checkpoint(name=variable)")


def _push_children(
    waiting: list[tuple[Parts, object, _Place]], found: Found, parts: Parts, value: object, place: _Place,
    names: dict[int, object], *, in_module: bool = False,
) -> None:
    """Put what an object holds on the stack, so that the first child is popped first; note the numbers among it."""
    children, is_container = children_of(value), isinstance(value, CONTAINERS)
    if names and place is _Place.STATE:
        children = [(names.get(name, name) if type(name) is int else name, child) for name, child in children]
    if is_container and type(value) not in CONTAINERS:
        # A class of the user's may have attributes, too. They are pushed first, and so follow the items.
        attributes = SimpleNamespace(**attributes_of(value))
        _push_children(waiting, found, parts, attributes, place, names, in_module=isinstance(value, Module))
    hidden = place
    if not is_container:
        place = _Place.OURS if type(value).__module__.startswith("mpidist.") else _Place.OBJECT
        is_users = place is _Place.OBJECT and (in_module or isinstance(value, Module))
        # `self._x = x`: what a layer keeps from one call for the next, its gradients for instance.
        hidden = _Place.CACHE if is_users else place
    # An object may have a million plain values, which matter only where they are an error, or part of a state.
    skipped = PLAIN if place in (_Place.OBJECT, _Place.CACHE, _Place.OURS) else ()
    waiting.extend([
        ((*parts, name), child, hidden if not is_container and str(name).startswith("_") else place)
        for name, child in reversed(children) if type(child) not in skipped
    ])
    # The members of a set have one path in common.
    if place in (_Place.OBJECT, _Place.CACHE) and _Member not in map(type, parts):
        numbers = [(name, child) for name, child in children if is_number(child)]
        if is_container:
            found.numbers[join(parts)] = tuple([child for _, child in numbers])
        for name, child in [] if is_container else numbers:
            found.numbers[join((*parts, name))] = (child,)


def _note_unsaved(found: Found, parts: Parts, value: object, place: _Place) -> None:
    if not _is_lost(value, place):
        return
    if place is _Place.CACHE and is_array(value):
        found.caches.append(join(parts))
    else:
        found.lost[join(parts)] = value


def _is_lost(value: object, place: _Place) -> bool:
    """Whether a value that is not saved may be something that training changes, and the program must say so.

    Numbers that objects have as attributes are settings, or counters, and their owner may be a library; see `numbers`.
    An array that cannot be written to is a constant. Random generators of other libraries have `set_state`.
    """
    if is_array(value) or hasattr(type(value), "set_state"):
        return place is not _Place.OURS and getattr(getattr(value, "flags", None), "writeable", True)
    return place is _Place.ROOT and isinstance(value, (bool, int, float, complex, np.generic))


def _as_array(path: str, value: object) -> tuple[AnyArray, str]:
    """A value of a state as the array that the file keeps, and its kind; see `Record`."""
    if value is None:
        return np.zeros(0, np.uint8), NONE
    if isinstance(value, str):
        text = value.encode("utf-8", "surrogatepass")
        # HDF5 has no strings of length 0, and fills those that are too short with NUL.
        if text.endswith(b"\0") or (not value.isascii() and text != value.encode("utf-8", "replace")):
            return np.frombuffer(text, np.uint8), TEXT
        return np.array(text, dtype=f"S{max(1, len(text))}"), ""
    if isinstance(value, (bytes, bytearray)) and not isinstance(value, np.generic):
        return np.frombuffer(bytes(value), np.uint8), BYTES
    if isinstance(value, (np.ndarray, np.generic, bool, int, float, complex)):
        array = np.asarray(value)
        if array.dtype.kind == "U":
            array = np.char.encode(array, "utf-8", "surrogatepass")
            return array.astype(f"S{max(1, array.dtype.itemsize)}"), ""
        if array.dtype.kind == "S":
            return array.astype(f"S{max(1, array.dtype.itemsize)}"), BYTES
        if array.dtype.kind in "biufcV":
            return array, ""
    raise ValueError(
        f"{path!r}: expected a variable, a NumPy array of numbers or strings, a Python number of at most 64 bits, a "
        f"string, bytes or None as part of a state, got {value!r} of type {type(value).__name__}"
    )
