"""Messages between coordinator, servers and workers. Values of variables are not sent by them.

A closure is handed out as attempt 1, 2, ... until one attempt is decided. These carry it:

    Do         coordinator to worker    run this closure
    Push       worker to server         a part of my update is in my slot
    Prepared   server to coordinator    the whole update is there
    Finished   worker to coordinator    the function has returned
    Commit     coordinator to server    apply the update: all servers get commits in one order
    Round      coordinator to server    apply the updates of several attempts as one; a commit, too
    Applied    server to coordinator    applied, and the slot is free
    Fence      coordinator to all       this worker is lost: drop what it staged, take nothing more from it
    Left       anybody to all           I serve no more, after an error of my own: a worker is then lost

Where workers have a time limit, these say how long a function has run (`queue/deadlines.py`):

    Timed      coordinator to worker    say from now on when you begin a closure
    Began      worker to coordinator    I have begun to load this closure, or to run it
    Ping       coordinator to server    are you there?
    Pong       server to coordinator    I am

Nothing here is decided by a worker or a server alone, so that a closure is applied by all its servers or by none.
(Except integer overflows: the server leaves that variable unchanged, and reports it in `Applied`.)
A server notes in the slot itself that it has applied it. A worker that begins a closure waits for that note before it
reads from this server, and gets a fence meanwhile: so a closure reads what its worker has finished before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

# A worker's places on each server. It may run its next closure before its last one is applied: one ahead, no more.
SLOTS = 2

# Attempts of closures are counted from 1. The coordinator's own writes are attempt 0 of the commit that they are.
OWN_WRITE = 0


# The kinds of objects that a worker keeps by number, until it gets a message to discard one.
NAMED = ("function", "dataset", "variable", "sharded", "optimizer", "resource")


class Define(NamedTuple):
    """Coordinator to worker: an object that later messages name, such as a function.

    Attributes:
        kind: "function", "dataset", "variable", "sharded" for a variable of several shards, or "optimizer".
        number: The number of this kind; never used again.
        code: The pickled object.
    """

    kind: str
    number: int
    code: bytes


class Do(NamedTuple):
    """Coordinator to worker: run a closure.

    Attributes:
        closure: The number of the closure, counted from 1 in the order of `schedule`.
        attempt: The number of the attempt, counted from 1.
        slot: The worker's slot on every server that this attempt pushes to; it is free, or earlier messages free it.
        function: The number of the function.
        arguments: Its pickled arguments.
        is_followed: Whether the next closure may come while this one runs.
    """

    closure: int
    attempt: int
    slot: int
    function: int
    arguments: bytes
    is_followed: bool = False


class Push(NamedTuple):
    """Worker to server: a part of an attempt's update is in the worker's slot, together with its description.

    Attributes:
        closure: The closure.
        attempt: The attempt.
        slot: The slot that holds the part.
        ordinal: The number of this part on this server, counted from 0.
        last: Whether the attempt pushes nothing more to this server.
    """

    closure: int
    attempt: int
    slot: int
    ordinal: int
    last: bool


class Drop(NamedTuple):
    """Worker or coordinator to server: forget what an attempt has pushed.

    A worker sends it before `Failed`, when its function has raised. The coordinator sends it in the place of a commit
    that has no learning rate, and is answered by `Applied`.

    Attributes:
        worker: The rank that has pushed it.
        closure: The closure.
        attempt: The attempt.
    """

    worker: int
    closure: int
    attempt: int


class Finished(NamedTuple):
    """Worker to coordinator: the function has returned.

    Attributes:
        closure: The closure.
        attempt: The attempt.
        servers: The ranks of the servers that it has pushed to.
        optimizers: The numbers of the optimizers that need a step, in order; one that steps twice comes twice.
        result: The pickled result.
        read: The places of this worker in its own data that are new, as of `OwnIterator.news`.
    """

    closure: int
    attempt: int
    servers: tuple[int, ...]
    optimizers: tuple[int, ...]
    result: bytes
    read: tuple[tuple[Any, ...], ...] = ()


class Failed(NamedTuple):
    """Worker to coordinator: the function has raised.

    Attributes:
        closure: The closure.
        attempt: The attempt.
        error: The pickled exception.
        traceback: Its text.
        ended: The iterator, as a resource, whose end the function has met; 0 if it has raised for another reason.
    """

    closure: int
    attempt: int
    error: bytes
    traceback: str
    ended: int = 0


class Prepared(NamedTuple):
    """Server to coordinator: the whole update of an attempt is staged here."""

    closure: int
    attempt: int


class CommitStep(NamedTuple):
    """A step of an optimizer.

    Attributes:
        optimizer: The number of the optimizer.
        iteration: The number of its steps before this one.
        rate: The learning rate.
    """

    optimizer: int
    iteration: int
    rate: float


class Commit(NamedTuple):
    """Coordinator to server: apply the staged update of an attempt.

    Attributes:
        number: The place of the commit in the one order of all commits, counted from 1. A server gets those that
            concern it.
        worker: The rank that has pushed it.
        closure: The closure.
        attempt: The attempt.
        steps: Its steps, in the order of `Finished.optimizers`. Empty for an update that comes too late for its
            version: its gradients are dropped, and the rest is applied.
    """

    number: int
    worker: int
    closure: int
    attempt: int
    steps: tuple[CommitStep, ...]


class CommitPart(NamedTuple):
    """The update of an attempt in a round.

    Attributes:
        worker: The rank that has pushed it.
        closure: The closure.
        attempt: The attempt.
        steps: For each of its steps, in the order of `Finished.optimizers`, the place of the round's step.
    """

    worker: int
    closure: int
    attempt: int
    steps: tuple[int, ...]


class Round(NamedTuple):
    """Coordinator to server: apply the staged updates of several attempts as one update.

    Their gradients for the same step are added in the order of the parts, and count as the mean of those who make it.

    Attributes:
        number: See `Commit`.
        parts: The updates that have pushed to this server, in the order of their workers.
        steps: All steps of the round.
        counts: For each step, the number of updates that make it, on whatever servers.
    """

    number: int
    parts: tuple[CommitPart, ...]
    steps: tuple[CommitStep, ...]
    counts: tuple[int, ...]


class Applied(NamedTuple):
    """Server to coordinator: a commit is applied, or dropped as requested; the slot is free.

    Attributes:
        closure: The closure.
        attempt: The attempt.
        error: The pickled exception of a variable that could not be changed, and is as before; empty if there was none.
    """

    closure: int
    attempt: int
    error: bytes = b""


class Fence(NamedTuple):
    """Coordinator to all servers and to the worker itself: this worker is lost."""

    worker: int


class SnapshotRequest(NamedTuple):
    """Coordinator to server: save the state that holds exactly the commits up to this number.

    Attributes:
        number: The number of the last of these commits.
        share: The pickled `SavedShare`, the part to save; empty for nothing.
    """

    number: int
    share: bytes = b""


class SnapshotDone(NamedTuple):
    """Server to coordinator: the state of that snapshot is saved, or cannot be.

    Attributes:
        number: The number of the snapshot.
        outcome: The pickled result of the share, or its pickled exception.
        traceback: The text of the exception; empty if there was none.
    """

    number: int
    outcome: bytes = b""
    traceback: str = ""


class Build(NamedTuple):
    """Coordinator to worker: make a resource, a value or a dataset that stays on the worker.

    Attributes:
        resource: The number of the resource.
        function: The number of the function that makes the resource.
        arguments: Its pickled arguments.
    """

    resource: int
    function: int
    arguments: bytes


class Built(NamedTuple):
    """Worker to coordinator: a resource is there, or could not be made.

    Attributes:
        resource: The number of the resource.
        error: The pickled exception; empty if it was made.
        traceback: Its text.
        begun: `OwnIterator.begun` of an iterator over the worker's own data.
    """

    resource: int
    error: bytes = b""
    traceback: str = ""
    begun: Mapping[str, int] | str = ""


class Discard(NamedTuple):
    """Coordinator to worker or server: the program has dropped an object, and no closure in flight uses it.

    Attributes:
        kind: The kind of the object: for workers one of `Define`, or "resource"; for servers "memory" of a variable, or
            "plan".
        number: The number of this kind.
    """

    kind: str
    number: int


class Call(NamedTuple):
    """Coordinator to a server or a worker: a question with an answer, such as "make a variable".

    Attributes:
        call: The number of the call.
        name: The name of the call.
        arguments: Its pickled arguments.
    """

    call: int
    name: str
    arguments: bytes


class CallAnswer(NamedTuple):
    """The answer to a call.

    Attributes:
        call: The number of the call.
        value: The pickled value; of a call that failed, the pickled exception.
        traceback: The text of the exception; empty if there was none.
    """

    call: int
    value: bytes
    traceback: str = ""


class Timed(NamedTuple):
    """Coordinator to worker: send `Began` from now on."""


class Began(NamedTuple):
    """Worker to coordinator: it has begun to load a closure and its arguments, or has loaded them and calls it.

    Attributes:
        closure: The closure.
        attempt: The attempt.
        is_loaded: Whether they are loaded.
    """

    closure: int
    attempt: int
    is_loaded: bool


class Ping(NamedTuple):
    """Coordinator to server: answer with the same number."""

    number: int


class Pong(NamedTuple):
    """Server to coordinator: the answer."""

    number: int


class Left(NamedTuple):
    """Any process to all: this process does not serve any more, though it is alive.

    Attributes:
        reason: The error that has ended its service.
    """

    reason: str


Message: TypeAlias = (
    Define | Do | Push | Drop | Finished | Failed | Prepared | Commit | Round | Applied | Fence | SnapshotRequest
    | SnapshotDone | Build | Built | Discard | Call | CallAnswer | Left | Timed | Began | Ping | Pong
)


class Send(NamedTuple):
    """A message to be sent. The state machines of the protocol return these; they never send.

    Attributes:
        rank: The receiver.
        message: The message.
    """

    rank: int
    message: Message
