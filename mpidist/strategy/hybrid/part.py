"""A part: the variables of one optimizer, as far as groups exchange them, and the outer momentum as a variable."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from mpidist.arrays import AnyArray
from mpidist.indexed_slices import IndexedSlices
from mpidist.options import VariableAggregation, VariableSynchronization
from mpidist.strategy.hybrid.outer import Flat, FlatLayout, Place, flat_dtype, read_variables
from mpidist.variables.kinds.mirrored import MirroredVariable
from mpidist.variables.reading import read_together
from mpidist.variables.update.halves import state_dtype
from mpidist.variables.variable import BaseVariable, Read

if TYPE_CHECKING:
    from mpidist.strategy.hybrid.home import HybridArena


class Part:
    """The variables of one optimizer. Their leader holds what the groups exchange; other ranks have empty arrays.

    Args:
        number: Its number, the same in every group.
        variables: The variables, in the same order in every group.
        leads: Whether this rank leads its group.

    Attributes:
        number: The constructor's argument.
        variables: The constructor's argument.
        layout: The places of the variables in flat arrays.
        pieces: The pieces in which increments travel.
        steps: The number of local steps in this window.
        windows: The number of outer steps of this group.
        outer: The parameters on which all groups agree, up to what is under way.
        velocity: The outer momentum of this group.
        restored: The sum of all groups' momenta in a checkpoint that was just restored; None where there is none.
        is_begun: Whether the groups have agreed on the parameters since they were made or restored.
    """

    def __init__(self, number: int, variables: Sequence[MirroredVariable], *, leads: bool) -> None:
        self.number = number
        self.variables = tuple(variables)
        self.layout = FlatLayout(variables)
        self.pieces: Sequence[Place] = self.layout.pieces()
        self.steps = self.windows = 0
        self.outer: Flat = self.layout.zeros() if leads else []
        self.velocity: Flat = self.layout.zeros() if leads else []
        self.restored: Flat | None = None
        self.is_begun = False
        self._start: Flat = []

    @cached_property
    def shapes(self) -> list[tuple[tuple[int, ...], str]]:
        """Local. Shapes and dtypes, which must be the same in every group."""
        return [(variable.shape, variable.dtype.name) for variable in self.variables]

    def take(self, place: Place, increment: memoryview) -> None:
        """Local. Add the piece of another group's increment to the outer parameters."""
        target = self.outer[place.section][place.start : place.stop]
        np.add(target, np.frombuffer(increment, target.dtype), out=target)

    def differences(self, group_count: int) -> Flat:
        """Local. The way of the variables since the begin of the window, against its direction, divided by a number."""
        values = read_variables(self.variables, self.layout)
        for value, start in zip(values, self._start, strict=True):
            np.subtract(start, value, out=value)
            np.divide(value, group_count, out=value)
        return values

    def begin_window(self) -> None:
        """Local. Begin to count steps from the present values of the variables."""
        # Not from `outer`: a variable of half precision holds it rounded.
        self._start = read_variables(self.variables, self.layout)

    def take_values(self) -> None:
        """Local. Let the values at the begin of the window be the outer parameters."""
        self.outer = [start.copy() for start in self._start]

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
        variable = part.variables[number]
        self.home = self._arena = home
        self.name = f"outer_momentum of {variable.name}"
        self.shape, self.dtype = variable.shape, state_dtype(variable.dtype)
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
