"""Tables in a server's heap: one buffer each, in which a change touches its rows alone.

Each block of a few rows has a version. It is odd while rows of the block change, so that a reader knows whether what
it has read is whole. The version of the table itself changes with each of them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mpidist.arrays import AnyArray
from mpidist.parameter_server.heap.dense import BEGUN, VERSION, HeapVariable, Updates
from mpidist.parameter_server.heap.rows import SCATTER, block_count, unpack, written
from mpidist.parameter_server.protocol.messages import CommitStep
from mpidist.variables.kinds.served import ServedPlace
from mpidist.variables.scatter import apply_rows
from mpidist.variables.update.arithmetic import UpdateSettings
from mpidist.variables.update.rows import RowArithmetic
from mpidist.variables.whole_numbers import changed_rows


class HeapTable(HeapVariable):
    """A table in the heap of this process.

    Args:
        memory: The heap.
        place: The place of the table.
        name: A name for display and errors.

    Attributes:
        rows: The rows of shape (rows, width).
    """

    def __init__(self, memory: AnyArray, place: ServedPlace, name: str = "") -> None:
        super().__init__(memory, place, name)
        self.rows = self.buffers[0].reshape(place.shape[0], place.width)
        self.versions = memory[place.versions : place.versions + 8 * block_count(place)].view(np.uint64)

    def begin(self) -> int:
        """Local. Begin to change all rows, in their place; see `HeapVariable.begin`."""
        buffer = super().begin()
        self.versions += 1
        return buffer

    def show(self) -> None:
        """Local. End what `begin` has begun."""
        self.versions += 1
        super().show()

    def change_rows(self, numbers: AnyArray, write: Callable[[], object]) -> None:
        """Local. Change some rows.

        Args:
            numbers: The numbers of the rows.
            write: A function that writes to these rows, and to no others.
        """
        blocks = np.unique(numbers // self.place.block_rows)
        self.words[BEGUN] += np.uint64(1)
        self.versions[blocks] += np.uint64(1)
        write()
        self.versions[blocks] += np.uint64(1)
        self.words[VERSION] = self.words[BEGUN]

    @property
    def is_open(self) -> bool:
        """Local. Whether all rows are being changed, between `begin` and `show`."""
        return bool(self.words[VERSION] != self.words[BEGUN])

    def give(self, numbers: AnyArray) -> AnyArray | None:
        """Local. A copy of some rows; None while all are being changed."""
        return None if self.is_open else np.asarray(self.rows[numbers])


class TableUpdates(Updates):
    """The updates of one optimizer, on tables by rows; see `Updates`."""

    def _apply(self, variable: HeapVariable, gradient: AnyArray, step: CommitStep, factor: float) -> None:
        """Local. See `Updates._apply`; the gradient of a table has rows, packed by `rows.pack`, each of them once."""
        if not isinstance(variable, HeapTable):
            super()._apply(variable, gradient, step, factor)
            return
        place = variable.place
        merged = unpack(gradient, place)
        states = [slot.current.reshape(place.shape[0], place.width) for slot in self._slots[place.number]]
        arithmetic = RowArithmetic(variable.rows, states, self._arithmetic.scratch_count)
        arithmetic.apply_aside(merged, self._arithmetic.prepare(UpdateSettings(step.iteration + 1, step.rate, factor)))
        variable.change_rows(merged[0], lambda: arithmetic.write_back(merged))


def heap_variable(memory: AnyArray, place: ServedPlace, name: str) -> HeapVariable:
    """Local. The variable that is at a place in the heap of this process."""
    return (HeapTable if place.block_rows else HeapVariable)(memory, place, name)


def scatter(variable: HeapVariable, kind: str, packed: AnyArray) -> None:
    """Local. Change some rows of a variable.

    Args:
        variable: A table or another one.
        kind: The kind of the change, with `SCATTER`.
        packed: See `rows.pack`.

    Raises:
        OverflowError: Integers would wrap. Nothing has changed.
    """
    place = variable.place
    numbers, values = unpack(packed, place)
    if values.dtype.kind in "iu":
        current = variable.current.reshape(place.shape[0], place.width)
        changed_rows(variable.name, kind.removeprefix(SCATTER), current, values, numbers)
    if not isinstance(variable, HeapTable):
        variable.change(written(place, kind, packed))
        return
    variable.change_rows(numbers, lambda: apply_rows(kind.removeprefix(SCATTER), variable.rows, values, numbers))


def rows_of(variable: HeapVariable, kind: str, array: AnyArray) -> tuple[list[int], int] | None:
    """Local. The rows of a table that a change touches, and no others; None for a change of a whole variable.

    Args:
        variable: A table or another one.
        kind: The kind of the change.
        array: The array of the change.

    Returns:
        The first elements of the rows, increasing, and the number of elements of each.
    """
    if not isinstance(variable, HeapTable) or not (kind == "step" or kind.startswith(SCATTER)):
        return None
    numbers, _ = unpack(array, variable.place)
    width = max(1, variable.place.width)
    return (np.unique(numbers) * width).tolist(), width
