"""Results of one walk over a checkpoint's objects: arrays by path, the ranks that share them, and which ranks write."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, NamedTuple

from mpidist import launch
from mpidist.arrays import AnyArray
from mpidist.checkpoint.file.layout import Record
from mpidist.checkpoint.file.saved import SavedArray
from mpidist.checkpoint.walk.registered import Component
from mpidist.checkpoint.walk.states import Stateful
from mpidist.comm.group.communicator import Communicator
from mpidist.comm.group.solo import SoloCommunicator
from mpidist.first_rank import is_chief, role_rank
from mpidist.recorder.calls import Calls
from mpidist.variables.kinds.served import ServedHome, ServedVariable
from mpidist.variables.kinds.sharded import ShardedVariable
from mpidist.variables.module import Module
from mpidist.variables.variable import BaseVariable

logger = logging.getLogger("mpidist")

Parts = tuple[object, ...]


class NestedCheckpoint:
    """A checkpoint, whose objects another one may hold."""

    def held_objects(self) -> list[tuple[Parts, object]]:
        """Local. The objects with their paths, in the order of names."""
        raise NotImplementedError(f"{type(self).__name__} does not define held_objects()")


class Leaf(NamedTuple):
    """One array that a checkpoint holds.

    Attributes:
        record: Its dataset.
        value: The variable, the array, or this rank's component of one; one of another checkpoint where it still waits
            there to be taken back.
        group: The ranks over which the variable spans; None for an array.
        in_state: Whether an object with `state` gave it, and takes it back.
        is_named: Whether it belongs to a variable of the object's `built_on`, whose path is part of its own.
    """

    record: Record
    value: BaseVariable | AnyArray | SavedArray | Component
    group: Communicator | None
    in_state: bool
    is_named: bool


@dataclass
class Found:
    """The result of one walk over objects.

    Attributes:
        leaves: Variables and arrays by path, in the order in which they are saved.
        states: Objects with `state` by path.
        shared: The further paths of objects with several paths, each with the first one.
        modules: The modules and checkpoints that the walk has passed.
        lost: Values that the program may change and that would not be saved, by path.
        caches: Paths of arrays that are not saved either, since they are in attributes of modules that begin with `_`.
        numbers: The plain numbers of objects, by path; the numbers of a list, dictionary or set together.
    """

    leaves: dict[str, Leaf] = field(default_factory=dict)
    states: dict[str, Stateful] = field(default_factory=dict)
    shared: dict[str, str] = field(default_factory=dict)
    modules: list[Module | NestedCheckpoint] = field(default_factory=list)
    lost: dict[str, object] = field(default_factory=dict)
    caches: list[str] = field(default_factory=list)
    numbers: dict[str, tuple[object, ...]] = field(default_factory=dict)

    def group(self) -> Communicator:
        """Local. Find the ranks over which the variables span; variables of one rank may be among them.

        Where no variable spans several ranks, the objects with state decide: a distributed iterator for instance.

        Raises:
            ValueError: Variables, or such objects, are of different groups.
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
                    f"all objects of one checkpoint must span the same ranks, got {first!r} over {expected!r} and "
                    f"{path!r} over {group!r}. Make one checkpoint per strategy"
                )
        return next(iter(members.values()), None) or alone or SoloCommunicator()

    def places_in_group(self) -> dict[str, Any]:
        """Local. The `place_in_group` of the objects that have one, by path; see `Stateful`."""
        # Looked up on the class, as `states.state_of` does.
        kept: dict[str, Any] = {
            path: state for path, state in self.states.items() if hasattr(type(state), "place_in_group")
        }
        return {path: state.place_in_group for path, state in kept.items() if state.place_in_group is not None}

    def note_places(self, of_groups: Mapping[int, Mapping[str, Any]]) -> None:
        """Local. Tell the objects with a place what the other groups' `places_in_group` are."""
        for path in self.places_in_group():
            state: Any = self.states[path]
            state.note_places({group: places[path] for group, places in of_groups.items() if path in places})

    def servers(self) -> ServedHome | None:
        """Local. Find the home of the variables that are on parameter servers; None where there are none.

        Raises:
            ValueError: The variables are of several strategies.
        """
        homes: dict[int, ServedHome] = {}
        for leaf in self.leaves.values():
            if isinstance(leaf.value, (ServedVariable, ShardedVariable)):
                homes[id(leaf.value.served)] = leaf.value.served
        if len(homes) > 1:
            raise ValueError(
                "variables on parameter servers in one checkpoint must belong to one strategy, got variables of "
                f"{len(homes)}. Make one checkpoint per strategy"
            )
        return next(iter(homes.values()), None)

    def is_written_here(self, group: Communicator) -> bool:
        """Local. Whether this rank of `group`, which is the objects' own, takes part in saves of them.

        Else another rank saves what is its own.
        """
        return group.mpi is not None or self.servers() is not None or _writes_what_is_its_own(role_rank())

    def calls(self, group: Communicator) -> Calls:
        """Local. The record of the calls that the ranks of `group`, which is the objects' own, make together."""
        variable = self.variable(group)
        return group.calls if variable is None else variable.calls

    def variable(self, group: Communicator) -> BaseVariable | None:
        """Local. Find a variable of `group`, which is the objects' own; None where it has none."""
        for leaf in self.leaves.values():
            if leaf.group is group and isinstance(leaf.value, BaseVariable):
                return leaf.value
        return None

    def names_of(self, path: str) -> Iterator[str]:
        """Local. Give `path` and the other paths that lead to the same object."""
        yield path
        ends = [at for at, letter in enumerate(path) if letter == "/"] if self.shared else []
        for end in [*ends, len(path)]:
            for alias in self._aliases.get(path[:end], ()):
                yield alias + path[end:]

    @cached_property
    def _aliases(self) -> dict[str, list[str]]:
        """The inverse: the further paths by the first one. Call it after the walk has ended."""
        aliases: dict[str, list[str]] = {}
        for alias, first in self.shared.items():
            aliases.setdefault(first, []).append(alias)
        return aliases


@cache
def _writes_what_is_its_own(_role: int | None) -> bool:
    """Whether this process writes objects that every rank of the job has for itself; the first call logs a warning.

    Only one process of a group may write: all of them would write the same files.

    Args:
        _role: The role on which the answer depends, besides the launcher's environment.
    """
    if not is_chief(SoloCommunicator()):
        return False
    size = launch.world_size()
    if size > 1:
        logger.warning(
            "each of the %d ranks has variables of its own, so only rank %d writes checkpoints. To train one model on "
            "all ranks, create the variables in the scope of a distributed strategy", size, launch.world_rank(),
        )
    return True
