"""From a program's objects to the arrays that a checkpoint holds of them, each with its path."""

from __future__ import annotations

import sys
import types
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeGuard

import numpy as np

from mpidist.arrays import AnyArray
from mpidist.checkpoint.hdf5 import check_storable
from mpidist.checkpoint.layout import join
from mpidist.checkpoint.saved import Saved
from mpidist.comm.agreement import name_ranks
from mpidist.comm.communicator import Communicator, SoloCommunicator
from mpidist.errors import MismatchError, mark_shared
from mpidist.variables.module import Module
from mpidist.variables.variable import Variable

Leaf = Variable | AnyArray
Parts = tuple[object, ...]

# Objects of these packages are not looked into: none is the user's, and some lead to all that the program has.
_OPAQUE = sys.stdlib_module_names | {"numpy", "h5py", "mpi4py"}
_OPAQUE_HERE = {"mpidist.comm", "mpidist.cluster", "mpidist.strategy"}


class State(Protocol):
    """An object that says itself what is saved of it: an optimizer, a metric, an iterator.

    One that spans ranks without a variable has them as its attribute `group`, a `Communicator`.
    """

    def state(self) -> Any:
        """Local. What to save.

        Returns:
            Dictionaries, lists and tuples, nested at will, of variables, NumPy arrays, and Python numbers and strings.
            What is not a variable must be the same on every rank.
        """

    def load_state(self, saved: Saved) -> None:
        """Collective. Take back what `state` once gave.

        Args:
            saved: Nested dictionaries with the same keys as strings, a list's indices too, of `SavedArray`. They may
                be kept for later. `SavedArray.read_for(variable)` is what `variable.load` takes.
        """


@dataclass
class Found:
    """What a walk over objects came across.

    Attributes:
        leaves: Variables and arrays by path, in the order in which they are saved.
        states: Objects with `state` by path.
        in_states: Paths of those leaves that `states` gave.
        shared: Further paths of what is reachable by several, with the first one.
        modules: Those on the way.
    """

    leaves: dict[str, Leaf] = field(default_factory=dict)
    states: dict[str, State] = field(default_factory=dict)
    in_states: set[str] = field(default_factory=set)
    shared: dict[str, str] = field(default_factory=dict)
    modules: list[Module] = field(default_factory=list)

    def group(self) -> Communicator:
        """Local. The ranks over which the variables span; variables of one rank may be among them.

        Where no variable spans several ranks, it is those over which the objects with state span: a distributed
        iterator for instance.

        Raises:
            ValueError: Variables, or such objects, of different groups.
        """
        variables = [(path, leaf.group) for path, leaf in self.leaves.items() if isinstance(leaf, Variable)]
        states = [(path, group) for path, state in self.states.items() if (group := _group_of(state)) is not None]
        for members in (variables, states):
            spanning = [(path, group) for path, group in members if group.size > 1]
            for path, group in spanning:
                first, expected = spanning[0]
                if group is not expected:
                    raise ValueError(
                        f"all that one checkpoint holds must span the same ranks, got {first!r} over {expected!r} and "
                        f"{path!r} over {group!r}. Make one checkpoint per strategy"
                    )
            if spanning:
                return spanning[0][1]
        return variables[-1][1] if variables else SoloCommunicator()

    def names_of(self, path: str) -> Iterator[str]:
        """Local. `path` and the other paths that lead to the same object."""
        yield path
        for alias, first in self.shared.items():
            if path == first or path.startswith(first + "/"):
                yield alias + path[len(first) :]


def has_state(value: object) -> TypeGuard[State]:
    """Local. Whether an object says itself what is saved of it."""
    # Looked up on the class: an instance may answer to any name, as proxies and data frames do.
    kind = type(value)
    return callable(getattr(kind, "state", None)) and callable(getattr(kind, "load_state", None))


def can_hold_variables(value: object) -> bool:
    """Local. Whether a checkpoint can hold `value`: a variable, a container, or an object with state or attributes."""
    return isinstance(value, (Variable, dict, list, tuple)) or has_state(value) or _has_attributes(value)


def walk(roots: Iterable[tuple[Parts, object]]) -> Found:
    """Local. Find everything that a checkpoint of `roots` holds.

    Objects are followed through attributes, lists, tuples and dictionaries, in the order of names and indices. What
    is reachable by several paths counts under the first.

    Args:
        roots: Objects with their paths.

    Returns:
        What was found.

    Raises:
        ValueError: Two things with the same path, a dictionary key that is neither string nor integer on the way to
            a variable, or a state that holds something other than arrays, variables, numbers and strings.
    """
    found = Found()
    seen: dict[int, str] = {}
    waiting = list(roots)[::-1]
    while waiting:
        parts, value = waiting.pop()
        if not can_hold_variables(value):
            continue
        path = join(parts)
        if id(value) in seen:
            if path != seen[id(value)]:
                found.shared[path] = seen[id(value)]
            continue
        seen[id(value)] = path
        if isinstance(value, Module):
            found.modules.append(value)
        if isinstance(value, Variable):
            _add(found, parts, value)
        elif has_state(value):
            _require_path(parts)
            found.states[path] = value
            _walk_state(found, seen, parts, value.state())
        else:
            waiting.extend(((*parts, name), child) for name, child in reversed(_children(value)))
    return found


