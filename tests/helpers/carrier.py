"""A window of the tests': it kills or stops a worker's process at the moment when a named message is sent."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mpidist.parameter_server.protocol.messages import Fence
from mpidist.parameter_server.protocol.wire import decode
from tests.helpers.processes import read_name
from tests.helpers.waiting import until_state


class Moment(NamedTuple):
    """When a worker is harmed: at a call of some rank that belongs to the first attempt of the worker's first closure.

    Attributes:
        by: Who makes the call: "worker" is the one that is harmed; "chief", "ps 0".
        what: The message that is sent, or "get" or "put".
        to: To which rank, by its name; "" is any.
        is_after: Whether the call is made before.
    """

    by: str
    what: str
    to: str = ""
    is_after: bool = False


# The rows of the protocol, each before and after what it sends.
EVERY_MOMENT = (
    Moment("chief", "Do"),
    Moment("worker", "get"),
    Moment("worker", "put"),
    Moment("worker", "put", is_after=True),
    Moment("worker", "Push", "ps 0"),
    Moment("worker", "Push", "ps 1"),
    Moment("worker", "Finished"),
    Moment("worker", "Finished", is_after=True),
    Moment("ps 0", "Prepared"),
    Moment("ps 1", "Prepared", is_after=True),
    Moment("chief", "Commit", "ps 0"),
    Moment("chief", "Commit", "ps 1"),
    Moment("ps 1", "Applied"),
    Moment("chief", "Fence", "ps 0"),
)


def wait_for_end(process: int, starter: int) -> None:
    """Wait until a process has ended, and its launcher can take another death.

    Args:
        process: Of a rank.
        starter: Its parent.
    """
    until_state(process, "ZX")
    # Hydra ends the job when a rank dies before it has seen that the last one is dead.
    if "hydra" in read_name(starter):
        until_state(starter, "X")


class Carrier:
    """Passes all calls on to a window.

    Workers are ranks 1 and up, and closure number n is the first one of worker n - 1, which is harmed at its moment.

    Args:
        window: The window.
        name_of: What to call a rank.
        moments: Of the workers, in their order; workers behind the last one are not harmed.
        folder: Has a file `RANK.pid` of each rank, which begins with the number of its process.
        number: The signal.
    """

    def __init__(
        self, window: Any, name_of: Callable[[int], str], moments: Sequence[Moment], folder: Path, number: int
    ) -> None:
        self._window = window
        self._name_of = name_of
        self._moments = moments
        self._folder = folder
        self._signal = number
        self._harmed: set[int] = set()
        self.put = self._around("put", window.put)
        self.get = self._around("get", window.get)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._window, name)

    def ring(self, rank: int, message: bytes) -> None:
        """Local. See `Window.ring`."""
        sent = decode(message)
        # The moment at a fence is that of another worker's.
        closure = len(self._moments) if isinstance(sent, Fence) else getattr(sent, "closure", 0)
        is_first = isinstance(sent, Fence) or getattr(sent, "attempt", 0) == 1
        kind = type(sent).__name__
        self._look(closure, kind, rank, is_first and "before")
        self._window.ring(rank, message)
        self._look(closure, kind, rank, is_first and "after")

    def _around(self, what: str, call: Callable[..., None]) -> Callable[..., None]:
        def act(rank: int, offset: int, array: Any) -> None:
            self._look(self._window.rank, what, rank, "before")
            call(rank, offset, array)
            if self._is_moment(self._window.rank, what, rank, "after"):
                self._window.flush(rank)
            self._look(self._window.rank, what, rank, "after")

        return act

    def _is_moment(self, worker: int, what: str, to: int, when: object) -> bool:
        if not 1 <= worker <= len(self._moments) or worker in self._harmed:
            return False
        moment, me = self._moments[worker - 1], self._window.rank
        return (
            moment.by == ("worker" if me == worker else self._name_of(me)) and moment.what == what
            and moment.to in ("", self._name_of(to)) and when == ("after" if moment.is_after else "before")
        )

    def _look(self, worker: int, what: str, to: int, when: object) -> None:
        if not self._is_moment(worker, what, to, when):
            return
        self._harmed.add(worker)
        process = int((self._folder / f"{worker}.pid").read_text().split()[0])
        os.kill(process, self._signal)
        if worker != self._window.rank:
            until_state(process, "T" if self._signal == signal.SIGSTOP else "ZX")
