"""The objects of a checkpoint: one walk finds the arrays that it holds of them, each with its path."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeGuard, cast

import numpy as np

from mpidist.arrays import AnyArray
from mpidist.checkpoint.hdf5 import is_storable
from mpidist.checkpoint.layout import Record, join
from mpidist.checkpoint.saved import Saved
from mpidist.comm.communicator import Communicator, SoloCommunicator
from mpidist.errors import CheckpointError
from mpidist.variables.module import Module
from mpidist.variables.variable import Variable

Parts = tuple[object, ...]

_CONTAINERS = (dict, list, tuple)

# The walk does not enter objects of these packages: none is the user's, and some lead to all that the program has.
_OPAQUE = sys.stdlib_module_names | {"numpy", "h5py", "mpi4py"}
_OPAQUE_HERE = {"mpidist.comm", "mpidist.cluster", "mpidist.strategy"}


class State(Protocol):
    """An object that decides itself what a checkpoint saves of it: an optimizer, a metric, an iterator.

    An object that spans several ranks without having a variable has them as its attribute `group`, a `Communicator`.
    """

    def state(self) -> Any:
        """Local. Give what is to be saved.

        Returns:
            Dictionaries, lists and tuples, nested at will, of variables, NumPy arrays, and Python numbers and strings.
            Everything but variables must be the same on every rank.
        """

    def load_state(self, saved: Saved) -> None:
        """Collective. Take back what `state` once gave.

        Args:
            saved: Nested dictionaries of `SavedArray`, which may be kept for later. The keys are the same, as strings;
                a list's indices, too, are keys. `variable.load` takes `SavedArray.read_for(variable)`.
        """


class Leaf(NamedTuple):
    """One array that a checkpoint holds.

    Attributes:
        record: Its dataset.
        value: The variable, or the array.
        group: The ranks over which the variable spans; None for an array.
        in_state: Whether an object with `state` gave it, and takes it back.
    """

    record: Record
    value: Variable | AnyArray
    group: Communicator | None
    in_state: bool


@dataclass
class Found:
    """The result of one walk over objects.

    Attributes:
        leaves: Variables and arrays by path, in the order in which they are saved.
        states: Objects with `state` by path.
        shared: Of objects that several paths lead to, the further paths, each with the first one.
        modules: The modules on the way.
    """

    leaves: dict[str, Leaf] = field(default_factory=dict)
    states: dict[str, State] = field(default_factory=dict)
    shared: dict[str, str] = field(default_factory=dict)
    modules: list[Module] = field(default_factory=list)

    def group(self) -> Communicator:
        """Local. Find the ranks over which the variables span; variables of one rank may be among them.

        Where no variable spans several ranks, the objects with state decide: a distributed iterator for instance.

        Raises:
            ValueError: Variables, or such objects, of different groups.
        """
        alone: Communicator | None = None
        variables: dict[str, Communicator] = {}
        for path, leaf in self.leaves.items():
            if leaf.group is not None and leaf.group.size > 1:
                variables[path] = leaf.group
            alone = leaf.group or alone
        states: dict[str, Communicator] = {}
        for path, state in self.states.items():
            # A user's own object may call anything its group.
            group: Any = getattr(state, "group", None)
            if hasattr(group, "all_gather_object") and group.size > 1:
                states[path] = group
        members = variables or states
        for path, group in members.items():
            first, expected = next(iter(members.items()))
            if group is not expected:
                raise ValueError(
                    f"all that one checkpoint holds must span the same ranks, got {first!r} over {expected!r} and "
                    f"{path!r} over {group!r}. Make one checkpoint per strategy"
                )
        return next(iter(members.values()), None) or alone or SoloCommunicator()

    def names_of(self, path: str) -> Iterator[str]:
        """Local. Give `path` and the other paths that lead to the same object."""
        yield path
        for alias, first in self.shared.items():
            if path == first or path.startswith(first + "/"):
                yield alias + path[len(first) :]


def has_state(value: object) -> TypeGuard[State]:
    """Local. Whether an object decides itself what a checkpoint saves of it; see `State`."""
    # Looked up on the class: an instance may answer to any name, as proxies and data frames do.
    kind = type(value)
    return callable(getattr(kind, "state", None)) and callable(getattr(kind, "load_state", None))


def can_hold_variables(value: object) -> bool:
    """Local. Whether a checkpoint can hold `value`: a variable, a container, or an object with state or attributes."""
    return isinstance(value, (Variable, *_CONTAINERS)) or has_state(value) or _has_attributes(value)


def walk(roots: Iterable[tuple[Parts, object]]) -> Found:
    """Local. Find everything that a checkpoint of `roots` holds.

    The walk follows attributes, lists, tuples and dictionaries, in the order of names and indices. An object that
    several paths lead to counts under the first.

    Args:
        roots: Objects with their paths.

    Returns:
        All arrays and objects, each with its path.

    Raises:
        CheckpointError: A dtype that HDF5 cannot hold.
        ValueError: Two things with the same path, a dictionary key that is neither string nor integer on the way to
            a variable, or a state that holds something other than arrays, variables, numbers and strings.
    """
    found = Found()
    seen: dict[int, str] = {}
    waiting: list[tuple[Parts, object, bool]] = []
    for parts, value in roots:
        waiting.append((parts, value, False))
    waiting.reverse()
    while waiting:
        parts, value, in_state = waiting.pop()
        is_container = isinstance(value, _CONTAINERS)
        is_leaf = isinstance(value, Variable) or (in_state and not is_container)
        is_state = not in_state and not is_leaf and has_state(value)
        if not (is_leaf or is_state or is_container or _has_attributes(value)):
            continue
        path = join(parts)
        # Of a state only the variables are noted. Its containers were made for this walk: when one of them is gone,
        # another object may get its address, and would be taken for it.
        if not in_state or isinstance(value, Variable):
            if id(value) in seen:
                if path != seen[id(value)]:
                    found.shared[path] = seen[id(value)]
                continue
            seen[id(value)] = path
        if isinstance(value, Module):
            found.modules.append(value)
        if is_leaf:
            _add_leaf(found, parts, path, value, in_state)
        elif is_state:
            _require_path(parts, path)
            found.states[path] = cast(State, value)
            waiting.append((parts, found.states[path].state(), True))
        else:
            _push_children(waiting, parts, value, in_state)
    return found


def _add_leaf(found: Found, parts: Parts, path: str, value: object, in_state: bool) -> None:
    _require_path(parts, path)
    if path in found.leaves:
        raise ValueError(
            f"two arrays of one checkpoint have the path {path!r}; keys such as 1 and '1' are the same there"
        )
    group: Communicator | None = None
    replicas = 0
    if isinstance(value, Variable):
        group = value.group
        replicas = group.size if value.is_per_replica else 0
    else:
        value = _as_array(path, value)
    if not is_storable(value.dtype):
        raise CheckpointError(
            f"{path!r}: expected a boolean, integer, floating or complex dtype, got {value.dtype}, which HDF5 cannot "
            "hold. Store it as another dtype, bfloat16 as float32 for instance"
        )
    shape = (replicas, *value.shape) if replicas else value.shape
    found.leaves[path] = Leaf(Record(path, shape, value.dtype.newbyteorder("="), replicas), value, group, in_state)


def _require_path(parts: Parts, path: str) -> None:
    for part in parts:
        if not isinstance(part, (str, int)):
            raise ValueError(
                f"{path!r}: a dictionary that holds what is saved must have strings or integers as keys, got {part!r} "
                f"of type {type(part).__name__}"
            )
    if not path:
        raise ValueError("a root cannot be a variable or a single array; give it a name: Checkpoint(name=variable)")


def _push_children(waiting: list[tuple[Parts, object, bool]], parts: Parts, value: object, in_state: bool) -> None:
    """Put what an object holds on the stack, so that the first child is popped first."""
    children: Any = value if isinstance(value, _CONTAINERS) else vars(value)
    names: Sequence[object] = sorted(children, key=str) if isinstance(children, dict) else range(len(children))
    for name in reversed(names):
        waiting.append(((*parts, name), children[name], in_state))


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
