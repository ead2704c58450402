"""Work: the calls of workers, their rules, and their ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal, NamedTuple

from mpidist.arguments import described, number, whole
from mpidist.parameter_server.protocol.messages import Finished
from mpidist.parameter_server.queue.commits import Attempt
from mpidist.recorder.recorder import describe_closure

# As dask's `allowed-failures`: a worker may also die for another reason.
MAX_DEATHS = 3


class Name(NamedTuple):
    """A function, a variable or an optimizer, which is sent to each worker once, and then named by its number.

    Attributes:
        kind: See `Define`.
        number: The number; equal numbers of a kind are the same object.
        code: The pickled object.
    """

    kind: str
    number: int
    code: bytes


class Work(NamedTuple):
    """A call for a worker.

    Attributes:
        function: The function.
        arguments: The pickled arguments.
        captured: The objects that the function names, in an order in which each names only earlier ones.
        named: The objects that the arguments name, in the same kind of order.
        held: The objects that must not be freed before the work has ended.
        data: The iterators over workers' own datasets that it takes, as resources.
        label: The name of the function, for display.
    """

    function: Name
    arguments: bytes
    captured: tuple[Name, ...] = ()
    named: tuple[Name, ...] = ()
    held: object = None
    data: tuple[int, ...] = ()
    label: str = ""


@dataclass(slots=True)
class Closure:
    """A closure that has not ended; `worker` is None while it waits. Small: hundreds of thousands may wait.

    `deaths` are the workers that were lost while they ran it, with the known causes.
    """

    work: Work
    rules: Rules
    attempt: int = 0
    failures: int = 0
    worker: int | None = None
    finished: Finished | None = None
    prepared: frozenset[int] = frozenset()
    is_decided: bool = False
    refusal: tuple[bytes, str] | None = None
    unapplied: frozenset[int] = frozenset()
    deaths: tuple[str, ...] = ()

    def complete(self, number: int) -> Attempt | None:
        """Local. The attempt, if its worker has finished it, and all servers that it has pushed to are prepared.

        Args:
            number: The number of this closure.
        """
        finished = self.finished
        if finished is None or self.worker is None or not self.prepared.issuperset(finished.servers):
            return None
        return Attempt(self.worker, number, self.attempt, finished.servers, finished.optimizers)


class Running(NamedTuple):
    """The work that a worker does now.

    Attributes:
        rank: The rank of the worker.
        closure: The number of the closure that it runs; 0 where it makes a value or a dataset of its own.
        attempt: The attempt of the closure.
        label: The name of the function.
        since: The time at which it was begun; 0 where that is not known.
    """

    rank: int
    closure: int
    attempt: int
    label: str
    since: float

    def __str__(self) -> str:
        if self.closure:
            return describe_closure(self.closure, self.label, self.attempt)
        return f"{self.label}, which makes a value of the worker's own"


class Owing(NamedTuple):
    """A server that has not answered for updates of functions, which have returned.

    Attributes:
        rank: The rank of the server.
        since: The time at which the first of them returned.
    """

    rank: int
    since: float


class Rules(NamedTuple):
    """The user's options for a closure.

    Attributes:
        worker: The only worker that may run it, while it is alive; None: any.
        priority: The priority: higher ones run first, equal ones in the order of `schedule`.
        retries: The number of times that the function is run again after it has raised.
        on_error: The effect of an error: "cancel" stores it, so that the next `schedule` or `join` raises it; with
            "keep" only the closure's own value raises it.
        max_deaths: The number of workers lost while they ran it with which the closure fails.
    """

    worker: int | None = None
    priority: float = 0
    retries: int = 0
    on_error: Literal["cancel", "keep"] = "cancel"
    max_deaths: int = MAX_DEATHS


def rules_of(
    workers: Sequence[int], worker: int | None, priority: float, retries: int, on_error: Literal["cancel", "keep"],
    max_deaths: int,
) -> Rules:
    """Local. Check the user's arguments, and return them as rules.

    Args:
        workers: The ranks of all workers.
        worker: The index of one of them.
        priority: See `Rules`.
        retries: See `Rules`.
        on_error: See `Rules`.
        max_deaths: See `Rules`.

    Raises:
        TypeError: An argument has a wrong type.
        ValueError: An argument is out of range.
    """
    if worker is not None and whole("worker", worker, least=0) >= len(workers):
        raise ValueError(f"`worker` must be between 0 and {len(workers) - 1}, got {worker}")
    if not isinstance(on_error, str) or on_error not in ("cancel", "keep"):
        raise ValueError(f"`on_error` must be 'cancel' or 'keep', got {described(on_error)}")
    rank = None if worker is None else workers[worker]
    return Rules(
        rank, number("priority", priority), whole("retries", retries, least=0), on_error,
        whole("max_deaths", max_deaths, least=1),
    )


class End(Enum):
    """The end of a closure or a resource."""

    RESULT = "result"
    ERROR = "error"
    AT_END = "at the end of the data"
    CANCELLED = "cancelled"


class ClosureEnd(NamedTuple):
    """A closure has ended: its update is applied on all its servers, or on none.

    Where a server could not change one variable, the end is an ERROR, and the rest of the update is applied.

    Attributes:
        closure: The closure.
        end: The kind of the end. Only a RESULT has changed variables, and such an ERROR.
        payload: The pickled result, or exception; empty for a cancelled one.
        traceback: The text of the exception.
    """

    closure: int
    end: End
    payload: bytes = b""
    traceback: str = ""


class ResourceEnd(NamedTuple):
    """A worker's copy of a resource is made (RESULT), cannot be made (ERROR), or is lost with its worker (CANCELLED).

    Attributes:
        resource: The resource.
        worker: The rank of the worker.
        end: The kind of the end.
        error: The pickled exception.
        traceback: Its text.
    """

    resource: int
    worker: int
    end: End
    error: bytes = b""
    traceback: str = ""
