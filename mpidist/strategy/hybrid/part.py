"""A part: the variables of one optimizer, as far as groups exchange them, and the outer momentum as a variable."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from mpidist.arrays import AnyArray
from mpidist.indexed_slices import IndexedSlices
from mpidist.options import VariableAggregation, VariableSynchronization
from mpidist.strategy.hybrid.lead import Lead
from mpidist.strategy.hybrid.outer import Flat, FlatLayout, Member, Place, flat_dtype, read_members
from mpidist.variables.kinds.mirrored import MirroredVariable
from mpidist.variables.reading import read_together
from mpidist.variables.update.halves import state_dtype
from mpidist.variables.variable import BaseVariable, Read

if TYPE_CHECKING:
    from mpidist.strategy.hybrid.home import HybridArena


class Part:
    """The variables of one optimizer. Their leader holds what the groups exchange; other ranks have empty arrays.

    It does not keep the variables alive, but their memory: ranks drop variables at different times, and together write
    to the memory of all until they have agreed that nobody has any.

    Args:
        number: The number of the part, the same in every group.
        variables: The variables, in the same order in every group.
        leads: Whether this rank leads its group.

    Attributes:
        number: The constructor's argument.
        members: The memory of the variables, with names, shapes and dtypes.
        layout: The places of the variables in flat arrays.
        pieces: The pieces in which increments travel.
        steps: The number of local steps in this window.
        windows: The number of outer steps of this group.
        outer: The parameters on which all groups agree, except for increments that are being sent.
        velocity: The outer momentum of this group.
        start: The values of the variables at the begin of the window.
        lead: The increments that this group expects of the others.
        restored: The sum of all groups' momenta in a checkpoint that was just restored; None where there is none.
        is_begun: Whether the groups have agreed on the parameters since they were made or restored.
    """

    def __init__(self, number: int, variables: Sequence[MirroredVariable], *, leads: bool) -> None:
        self.number = number
        self.members = tuple(map(Member.of, variables))
        self._variables = [weakref.ref(variable) for variable in variables]
        self.layout = FlatLayout(self.members)
        self.pieces: Sequence[Place] = self.layout.pieces()
        self.steps = self.windows = 0
        self.outer: Flat = self.layout.zeros() if leads else []
        self.velocity: Flat = self.layout.zeros() if leads else []
        self.lead = Lead(self.pieces)
        self.restored: Flat | None = None
        self.is_begun = False
        self.start: Flat = []

    @cached_property
    def shapes(self) -> list[tuple[tuple[int, ...], str]]:
        """Local. Shapes and dtypes, which must be the same in every group."""
        return [(member.shape, member.dtype.name) for member in self.members]

    @property
    def variables(self) -> Iterator[tuple[int, MirroredVariable]]:
        """Local. The variables that this rank still has, with their numbers in the part."""
        held = ((number, reference()) for number, reference in enumerate(self._variables))
        return ((number, variable) for number, variable in held if variable is not None)

    @property
    def is_unused(self) -> bool:
        """Local. Whether this rank has dropped all variables, and the optimizers that update them."""
        return next(self.variables, None) is None

    def take(self, piece: int, increment: memoryview, windows: int) -> None:
        """Local. Add a piece of another group's increments of some windows to the outer parameters."""
        section, start, stop = self.pieces[piece]
        target = self.outer[section][start:stop]
        np.add(target, np.frombuffer(increment, target.dtype), out=target)
        self.lead.note_arrival(piece, windows)

    def continue_from(self, windows: int) -> None:
        """Local. Take the number of outer steps of an earlier program."""
        self.windows = windows

    def differences(self, group_count: int) -> Flat:
        """Local. The values at the begin of the window minus the present values, divided by the number of groups."""
        values = read_members(self.members, self.layout)
        for value, start in zip(values, self.start, strict=True):
            np.subtract(start, value, out=value)
            np.divide(value, group_count, out=value)
        return values

    def begin_window(self) -> None:
        """Local. Begin to count steps from the present values of the variables."""
        # Not from `outer`: a variable of half precision holds it rounded.
        self.start = read_members(self.members, self.layout)

    def take_values(self) -> None:
        """Local. Let the values at the begin of the window be the outer parameters."""
        self.outer = [start.copy() for start in self.start]
        self.lead.clear()

    def present(self) -> Flat:
        """Local. On a leader, the values for the variables: the outer parameters plus the expected increments."""
        if not self.lead.flat:
            return self.outer
        return [np.add(outer, lead) for outer, lead in zip(self.outer, self.lead.flat, strict=True)]

    def note_restored(self) -> None:
        """Local. Note that values were restored: the groups must agree again before the next step."""
        self.is_begun = False

    def note_begun(self) -> None:
        """Local. Note that the groups have agreed."""
        self.is_begun, self.steps, self.restored = True, 0, None

    def count_step(self) -> None:
        """Local. Count a local step."""
        self.steps += 1

    def note_window(self) -> None:
        """Local. Count an outer step, after which a window begins."""
        self.steps = 0
        self.windows += 1

    def load_momentum(self, place: Place, value: AnyArray) -> None:
        """Local. Keep the momentum of a variable that a checkpoint holds, until the groups begin again."""
        if self.restored is None:
            self.restored = self.layout.zeros()
        target = self.restored[place.section][place.start : place.stop]
        target[...] = value.view(target.dtype) if value.dtype.kind == "c" else value


