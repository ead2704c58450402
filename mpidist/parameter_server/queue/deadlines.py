"""Deadlines: which workers have run a function for too long, by a clock that pauses while others cause the delay.

The clock runs while the coordinator looks and all servers answer. A coordinator that was stopped, or that was busy with
something else, finds no worker late when it looks again; nor does one whose servers were stopped, for which workers may
have waited. It counts rounds: in each one all servers are asked, and the next begins when all have answered. However
long a round has taken, it counts as a short one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mpidist.parameter_server.protocol.messages import Define, Do, Ping, Send
from mpidist.parameter_server.queue.worker_table import WorkerRecord

# The number of rounds within the time limit, and the least time between two rounds.
_ROUNDS = 20
_LEAST_SECONDS = 0.01
# The most that a round counts, in units of the time between two rounds.
_COUNTED = 2
# The least bandwidth of a slow network.
_BYTES_PER_SECOND = 10e6
# The time to load a function and its arguments, as a multiple of the limit: they may be large.
LOADING = 10


@dataclass
class Deadlines:
    """The time for which workers have run their functions.

    Args:
        limit: The number of seconds for which a worker may run a function.

    Attributes:
        seconds: The time of the clock.
    """

    limit: float
    seconds: float = 0.0
    # For each rank the time at which the worker began its work, by the clock, and the time limit of that work.
    _begun: dict[int, tuple[float, float]] = field(default_factory=dict)
    _number: int = 0
    _asked: float | None = None
    _answered: float | None = None
    _missing: set[int] = field(default_factory=set)

    @property
    def _pause(self) -> float:
        return max(self.limit / _ROUNDS, _LEAST_SECONDS)

    def begin(self, rank: int, sends: Sequence[Send] = (), *, is_loading: bool = False) -> None:
        """Local. Note that a worker has begun other work, or was given it.

        Args:
            rank: The worker.
            sends: The messages that have to reach it before.
            is_loading: Whether it loads a function and its arguments.
        """
        allowed = self.limit * LOADING if is_loading else self.limit + sum(map(_bytes_of, sends)) / _BYTES_PER_SECOND
        # The clock is late by a round.
        self._begun[rank] = self.seconds, allowed + _COUNTED * self._pause

    def forget(self, rank: int) -> None:
        """Local. Forget a worker, which is lost."""
        self._begun.pop(rank, None)

    def look(self, now: float, servers: Sequence[int]) -> list[Send]:
        """Local. Begin a round, if it is time.

        Args:
            now: The time, in seconds.
            servers: The servers that may be waited for.
        """
        if self._missing or (self._asked is not None and now - self._asked < self._pause):
            return []
        self._number += 1
        self._asked, self._missing = now, set(servers)
        return [Send(server, Ping(self._number)) for server in servers]

    def answered(self, server: int, number: int, now: float) -> None:
        """Local. Note that a server has answered; after the last one the clock continues.

        Args:
            server: The server.
            number: The number of its `Pong`.
            now: The time, in seconds.
        """
        if number != self._number:
            return
        self._missing.discard(server)
        if not self._missing:
            before = now if self._answered is None else self._answered
            self.seconds += min(now - before, _COUNTED * self._pause)
            self._answered = now

    def overdue(self, workers: Mapping[int, WorkerRecord]) -> list[int]:
        """Local. The ranks of workers that have run a function for too long. Resources may take any time.

        Args:
            workers: The workers that are not lost.
        """
        return [rank for rank, one in workers.items() if one.runs() is not None and self._is_late(rank)]

    def _is_late(self, rank: int) -> bool:
        begun, allowed = self._begun[rank]
        return self.seconds - begun > allowed


def _bytes_of(send: Send) -> int:
    if isinstance(send.message, Define):
        return len(send.message.code)
    return len(send.message.arguments) if isinstance(send.message, Do) else 0
