"""Signals that announce the job's end: a process of the job that gets one notifies the chief, and survives."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from mpidist.cluster.signals import SIGNALLED, SIGNALS, Notice
from mpidist.errors import DeadRankError
from mpidist.failures.ending import agree_on_exit
from mpidist.parameter_server.protocol.endpoint import Station
from mpidist.parameter_server.protocol.messages import Call, Message, Send

# The chief sends the signals to handle; it gets the confirmation, and each signal that has arrived.
_LISTEN, _LISTENS, _CAME = "listen", "listens", "signal"


def _word(name: str, value: object = None) -> Message:
    """A message without an answer."""
    return Call(0, name, pickle.dumps(value))


class Listener:
    """The role of a worker or a server that reports signals to the chief.

    Args:
        station: The station of this process.
        chief: The rank of the chief.
    """

    def __init__(self, station: Station, chief: int) -> None:
        self._station = station
        self._chief = chief
        self._notice = Notice()
        self._wanted: Sequence[Any] | None = None
        station.route([(Call, _LISTEN)], self.take)

    def take(self, _: int, message: Message) -> None:
        """Local. Note the signals that the chief wants."""
        if isinstance(message, Call):
            # A thread of a function may have taken it, and signals are the main thread's.
            self._wanted = pickle.loads(message.arguments)

    def look(self) -> None:
        """Local. Follow the chief's requests, and report a signal that has arrived; called between two messages."""
        if self._wanted is not None:
            wanted, self._wanted = self._wanted, None
            before, self._notice = self._notice, Notice()
            # In another thread they keep the effect that they have.
            with contextlib.suppress(ValueError):
                SIGNALS.tell(self._notice, wanted)
            SIGNALS.silence(before)
            self._station.send(Send(self._chief, _word(_LISTENS)))
        if self._notice.reason:
            # The next one is reported again: the chief may have another handler by then.
            reason = self._notice.take()
            self._station.send(Send(self._chief, _word(_CAME, reason - SIGNALLED)))

    def end_together(self) -> None:
        """Local. Prepare the end by the chief: signals change nothing any more, and all ranks exit with its code."""
        SIGNALS.ignore()
        agree_on_exit()

    def silence(self) -> None:
        """Local. Restore the effect that signals had before."""
        SIGNALS.silence(self._notice)


class Others:
    """The role of the chief that gets the signals of the other processes. Its `PreemptionCheckpointHandler` uses it.

    Args:
        station: The station of the chief.
        lock: The lock of the thread that uses the station.
        join: See the attribute.
        counts: A function that returns the number of functions so far, and the number of those that have not ended.

    Attributes:
        join: A function that waits until all functions have ended.
        is_agreed: Whether all ranks end with the chief's exit code.
    """

    def __init__(
        self, station: Station, lock: AbstractContextManager[Any], join: Callable[[], None],
        counts: Callable[[], tuple[int, int]],
    ) -> None:
        self.join = join
        self.is_agreed = False
        self._station = station
        self._lock = lock
        self._ranks = frozenset(range(station.window.size)) - {station.window.rank}
        self._numbers: list[int] = []
        self._waiting: set[int] = set()
        # When functions were seen first, and how many had ended then.
        self._first: tuple[float, int] | None = None
        self._counts = counts
        # Not by the queue, which delays messages in a pause: a signal counts at once.
        station.route([(Call, _LISTENS), (Call, _CAME)], self.take)

    def take(self, sender: int, message: Message) -> None:
        """Local. Note that a process handles signals, or has received one."""
        if isinstance(message, Call) and message.name == _CAME:
            SIGNALS.note(pickle.loads(message.arguments))
        else:
            self._waiting.discard(sender)

    def listen(self) -> None:
        """Local. Let all other processes handle the signals that this one handles. It returns when they do."""
        numbers = sorted(SIGNALS.numbers())
        if numbers == self._numbers:
            return
        with self._lock:
            self._tell(numbers)
            with self._station.awaited(self._waiting, "take signals"):
                while self._waiting:
                    self._station.step(0.05)
                    self._waiting -= self._gone()

    def silence(self) -> None:
        """Local. Let the others handle their signals if this process handles none any more, without waiting for it."""
        numbers = sorted(SIGNALS.numbers())
        if self.is_agreed or numbers == self._numbers or self._station.window.is_closed:
            return
        # A process that ends with an error of a death needs no message.
        with self._lock, contextlib.suppress(DeadRankError):
            self._tell(numbers)

    def _tell(self, numbers: list[int]) -> None:
        self._numbers = numbers
        self._waiting = set(self._ranks - self._gone())
        for rank in sorted(self._waiting):
            self._station.send(Send(rank, _word(_LISTEN, numbers)))

    def _gone(self) -> set[int]:
        return {*self._station.window.lost(), *self._station.lost, *self._station.left}

    def join_seconds(self, now: float) -> float:
        """Local. The time that `join` will take, estimated from the durations of functions so far.

        Args:
            now: The time, in seconds; always of the same clock.
        """
        scheduled, left = self._counts()
        if not left:
            return 0.0
        if self._first is None:
            self._first = now, scheduled - left
        begin, ended = self._first
        return left * (now - begin) / max(1, scheduled - left - ended)

    def end_together(self) -> None:
        """Local. Let the exit code of this process be that of all ranks from now on, as long as no rank has died."""
        self.is_agreed = True
        agree_on_exit()