class OuterMomentum(BaseVariable):
    """The sum of all groups' outer momenta of one variable, as a checkpoint holds it; it is on the leaders.

    Args:
        home: The home of the variable.
        part: The variable's part.
        number: The number of the variable in it.
    """

    def __init__(self, home: HybridArena, part: Part, number: int) -> None:
        member = part.members[number]
        self.home = self._arena = home
        self.name = f"outer_momentum of {member.name}"
        self.shape, self.dtype = member.shape, state_dtype(member.dtype)
        self.trainable = False
        self.synchronization = VariableSynchronization.ON_WRITE
        self.aggregation = VariableAggregation.NONE
        self._part, self._place = part, part.layout.places[number]

    def value(self) -> AnyArray:
        """Collective over the group. The sum of all groups' momenta, if they have equal shares, as in a save."""
        place, home = self._place, self._arena
        real = flat_dtype(self.dtype)
        mine = np.zeros(place.stop - place.start, real)
        if home.leads:
            np.multiply(self._part.velocity[place.section][place.start : place.stop], home.share_count, out=mine)
        array = home.collective.broadcast(mine)
        return (array.view(self.dtype) if self.dtype.kind == "c" else array).reshape(self.shape)

    def write_array(self, array: AnyArray) -> None:
        """Collective. See `load`."""
        flat = array.reshape(-1)
        self.load(lambda start, stop: flat[start:stop])

    def add_array(self, array: AnyArray, method: str = "assign_add") -> None:
        """Local. A momentum is not added to."""
        del array
        raise TypeError(f"{self.name}: {method} is not defined for an outer momentum, which only restores change")

    def scatter(self: OuterMomentum, kind: str, sparse_delta: IndexedSlices) -> OuterMomentum:
        """Local. A momentum has no rows to change."""
        del sparse_delta
        raise TypeError(f"{self.name}: scatter_{kind} is not defined for an outer momentum, which only restores change")

    def reader(self) -> Read:
        """Collective. See `BaseVariable.reader`."""
        flat: Any = self.value().reshape(-1)
        return lambda start, stop: flat[start:stop]

    def load(self, read: Read) -> None:
        """Collective over the group. Keep a momentum until all groups begin again, at the next step."""
        data = read_together(self, read, 0, self.size if self._arena.leads else 0)
        if self._arena.leads:
            self._part.load_momentum(self._place, np.asarray(data))
        self._part.note_restored()
