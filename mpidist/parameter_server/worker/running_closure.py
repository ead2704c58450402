"""The reads and changes of a function while it runs.

A function gets the variables that it read last time in one round trip to each server: a round trip takes longer than a
small variable, and a read of one makes three. So the first read also fetches all others of that server that the
function read when it last ran here, as far as they are small. The server answers between two updates: they are of one
moment. Where a read is a copy of memory nothing is asked: a copy does not wait for a server that is busy.

Before a worker reads from a server it waits until what it has finished itself is applied there.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import NamedTuple

import numpy as np

from mpidist.arrays import AnyArray
from mpidist.errors import DeadRankError
from mpidist.parameter_server.heap.push_slot import Pushed, is_free
from mpidist.parameter_server.heap.rows import RowChanges
from mpidist.parameter_server.heap.versioned_read import Value, read_whole
from mpidist.parameter_server.protocol.endpoint import Station
from mpidist.parameter_server.protocol.messages import Do
from mpidist.variables.kinds.served import ServedPlace

# A larger variable takes longer than the round trips. All of these are fetched for nothing where the function reads
# others.
_SMALL_BYTES = 1 << 16
_MOST_BYTES = 1 << 20


class Added(NamedTuple):
    """An addition of a closure to a variable.

    Attributes:
        kind: "add" or "sub", as of `Change`.
        place: The place of the added array on the server.
    """

    kind: str
    place: int


class RunningClosure:
    """The reads and the changes of a running closure.

    Args:
        do: The message of the closure.

    Attributes:
        do: The constructor's argument.
        pushed: The pushes to servers, by their ranks.
        optimizers: The numbers of the optimizers whose steps it makes, in their order.
        values: The values of variables, by number, as this closure reads them.
        added: The changes that are not in `values`, by the numbers of variables, since most closures never read them.
        stepped: The names of optimizers, by the numbers of the variables that they will change on the servers.
    """

    def __init__(self, do: Do) -> None:
        self.do = do
        self.pushed: dict[int, Pushed] = {}
        self.optimizers: list[int] = []
        self.values: dict[int, AnyArray] = {}
        self.added: dict[int, list[Added | RowChanges]] = {}
        self.stepped: dict[int, str] = {}

    def add_rows(self, kind: str, number: int, name: str, numbers: AnyArray, values: AnyArray) -> None:
        """Local. Note a change of rows; neighbouring changes of one variable are kept together.

        Args:
            kind: See `RowChanges.add`.
            number: The number of the variable.
            name: The name of the variable.
            numbers: See `RowChanges.add`.
            values: See `RowChanges.add`.
        """
        added = self.added.setdefault(number, [])
        last = added[-1] if added else None
        if not isinstance(last, RowChanges):
            last = RowChanges(name)
            added.append(last)
        last.add(kind, numbers, values)


class Reads:
    """The reads of one worker.

    Args:
        station: The station of the worker.
        is_relaxed: See `read_whole`.

    Attributes:
        known: The last value read of each variable, by number.
    """

    def __init__(self, station: Station, *, is_relaxed: bool) -> None:
        self.known: dict[int, Value] = {}
        self._station = station
        self._is_relaxed = is_relaxed
        # The small variables that each function read when it last ran here; and those that the running one has read.
        self._last: dict[int, dict[int, ServedPlace]] = {}
        self._now: dict[int, ServedPlace] = {}
        self._function = 0

    def begin(self, function: int) -> None:
        """Local. Note that a function begins."""
        self._function, self._now = function, {}

    def end(self) -> None:
        """Local. Note that the function has ended."""
        self._last[self._function] = self._now

    def forget(self, kind: str, number: int) -> None:
        """Local. Forget an object that the program has dropped; see `Discard`."""
        if kind == "function":
            self._last.pop(number, None)
        elif kind == "variable":
            self.known.pop(number, None)
            for read in self._last.values():
                read.pop(number, None)

    def note(self, place: ServedPlace) -> None:
        """Local. Note that the function reads a variable."""
        if place.bytes <= _SMALL_BYTES and not place.block_rows:
            self._now[place.number] = place

    def read(self, place: ServedPlace, had: Sequence[Container[int]], *, is_alone: bool) -> dict[int, Value]:
        """Local. A variable, and others with it, by number.

        Args:
            place: The place of the variable.
            had: Collections with the numbers of the variables that the function has already.
            is_alone: Whether others are fetched in another way.
        """
        others = [] if is_alone else self._others(place, had)
        found = self._together([place, *others]) if others else {}
        if place.number not in found:
            known = self.known.pop(place.number, None)
            found[place.number] = read_whole(self._station, place, known, is_relaxed=self._is_relaxed)
        self.known.update(found)
        return found

    def _together(self, places: list[ServedPlace]) -> dict[int, Value]:
        """Ask the server for variables: they are of one moment between two updates."""
        known = [self.known.get(one.number) for one in places]
        asked = [
            (one.number, -1 if value is None or value.version is None else value.version)
            for one, value in zip(places, known, strict=True)
        ]
        versions, data = self._station.call(places[0].server, "several", asked)
        found, begin = {}, 0
        for place, value, (number, before), version in zip(places, known, asked, versions, strict=True):
            if value is not None and version == before:
                found[number] = value
            elif version >= 0:
                array = np.frombuffer(data, place.dtype, place.size, begin).reshape(place.shape)
                found[number] = Value(version, array.copy())
                begin += place.bytes
        return found

    def _others(self, place: ServedPlace, had: Sequence[Container[int]]) -> list[ServedPlace]:
        last = self._last.get(self._function, {})
        if place.number not in last or self._station.window.is_near(place.server):
            return []
        others, left = [], _MOST_BYTES - place.bytes
        for number, one in last.items():
            if one.server != place.server or number == place.number or any(number in numbers for numbers in had):
                continue
            left -= one.bytes
            if left < 0:
                break
            others.append(one)
        return others


class OwnUpdates:
    """The updates of this worker that are not known to be applied.

    Args:
        station: The station of this process.
        servers: The ranks of the servers.
        is_fenced: Whether the coordinator counts this worker as lost.
    """

    def __init__(self, station: Station, servers: Sequence[int], is_fenced: Callable[[], bool]) -> None:
        self._station = station
        self._is_fenced = is_fenced
        # For each server the begins of slots of closures that are not known to be applied.
        self._unapplied: dict[int, set[int]] = {server: set() for server in servers}

    def begin(self, slot: int) -> None:
        """Local. Note that a closure begins that has this slot: it is free, though this worker may not have looked."""
        for unapplied in self._unapplied.values():
            unapplied.discard(slot)

    def note(self, server: int, slot: int) -> None:
        """Local. Note that a closure has ended, and a server is to apply the content of this slot."""
        self._unapplied[server].add(slot)

    def wait(self, server: int) -> None:
        """Local. Wait until a server has applied this worker's finished closures: a closure reads all earlier changes.

        Raises:
            DeadRankError: The server is dead, or this worker counts as lost.
        """
        unapplied = self._unapplied[server]
        if not unapplied:
            return
        with self._station.awaited((server,), "apply this worker's finished closures"):
            while unapplied:
                unapplied -= {offset for offset in unapplied if is_free(self._station.window, server, offset)}
                if unapplied:
                    self._station.step()
                if self._is_fenced():
                    raise DeadRankError("the coordinator has declared this worker lost and discards its finished work")