def require_same_objects(communicator: Communicator, lines: list[str]) -> None:
    """Collective. Raise on every rank unless all ranks pass the same lines, one for each array.

    Raises:
        MismatchError: Shows the first line that differs.
    """
    if communicator.size == 1:
        return
    digests = communicator.all_gather_object((len(lines), zlib.crc32("\n".join(lines).encode())))
    if all(digest == digests[0] for digest in digests):
        return
    everyone = communicator.all_gather_object(lines)
    place = next(
        n for n in range(max(map(len, everyone)) + 1) if len({tuple(other[n : n + 1]) for other in everyone}) > 1
    )
    groups: dict[str, list[int]] = {}
    for rank, other in enumerate(everyone):
        groups.setdefault(other[place] if place < len(other) else "nothing more", []).append(rank)
    got = "; ".join(f"{line} on {name_ranks(ranks)}" for line, ranks in list(groups.items())[:4])
    raise mark_shared(MismatchError(
        f"all ranks must hold the same objects in a checkpoint, got as number {place}: {got}. Build the same objects "
        "on every rank; what differs by rank can be saved as an array with one row per rank"
    ))


def _group_of(state: State) -> Communicator | None:
    # A user's own object may call anything its group.
    group = getattr(state, "group", None)
    return group if hasattr(group, "all_gather_object") else None


def _walk_state(found: Found, seen: dict[int, str], parts: Parts, tree: object) -> None:
    waiting = [(parts, tree)]
    while waiting:
        parts, value = waiting.pop()
        if isinstance(value, (dict, list, tuple)):
            waiting.extend(((*parts, name), child) for name, child in reversed(_children(value)))
            continue
        path = join(parts)
        if isinstance(value, Variable):
            if id(value) in seen:
                found.shared[path] = seen[id(value)]
                continue
            seen[id(value)] = path
        else:
            value = _as_array(path, value)
        _add(found, parts, value)
        found.in_states.add(path)


def _add(found: Found, parts: Parts, leaf: Leaf) -> None:
    path = _require_path(parts)
    if path in found.leaves:
        raise ValueError(
            f"two arrays of one checkpoint have the path {path!r}; keys such as 1 and '1' are the same there"
        )
    check_storable(path, leaf.dtype)
    found.leaves[path] = leaf


def _require_path(parts: Parts) -> str:
    path = join(parts)
    for part in parts:
        if not isinstance(part, (str, int)):
            raise ValueError(
                f"{path!r}: a dictionary that holds what is saved must have strings or integers as keys, got {part!r} "
                f"of type {type(part).__name__}"
            )
    if not path:
        raise ValueError("a root cannot be a variable or a single array; give it a name: Checkpoint(name=variable)")
    return path


def _children(value: object) -> list[tuple[object, object]]:
    if isinstance(value, dict):
        return sorted(value.items(), key=lambda item: str(item[0]))
    if isinstance(value, (list, tuple)):
        return list(enumerate(value))
    return sorted(vars(value).items())


def _has_attributes(value: object) -> bool:
    kind = type(value)
    package, *rest = kind.__module__.split(".")
    is_opaque = package in _OPAQUE or ".".join((package, *rest[:1])) in _OPAQUE_HERE
    # Classes are no objects to save, whatever their metaclass.
    if isinstance(value, type) or (is_opaque and kind is not types.SimpleNamespace):
        return False
    return isinstance(getattr(value, "__dict__", None), dict)


def _as_array(path: str, value: object) -> AnyArray:
    if isinstance(value, str):
        text = value.encode()
        if text.endswith(b"\0"):
            raise ValueError(f"{path!r}: a string that ends with NUL cannot be stored, got {value!r}")
        # HDF5 has no strings of length 0.
        return np.array(text, dtype=f"S{max(1, len(text))}")
    if isinstance(value, (np.ndarray, np.generic, bool, int, float, complex)):
        array = np.asarray(value)
        if array.dtype.kind in "biufcV":
            return array
    raise ValueError(
        f"{path!r}: expected a variable, a NumPy array of numbers, or a Python number of at most 64 bits or string as "
        f"part of a state, got {value!r} of type {type(value).__name__}"
    )
