"""The parts of a home: the variables of optimizers that the groups exchange."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence

from mpidist.strategy.hybrid.part import Part
from mpidist.variables.kinds.mirrored import MirroredVariable


class ExchangedParts:
    """The parts, by their numbers, which are the same in every group.

    Until its groups have agreed on a part, the optimizer alone keeps it. Then it is kept until all groups agree that it
    is unused: an increment of it may be under way, or a group may still read the variables.

    Args:
        leads: Whether this rank leads its group.
    """

    def __init__(self, *, leads: bool) -> None:
        self._leads = leads
        self._count = 0
        self._begun: dict[int, Part] = {}
        self._new: weakref.WeakValueDictionary[int, Part] = weakref.WeakValueDictionary()

    @property
    def begun(self) -> list[Part]:
        """Local. The parts on which the groups have agreed, in the order of their numbers."""
        return [self._begun[number] for number in sorted(self._begun)]

    def place(self, variables: Sequence[MirroredVariable]) -> list[tuple[Part, int]]:
        """Local. The part of each variable and its number there; those that are in none become a new part."""
        known = {id(one): (part, number) for part in self._all() for number, one in part.variables}
        new = [variable for variable in variables if id(variable) not in known]
        if new:
            part = Part(self._count, new, leads=self._leads)
            self._count += 1
            self._new[part.number] = part
            known.update((id(variable), (part, number)) for number, variable in enumerate(new))
        return [known[id(variable)] for variable in variables]

    def note_loaded(self, variable: MirroredVariable) -> None:
        """Local. Note that a variable was restored: earlier exchanges of it do not count any more."""
        for part in self._all():
            if any(one is variable for _, one in part.variables):
                part.note_restored()

    def note_begun(self, part: Part) -> None:
        """Local. Keep a part, on which the groups have agreed."""
        self._begun[part.number] = part
        self._new.pop(part.number, None)
        part.note_begun()

    def look(self) -> tuple[list[Part], list[int]]:
        """Local. The new parts that this rank has, and the numbers of those that it does not use any more."""
        new = sorted(self._new.values(), key=lambda part: part.number)
        return new, [part.number for part in self.begun if part.is_unused]

    def drop(self, numbers: Iterable[int]) -> None:
        """Local. Drop parts."""
        for number in numbers:
            del self._begun[number]

    def clear(self) -> None:
        """Local. Drop all parts."""
        self._begun.clear()
        self._new.clear()

    def _all(self) -> list[Part]:
        return [*self.begun, *self._new.values()]
