"""Reads: a function gets the variables that it read last time in one round trip to each server.

A round trip takes longer than a small variable, and a read of one makes three. So the first read of a variable brings
all others of that server that the function read when it last ran here, as far as they are small. The server answers
between two updates: they are of one moment. Where a read is a copy of memory nothing is asked: a copy does not wait for
a server that is busy.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

import numpy as np

from mpidist.parameter_server.heap.versioned_read import Value, read_whole
from mpidist.parameter_server.protocol.endpoint import Station
from mpidist.variables.kinds.served import ServedPlace

# A larger variable takes longer than the round trips. All of these are fetched for nothing where the function reads
# others.
_SMALL_BYTES = 1 << 16
_MOST_BYTES = 1 << 20


class Reads:
    """The reads of one worker.

    Args:
        station: The station of the worker.
        is_relaxed: See `read_whole`.

    Attributes:
        known: What was read last of each variable, by number.
    """

    def __init__(self, station: Station, *, is_relaxed: bool) -> None:
        self.known: dict[int, Value] = {}
        self._station = station
        self._is_relaxed = is_relaxed
        # By function the small variables that it read when it last ran here; and what the one that runs has read.
        self._last: dict[int, dict[int, ServedPlace]] = {}
        self._now: dict[int, ServedPlace] = {}
        self._function = 0

    def begin(self, function: int) -> None:
        """Local. A function begins."""
        self._function, self._now = function, {}

    def end(self) -> None:
        """Local. It has ended."""
        self._last[self._function] = self._now

    def forget(self, kind: str, number: int) -> None:
        """Local. The program has dropped something; see `Discard`."""
        if kind == "function":
            self._last.pop(number, None)
        elif kind == "variable":
            self.known.pop(number, None)
            for read in self._last.values():
                read.pop(number, None)

    def note(self, place: ServedPlace) -> None:
        """Local. The function reads a variable."""
        if place.bytes <= _SMALL_BYTES and not place.block_rows:
            self._now[place.number] = place

    def read(self, place: ServedPlace, had: Sequence[Container[int]], *, is_alone: bool) -> dict[int, Value]:
        """Local. A variable, and others with it, by number.

        Args:
            place: The place of the variable.
            had: The numbers of the variables that the function has already; each is in one of these.
            is_alone: Whether others come another way.
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
