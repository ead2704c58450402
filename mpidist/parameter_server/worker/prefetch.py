"""Prefetching: while a function computes, a thread pulls what the worker's next function will probably read.

That is what the same function read when it last ran here; a wrong guess costs time only. What is pulled ahead holds all
that was applied when the next function was sent here: all updates of functions that ran here, but those of the one that
is running. Of that one it may miss a step of an optimizer. It never misses what that one assigns, adds or scatters: a
variable that is changed so is read again. Nor does a worker see a version older than one that it has seen.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Generator, Iterator, Sequence

from mpidist.errors import DeadRankError
from mpidist.parameter_server.heap.versioned_read import READ, Value, is_sole, read_in_pieces
from mpidist.parameter_server.protocol.endpoint import Station
from mpidist.parameter_server.protocol.messages import Do
from mpidist.parameter_server.protocol.thread_guard import WindowLock
from mpidist.variables.kinds.served import ServedPlace

logger = logging.getLogger("mpidist")

# The number of bytes after which a function that needs the window gets it.
PIECE_BYTES = 4 << 20
# The time between two looks for the next function: 1/50 of the time of the previous one, within these bounds.
_NAP_SHARE = 1 / 50
_NAP_SECONDS = (2e-4, 1e-2)

_Pieces = Generator[None, None, "Value | None"]


class _Pulls:
    """The variables that are pulled for one closure.

    Args:
        do: The closure.
        groups: The variables, in the order of their reading. Of a group all are pulled before the running closure has
            ended, or none: they are shards of one variable.
        begin: A function that begins to read a variable.
    """

    def __init__(
        self, do: Do, groups: Sequence[Sequence[ServedPlace]], begin: Callable[[ServedPlace], _Pieces]
    ) -> None:
        self.name = do[:2]
        self._begin = begin
        self._groups = {place.number: [one.number for one in group] for group in groups for place in group}
        self._left = {place.number: place for group in groups for place in group}
        self._begun: dict[int, _Pieces] = {}
        self._values: dict[int, Value] = {}

    def go_on(self) -> ServedPlace | None:
        """Local. The variable that is pulled next; None if all are present."""
        return next(iter(self._left.values()), None)

    def pull(self, place: ServedPlace) -> None:
        """Local. Pull a piece of a missing variable."""
        number = place.number
        if number not in self._begun:
            self._begun[number] = self._begin(place)
        try:
            next(self._begun[number])
        except StopIteration as end:
            if end.value is None:
                self.drop(number)
            else:
                self._values[number] = end.value
                del self._left[number], self._begun[number]

    def take(self, number: int) -> tuple[ServedPlace | None, Value | None]:
        """Local. The variable if it is to be pulled and missing, and its value if it is present."""
        return self._left.get(number), self._values.get(number)

    def settle(self) -> None:
        """Local. Drop the groups that are not whole: the running closure has ended."""
        for number in [one for one in self._left if len(self._groups[one]) > 1]:
            self.drop(number)

    def drop(self, number: int) -> None:
        """Local. Pull neither this variable nor its group."""
        for one in self._groups.get(number, ()):
            self._left.pop(one, None)
            self._begun.pop(one, None)
            self._values.pop(one, None)


class Ahead:
    """The pulls ahead of one worker.

    Args:
        station: The station of this process.
        known: The last value of each variable that this worker has read, by number.
        next_do: A function that returns the next closure of this worker, if it has come.

    Attributes:
        lock: The right to use the window.
    """

    def __init__(self, station: Station, known: dict[int, Value], next_do: Callable[[], Do | None]) -> None:
        self.lock = WindowLock(is_alone=station.window.size == 1)
        self._station = station
        self._known = known
        self._next_do = next_do
        self._is_possible: bool | None = None
        # The running closure: its begin, the values pulled for it, what it has read, what it will read, and what
        # it has changed.
        self._since = 0.0
        self._pulls: _Pulls | None = None
        self._read: dict[int, ServedPlace] = {}
        self._unread: set[int] = set()
        self._changed: set[int] = set()
        # The values that are pulled for the next closure.
        self._next: _Pulls | None = None
        # The variables that each function read when it last ran.
        self._last: dict[int, dict[int, ServedPlace]] = {}
        # The shards of each variable that has several.
        self._shards: dict[int, Sequence[int]] = {}
        # Values that were replaced: their memory is used again.
        self._replaced: dict[int, Value] = {}
        self._failure: BaseException | None = None

    @property
    def is_pulling(self) -> bool:
        """Local. Whether it has begun to pull for functions."""
        return bool(self._is_possible)

    @contextlib.contextmanager
    def during(self, do: Do) -> Iterator[None]:
        """Local. Inside, a function runs: it has the window only within `with lock`.

        Args:
            do: The closure of the function.
        """
        pulls, self._next = self._next, None
        self._pulls = pulls if pulls is not None and pulls.name == do[:2] else None
        if not do.is_followed or not self._can_pull():
            yield
            return
        self._since = time.monotonic()
        self._read, self._unread, self._changed = {}, set(self._last.get(do.function, ())), set()
        self.lock.share(self._go_on)
        try:
            yield
        finally:
            self.lock.take_back()
            self._last[do.function] = self._read
            self._read, self._pulls = {}, None
            self._settle()

    def take(self, place: ServedPlace) -> Value | None:
        """Local. The value that was pulled ahead for the closure that runs; None: read it now. With the lock.

        Args:
            place: The place of a variable that this closure has not read before.
        """
        if not self._is_possible:
            return None
        number = place.number
        if not place.block_rows:
            self._read[number] = place
        self._unread.discard(number)
        if self._pulls is not None:
            left, value = self._pulls.take(number)
            while left is not None:
                # No other worker is faster.
                self._pull(self._pulls, left)
                left, value = self._pulls.take(number)
            if value is not None:
                old = self._known.get(number)
                if old is not None and old is not value:
                    self._replaced[number] = old
                return value
        # Values that are read now may be newer than those pulled for the next closure.
        self._drop(number)
        return None

    def note_change(self, number: int) -> None:
        """Local. Note that the running closure assigns, adds or scatters: the next closure must read that."""
        if self._is_possible:
            self._changed.add(number)
            self._drop(number)

    def note_shards(self, numbers: Sequence[int]) -> None:
        """Local. Note a variable of several shards."""
        self._shards.update(dict.fromkeys(numbers, numbers))

    def forget(self, kind: str, number: int) -> None:
        """Local. Forget an object that the program has dropped; see `Discard`."""
        if kind == "function":
            self._last.pop(number, None)
        elif kind == "variable":
            self._replaced.pop(number, None)
            self._shards.pop(number, None)
            for read in self._last.values():
                read.pop(number, None)

    def stop(self) -> None:
        """Local. Pull nothing more: the coordinator counts this worker as lost."""
        self._pulls = self._next = None
        self._is_possible = False

    def end(self) -> None:
        """Local. End the thread, outside any closure, and release all memory."""
        self.stop()
        self.lock.end()
        self._replaced.clear()

    def _settle(self) -> None:
        """Prepare the next function: this one has ended."""
        if self._next is not None:
            self._next.settle()
        if self._failure is not None:
            raise self._failure

    def _can_pull(self) -> bool:
        if self._is_possible is None:
            window = self._station.window
            self._is_possible = window.size > 1 and window.is_for_threads
            if not self._is_possible:
                why = "MPI was started without THREAD_MULTIPLE" if window.size > 1 else "they are in this process"
                logger.warning("prefetch: values of variables are not prefetched, since %s", why)
        return self._is_possible

    def _drop(self, number: int) -> None:
        if self._next is not None:
            self._next.drop(number)

    def _pull(self, pulls: _Pulls, place: ServedPlace) -> None:
        with self._station.awaited((place.server,), READ):
            pulls.pull(place)

    def _begin(self, place: ServedPlace) -> _Pieces:
        spare = self._replaced.pop(place.number, None)
        memory = spare.array if spare is not None and is_sole(spare) else None
        return read_in_pieces(
            self._station.window, place, self._known.get(place.number), memory, piece_bytes=PIECE_BYTES
        )

    def _go_on(self) -> float | None:
        """See `thread_guard.Act`."""
        try:
            return self._look_and_pull()
        except DeadRankError:
            # The program's thread finds out itself.
            self.stop()
        except BaseException as error:  # the program's thread raises it
            self._failure = error
            self.stop()
        return None

    def _look_and_pull(self) -> float | None:
        if not self._is_possible:
            return None
        pulls = self._pulls
        place = None if pulls is None else pulls.go_on()
        if place is None:
            if self._next is None and self._station.step():
                return 0.0
            if not self._unread:
                # Not before: what the function that runs reads now is not pulled for the next one any more.
                self._next = self._next or self._pulls_for_next()
            pulls = self._next
            if pulls is None or self._unread:
                # The function that runs has precedence.
                return min(max(_NAP_SECONDS[0], _NAP_SHARE * (time.monotonic() - self._since)), _NAP_SECONDS[1])
            place = pulls.go_on()
        if pulls is None or place is None:
            return None
        self._pull(pulls, place)
        return 0.0

    def _pulls_for_next(self) -> _Pulls | None:
        do = self._next_do()
        if do is None:
            return None
        last = self._last.get(do.function, {})
        groups = dict.fromkeys(tuple(self._shards.get(number, (number,))) for number in last)
        chosen = [
            [last[number] for number in group] for group in groups
            if self._changed.isdisjoint(group) and last.keys() >= set(group)
        ]
        return _Pulls(do, chosen, self._begin)
