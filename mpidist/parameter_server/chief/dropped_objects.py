"""The objects that the program has dropped: servers and workers forget them, and their memory is used again."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence

from mpidist.parameter_server.protocol.endpoint import Station
from mpidist.parameter_server.protocol.messages import Discard, Send
from mpidist.parameter_server.queue.commits import Commits
from mpidist.variables.kinds.served import ServedPlace


class Dropped:
    """The objects of the program that servers and workers know, until they are dropped.

    Args:
        station: The station of the chief.
        commits: The order of all changes.
        give: A function that gives the memory of a variable back.
        finish: A function that lets servers make announced variables first; they cannot forget variables that they do
            not have.
        discard: A function that returns the messages to workers about a dropped object; its arguments are those of
            `Discard`.

    Attributes:
        noted: Dropped objects that were not announced yet: kinds, numbers and places of variables.
    """

    def __init__(
        self, station: Station, commits: Commits, give: Callable[[ServedPlace], None], finish: Callable[[], None],
        discard: Callable[[str, int], Sequence[Send]],
    ) -> None:
        self._station = station
        self._commits = commits
        self._give = give
        self._finish = finish
        self._discard = discard
        self.noted: deque[tuple[str, int, ServedPlace | None]] = deque()

    def note(self, given: object, kind: str, number: int, place: ServedPlace | None = None) -> None:
        """Local. Let `let_go` know when the program has dropped an object.

        Args:
            given: The object. It must not be dropped while a closure in flight uses it.
            kind: See `Discard`, for workers.
            number: The number of this kind.
            place: The place of a variable.
        """
        # Called in any thread, in the middle of anything: it only notes, and nothing is sent here.
        weakref.finalize(given, self.noted.append, (kind, number, place)).atexit = False

    def let_go(self) -> None:
        """Local. Let servers and workers forget the dropped objects; their memory can be used again."""
        if self.noted:
            self._finish()
        # A snapshot may still read the memory, and servers may keep back what changes it.
        while self.noted and not self._commits.saving:
            with self._station.whole:
                self._let_go(*self.noted.popleft())

    def _let_go(self, kind: str, number: int, place: ServedPlace | None) -> None:
        if place is not None:
            self._give(place)
            self._station.send(Send(place.server, Discard("memory", number)))
        elif kind == "optimizer":
            for server in self._commits.servers:
                self._station.send(Send(server, Discard("plan", number)))
        for send in self._discard(kind, number):
            self._station.send(send)
