"""New variables: a server gets many small ones in one message, before one is used.

Making one alone takes a round trip to its server. The memory of small ones is reserved before they are made, so that a
server without memory raises where the program makes the variable, and making them cannot fail later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np

from mpidist.arrays import AnyArray
from mpidist.parameter_server.heap.new_variables import Drawn, NewVariable, end_of
from mpidist.parameter_server.protocol.endpoint import Station
from mpidist.variables.kinds.served import ServedPlace

# A larger variable is made at once.
_SMALL_BYTES = 1 << 16
# The largest size of a message about new variables, roughly, and the size of one variable without its value.
_MESSAGE_BYTES, _ENTRY_BYTES = 1 << 20, 200
# Memory for small variables is asked for, and large values are written, in pieces of this size.
_PIECE_BYTES = 4 << 20


class VariableMaker:
    """Makes variables in the heaps of servers.

    Args:
        station: The station of the chief.
        begin: The first byte of each heap that variables may use.
        give: A function that gives back the memory of a variable that cannot be made.

    Attributes:
        unfinished: Whether servers may not have made some variable: `finish` waits for it.
    """

    def __init__(self, station: Station, begin: int, give: Callable[[ServedPlace], None]) -> None:
        self._station = station
        self._begin = begin
        self._give = give
        # For each server: the variables that were not sent to it yet, and the end of the memory of its heap.
        self._waiting: dict[int, list[NewVariable]] = {}
        self._memory: dict[int, int] = {}
        self._bytes = 0
        self.unfinished = False
        # Servers, and the numbers of calls that they have not answered.
        self._called: deque[tuple[int, int]] = deque()

    def make(self, place: ServedPlace, name: str, value: AnyArray | Drawn | None, fill: complex = 0.0) -> None:
        """Local. Make a variable. It may be used after `finish`.

        Args:
            place: The place of the variable.
            name: A name for display and errors.
            value: The value of the variable, of the place's shape, which is converted to its dtype; None: `fill` is the
                value.
            fill: The number for all elements.

        Raises:
            HeapFullError: The server has no memory for it.
            DeadRankError: The server is dead.
        """
        try:
            self._make(place, name, value, fill)
        except Exception:
            self._give(place)
            raise

    def _make(self, place: ServedPlace, name: str, value: AnyArray | Drawn | None, fill: complex) -> None:
        is_small = end_of(place) - place.header <= _SMALL_BYTES
        if is_small:
            self._have_memory(place)
        given: bytes | Drawn | None = None
        if isinstance(value, Drawn):
            given = value
        elif value is not None and is_small:
            given = np.asarray(value, place.dtype).tobytes()
        self.unfinished = True
        self._waiting.setdefault(place.server, []).append(NewVariable(place, name, fill, given))
        self._bytes += _ENTRY_BYTES + (len(given) if isinstance(given, bytes) else 0)
        if not is_small:
            self.finish()
            self._memory[place.server] = max(self._memory.get(place.server, self._begin), end_of(place))
            if isinstance(value, np.ndarray):
                self._put(place, value)
        elif self._bytes >= _MESSAGE_BYTES:
            self._tell()

    def finish(self) -> None:
        """Local. Return when the servers have made all variables.

        Raises:
            HeapFullError: A server has no memory for the last variable.
            DeadRankError: A server is dead.
        """
        self._tell()
        while self._called:
            server, number = self._called[0]
            try:
                self._station.wait(server, "create", number)
            finally:
                # After an interrupt the next one waits for it.
                if not self._station.is_awaiting(number):
                    self._called.popleft()
        self.unfinished = False

    def _tell(self) -> None:
        # No interrupt comes between sending a message and noting that it is waited for.
        with self._station.whole:
            for server, waiting in self._waiting.items():
                self._called.append((server, self._station.post(server, "create", waiting)))
            self._waiting.clear()
            self._bytes = 0

    def _have_memory(self, place: ServedPlace) -> None:
        """Ask for memory, with some for later variables; it holds no variable, so that zeros may fill it."""
        have, end = self._memory.get(place.server, self._begin), end_of(place)
        if end <= have:
            return
        most = max(end, min(have + _PIECE_BYTES, self._station.window.heap_sizes[place.server])) - have
        what = f"a variable of shape {place.shape} and dtype {place.dtype}"
        self._memory[place.server] = have + self._station.call(place.server, "reserve", have, end - have, most, what)

    def _put(self, place: ServedPlace, value: AnyArray) -> None:
        """Write a value in pieces. The server has touched its pages, and no other rank has its address yet."""
        rows = max(1, _PIECE_BYTES // max(1, place.bytes // place.shape[0]))
        at = place.buffers[0]
        with self._station.awaited((place.server,), "take the value of a new variable"):
            for low in range(0, place.shape[0], rows):
                piece = np.ascontiguousarray(value[low : low + rows], place.dtype)
                self._station.window.put(place.server, at, piece.reshape(-1))
                self._station.window.flush(place.server)
                at += piece.nbytes
                del piece
