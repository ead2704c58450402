"""Rows of variables on servers: how they are sent to a server, and how they are read from one."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mpidist.arrays import AnyArray
from mpidist.indexed_slices import IndexedSlices
from mpidist.parameter_server.heap.versioned_read import READ
from mpidist.parameter_server.protocol.endpoint import Station
from mpidist.variables.kinds.served import ServedPlace
from mpidist.variables.scatter import apply_rows
from mpidist.variables.whole_numbers import changed_rows

# The kinds of changes of a variable that name rows: "scatter_add" and so on. A step of a table names rows, too.
SCATTER = "scatter_"
# A server that changes rows each time they are read does so often: then it gives a copy itself.
_TRIES = 3
# Seconds between two requests for rows that a restore is writing.
_WAIT_SECONDS = 0.001

# A change of some rows in a closure: its kind, their numbers, and their values of shape (n, width).
RowChange = tuple[str, AnyArray, AnyArray]


def pack(rows: IndexedSlices) -> AnyArray:
    """Local. Rows as one array of bytes: their numbers as int64, and then their values."""
    numbers = np.ascontiguousarray(rows.indices, np.int64).view(np.uint8)
    return np.concatenate([numbers, np.ascontiguousarray(rows.values).reshape(-1).view(np.uint8)])


def unpack(packed: AnyArray, place: ServedPlace) -> tuple[AnyArray, AnyArray]:
    """Local. The numbers of rows, and their values of shape (n, width), which share the memory of `packed`.

    Args:
        packed: See `pack`.
        place: The place of the variable.
    """
    dtype = np.dtype(place.dtype)
    count = packed.nbytes // (8 + place.width * dtype.itemsize)
    return packed[: 8 * count].view(np.int64), packed[8 * count :].view(dtype).reshape(count, place.width)


def block_count(place: ServedPlace) -> int:
    """Local. The number of versions of a table's rows."""
    return -(-place.shape[0] // place.block_rows)


def read_rows(station: Station, place: ServedPlace, rows: AnyArray) -> AnyArray:
    """Local. Rows of a table, each of one version.

    Args:
        station: The station of this process.
        place: The place of the table.
        rows: Their numbers, of shape (n,).

    Returns:
        Shape (n, width): a new array.

    Raises:
        DeadRankError: The server is dead.
    """
    # Few rows are compared faster so than sorted.
    is_once = len(set(rows.tolist())) == len(rows)
    wanted, inverse = (rows, None) if is_once else np.unique(rows, return_inverse=True)
    with station.awaited((place.server,), READ):
        values, is_whole = _read(station, place, wanted)
        left = np.flatnonzero(~is_whole)
        for _ in range(_TRIES - 1):
            if len(left):
                values[left], is_whole = _read(station, place, wanted[left])
                left = left[~is_whole]
    while len(left):
        given = station.call(place.server, "rows", place.number, wanted[left])
        if given is not None:
            values[left] = given
            break
        station.step(_WAIT_SECONDS)
    return values if inverse is None else np.asarray(values[inverse])


def _read(station: Station, place: ServedPlace, rows: AnyArray) -> tuple[AnyArray, AnyArray]:
    """The present rows, and which of them are consistent: not changed while they were read."""
    window, server = station.window, place.server
    blocks = rows // place.block_rows
    before, after = np.empty(len(rows), np.uint64), np.empty(len(rows), np.uint64)
    found = np.empty((len(rows), place.width), place.dtype)
    # The window reads in this order. In another one, or if one version were read only, a change in the middle could
    # stay unseen.
    window.get_rows(server, place.versions, blocks, before)
    window.get_rows(server, place.buffers[0], rows, found)
    window.get_rows(server, place.versions, blocks, after)
    window.flush(server)
    return found, (before == after) & (before % 2 == 0)


class RowChanges:
    """The changes of some rows of a variable that a closure has made, in their order.

    Args:
        name: The name of the variable, for errors.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._changes: list[RowChange] = []
        # For each row, as far as the changes were looked at, the places of those that name it.
        self._changes_of: dict[int, list[int]] = {}
        self._known = 0

    def add(self, kind: str, numbers: AnyArray, values: AnyArray) -> None:
        """Local. Note a change.

        Args:
            kind: The kind of the change, without `SCATTER`.
            numbers: The numbers of the rows, of shape (n,); they are not changed afterwards.
            values: The values of shape (n, width); they are not changed afterwards.
        """
        self._changes.append((kind, numbers, values))

    def overlay(self, rows: AnyArray, values: AnyArray) -> None:
        """Local. Apply the changes to rows that were read, in place.

        Args:
            rows: Their numbers, of shape (n,).
            values: The values of shape (n, width).

        Raises:
            OverflowError: Integers would wrap.
        """
        for at in range(self._known, len(self._changes)):
            for row in self._changes[at][1].tolist():
                self._changes_of.setdefault(row, []).append(at)
        self._known = len(self._changes)
        # Most functions read other rows than they have changed.
        hits = [self._changes_of[row] for row in set(rows.tolist()) if row in self._changes_of]
        if not hits:
            return
        order = np.argsort(rows, kind="stable")
        ordered = rows[order]
        for at in sorted(set().union(*hits)):
            kind, numbers, given = self._changes[at]
            # A row that was read several times changes everywhere, and by all of its changes in their order.
            low, high = np.searchsorted(ordered, numbers), np.searchsorted(ordered, numbers, "right")
            places = np.concatenate([order[a:b] for a, b in zip(low.tolist(), high.tolist(), strict=True)])
            self._apply(kind, values, np.repeat(given, high - low, axis=0), places)

    def applied(self, value: AnyArray) -> AnyArray:
        """Local. A copy of a whole value, with the changes.

        Raises:
            OverflowError: Integers would wrap.
        """
        copy = np.array(value)
        for kind, numbers, given in self._changes:
            self._apply(kind, copy.reshape(len(copy), -1), given, numbers)
        return copy

    def _apply(self, kind: str, target: AnyArray, values: AnyArray, numbers: AnyArray) -> None:
        if target.dtype.kind in "iu":
            changed_rows(self._name, kind, target, values, numbers)
        apply_rows(kind, target, values, numbers)


def written(place: ServedPlace, kind: str, packed: AnyArray) -> Callable[[AnyArray, AnyArray], None]:
    """Local. The change of a variable with two buffers by rows; see `HeapVariable.change`.

    Args:
        place: The place of the variable.
        kind: The kind of the change, with `SCATTER`.
        packed: See `pack`.
    """
    numbers, values = unpack(packed, place)

    def make(current: AnyArray, new: AnyArray) -> None:
        np.copyto(new, current)
        apply_rows(kind.removeprefix(SCATTER), new.reshape(place.shape[0], place.width), values, numbers)

    return make
