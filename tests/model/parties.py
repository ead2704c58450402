"""The parties of a job: a coordinator with a user's program, servers, and workers, each a state and what changes it.

Coordinator and servers are the product's own machines (`Closures`, `Staging`) with a record of what they did. Workers
are a model: they put into slots, ring, and finish or fail, as `parameter_server/worker/worker.py` does.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mpidist.parameter_server.protocol.messages import (
    OWN_WRITE,
    Commit,
    Do,
    Drop,
    Failed,
    Fence,
    Finished,
    Left,
    Message,
    Push,
    Round,
    Send,
    SnapshotDone,
)
from mpidist.parameter_server.queue.closures import Closures
from mpidist.parameter_server.queue.waiting import SETTLED_SECONDS
from mpidist.parameter_server.queue.work import ClosureEnd, Name, ResourceEnd, Rules, Work
from mpidist.parameter_server.server.snapshot import ElementRange, Unsaved
from mpidist.parameter_server.server.staging import Apply, ApplyRound, Free, Save, Staging

COORDINATOR = 0


class BrokenError(Exception):
    """A rule does not hold."""


class Put(NamedTuple):
    """A part of an update is written into a slot, one-sidedly; `seen` is as of `Worker`."""

    server: int
    owner: int
    slot: int
    name: tuple[int, int]
    part: int
    seen: tuple[int, ...] = ()


class Release(NamedTuple):
    """A slot does not hold an update any more that its worker has to wait for."""

    server: int
    owner: int
    slot: int


class Schedule(NamedTuple):
    """The user schedules a closure that pushes to these servers, so many parts to each."""

    servers: tuple[int, ...]
    rules: Rules = Rules()
    parts: int = 1

    def work(self) -> Work:
        """The work that the coordinator hands out; all that the model's worker needs is in the arguments."""
        return Work(Name("function", 1, b"f"), bytes([self.parts, *self.servers]))


class Write(NamedTuple):
    """The user assigns to a variable that lies on these servers."""

    servers: tuple[int, ...]


class CutMade(NamedTuple):
    """A cut.

    Attributes:
        number: The commit after which servers save.
        held: The closures that are in commits up to it.
        left: The closures that are to be done after it.
        scheduled: The last closure that there was.
    """

    number: int
    held: tuple[int, ...]
    left: tuple[int, ...]
    scheduled: int


def rate(optimizer: int, iteration: int) -> float:
    """A learning rate."""
    return 0.5


def rate_of_first(optimizer: int, iteration: int) -> float:
    """A learning rate that there is for the first step only."""
    return 0.5 if iteration == 0 else float("nan")


def rate_of_none(optimizer: int, iteration: int) -> float:
    """A learning rate that there never is."""
    return float("nan")


@dataclass
class Coordinator:
    """The product's closures, and a user's program: `Schedule`, `Write`, or one of "read", "join", "cut".

    Attributes:
        position: The next operation of the program.
        scheduled: The closures by number; an error that is raised keeps one from being scheduled.
        ends: How closures ended, in order.
        sent: All commits and the servers that they went to, in order.
        raised: The closures whose errors the user got.
        lost: The workers that were called lost.
        cuts: What each cut is.
        left: The workers that have left by themselves, as far as that is known: they are soon called lost.
        steps: The numbers of the commits with steps of optimizers, in order.
        at_work: The closures that each worker has to run, or runs, in their order.
        guilt: How often a worker was lost while it had a closure before all others.
    """

    closures: Closures
    program: tuple[Any, ...]
    position: int = 0
    scheduled: dict[int, Schedule] = field(default_factory=dict)
    ends: list[ClosureEnd] = field(default_factory=list)
    sent: list[tuple[int, Commit]] = field(default_factory=list)
    raised: list[int] = field(default_factory=list)
    lost: set[int] = field(default_factory=set)
    cuts: list[CutMade] = field(default_factory=list)
    left: set[int] = field(default_factory=set)
    steps: list[int] = field(default_factory=list)
    at_work: dict[int, list[int]] = field(default_factory=dict)
    guilt: dict[int, int] = field(default_factory=dict)

    def _note(self, actions: list[Any] | None) -> list[Any]:
        if actions is None:
            raise BrokenError("protocol: the coordinator gets a message that it does not know")
        for action in actions:
            if isinstance(action, ClosureEnd):
                self.ends.append(action)
            elif isinstance(action, Send) and isinstance(action.message, Do):
                self.at_work.setdefault(action.rank, []).append(action.message.closure)
            elif isinstance(action, Send) and isinstance(action.message, Commit | Round):
                self.sent += [(action.rank, commit) for commit in commits_of(action.message)]
                if action.message.steps and action.message.number not in self.steps:
                    self.steps.append(action.message.number)
        return [action for action in actions if not isinstance(action, ClosureEnd | ResourceEnd)]

    def deliver(self, sender: int, message: Message) -> list[Any]:
        """A message comes."""
        if isinstance(message, Finished | Failed) and self.at_work.get(sender):
            self.at_work[sender].pop(0)
        actions = self.closures.take(sender, message, 0.0)
        if actions is None and isinstance(message, Left):
            # The station takes note of it, and tells no role.
            self.left.add(sender)
            return []
        return self._note(actions)

    def lose(self, worker: int) -> list[Any]:
        """A worker is called lost."""
        self.lost.add(worker)
        for closure in self.at_work.pop(worker, [])[:1]:
            self.guilt[closure] = self.guilt.get(closure, 0) + 1
        return self._note(self.closures.lost(worker, 0.0))

    def settle(self) -> list[Any] | None:
        """The last losses are settled; None if nothing waits for that."""
        return self._note(self.closures.look(SETTLED_SECONDS)) if self.closures.has_suspects else None

    def join(self, worker: int) -> list[Any]:
        """A worker joins."""
        return self._note(self.closures.joined(worker, 0.0))

    def user(self) -> list[Any] | None:
        """The next operation of the user's program, or a part of it; None while it waits, or at the end."""
        if self.position == len(self.program):
            return None
        operation = self.program[self.position]
        closures = self.closures
        if closures.error is not None and (operation == "join" or isinstance(operation, Schedule)):
            return self._raise_error()
        if operation == "join" and not closures.is_done:
            return self._note([*closures.end_round()]) or None
        actions: list[Any] = []
        if isinstance(operation, Schedule):
            number, actions = closures.schedule(operation.work(), operation.rules, 0.0)
            self.scheduled[number] = operation
        elif isinstance(operation, Write):
            slot = closures.commits.free_slot()
            if slot is None:
                return None
            sends = closures.commits.write(slot, operation.servers)
            name = (closures.commits.number, OWN_WRITE)
            actions = [*(Put(server, COORDINATOR, slot, name, 0) for server in operation.servers), *sends]
        elif operation == "cut":
            if closures.commits.saving:
                return None
            actions = [*closures.commits.snapshot()]
            held = {commit.closure for _, commit in self.sent if commit.attempt != OWN_WRITE}
            left = tuple(closures.undecided())
            self.cuts.append(CutMade(closures.commits.number, tuple(sorted(held)), left, len(self.scheduled)))
        elif operation == "read" and any(map(closures.commits.unwritten, closures.commits.servers)):
            return None
        self.position += 1
        return self._note(actions)

    def _raise_error(self) -> list[Any] | None:
        cancelled = self._note(self.closures.cancel())
        if self.closures.in_flight:
            return [*cancelled, *self._note([*self.closures.end_round()])] or None
        error = self.closures.take_error()
        if error is None or not self.closures.is_done:
            raise BrokenError(f"errors: the user gets {error} while closures are there")
        self.raised.append(error.closure)
        self.position += 1
        return cancelled


def commits_of(message: Commit | Round) -> list[Commit]:
    """The updates of a commit, or of a round, which have one number."""
    if isinstance(message, Commit):
        return [message]
    return [
        Commit(message.number, *part[:3], tuple(message.steps[step] for step in part.steps)) for part in message.parts
    ]


def updates_of(action: Apply | ApplyRound) -> list[Commit]:
    """The updates that a server applies."""
    return commits_of(action.commit if isinstance(action, Apply) else action.round)


def changed_by(commit: Commit) -> tuple[int, ...]:
    """The variables of a server that a commit changes: the second one, or both."""
    return (1,) if commit.closure % 2 else (0, 1)


class Kept(NamedTuple):
    """A block as a server has saved it.

    Attributes:
        number: Of the cut.
        variable: Of the server: each of the two has one block.
        content: The numbers of the commits that it holds.
    """

    number: int
    variable: int
    content: tuple[int, ...]


@dataclass
class Server:
    """The product's staging and unsaved, and what they made the server do.

    Attributes:
        applied: Commits, in order.
        dropped: The attempts that it dropped as the coordinator told, by closure and attempt.
        contents: Of each variable, the numbers of the commits that have changed it.
        copies: Of variables that were copied for the cut, the same.
        cut: The number of the cut that is saved.
        saved: The blocks of all cuts.
    """

    staging: Staging
    unsaved: Unsaved
    applied: list[Commit] = field(default_factory=list)
    dropped: list[tuple[int, int]] = field(default_factory=list)
    contents: list[tuple[int, ...]] = field(default_factory=lambda: [(), ()])
    copies: dict[int, tuple[int, ...]] = field(default_factory=dict)
    cut: int = 0
    saved: list[Kept] = field(default_factory=list)

    def deliver(self, sender: int, message: Message) -> list[Any]:
        """A message comes."""
        actions = self.staging.take(sender, message)
        if actions is None and isinstance(message, Left):
            # The fence that drops what it has staged comes from the coordinator.
            return []
        if actions is None:
            raise BrokenError("protocol: a server gets a message that it does not know")
        if isinstance(message, Drop) and any(isinstance(action, Free) for action in actions):
            self.dropped.append((message.closure, message.attempt))
        self.unsaved.waiting += actions
        return self._go_on()

    def save_block(self) -> list[Any] | None:
        """The next block is saved, if there is one."""
        left = sorted([*self.unsaved.live, *self.unsaved.copied])
        if not left:
            return None
        variable = left[0].variable
        self.saved.append(Kept(self.cut, variable, self.copies.pop(variable, self.contents[variable])))
        self.unsaved.saved(left[0])
        done = [] if left[1:] else [Send(COORDINATOR, SnapshotDone(self.cut))]
        return [*self._go_on(), *done]

    def _go_on(self) -> list[Any]:
        done: list[Any] = []
        while (ready := self.unsaved.next(
            lambda apply: tuple({variable: None for one in updates_of(apply) for variable in changed_by(one)})
        )) is not None:
            self.copies.update({block.variable: self.contents[block.variable] for block in ready.copies})
            if isinstance(ready.action, Save):
                self.cut = ready.action.number
                self.unsaved.begin({ElementRange(variable, 0, 1): 1 for variable in range(2)})
                continue
            if isinstance(ready.action, Apply | ApplyRound):
                self._apply(updates_of(ready.action))
            done.append(ready.action)
        return done

    def _apply(self, commits: list[Commit]) -> None:
        for commit, other in itertools.product(commits, self.applied):
            if commit.attempt != OWN_WRITE and other[2] == commit.closure and other.attempt != OWN_WRITE:
                raise BrokenError(f"once: {other} was applied before {commit}")
            if commit.number <= other.number or any(
                mine.optimizer == its.optimizer and mine.iteration <= its.iteration
                for mine in commit.steps for its in other.steps
            ):
                raise BrokenError(f"order: {other} was applied before {commit}")
        self.applied += commits
        for variable in sorted({variable for commit in commits for variable in changed_by(commit)}):
            self.contents[variable] += (commits[0].number,)

    @property
    def steps(self) -> int:
        """The number of commits with steps of optimizers that are applied."""
        return len({commit.number for commit in self.applied if commit.steps})


class Attempt(NamedTuple):
    """An attempt that a worker has."""

    closure: int
    attempt: int
    slot: int
    arguments: bytes


@dataclass
class Worker:
    """The model of a worker.

    Attributes:
        status: "absent" until it joins; "there"; "gone" when it was fenced; "dead"; "left".
        attempts: What it was told to do; it is at work on the first.
        at: What it does next, by position in its work.
        own: The attempts that it has finished, and their servers, if it pulls.
        pulls: Whether it reads variables when it begins, and so waits for its own last update.
        splits: Whether somebody may come between `Put` and the message about it.
        seen: Of each server the number of commits with steps that this worker saw when it read variables last.
    """

    rank: int
    pulls: bool = False
    splits: bool = False
    status: str = "absent"
    attempts: list[Attempt] = field(default_factory=list)
    at: int = 0
    own: list[tuple[int, int, tuple[int, ...]]] = field(default_factory=list)
    seen: tuple[int, ...] = ()

    def work(self) -> list[Any]:
        """The steps of the first attempt: a list of actions each, or "pull"."""
        closure, attempt, slot, (parts, *servers) = self.attempts[0]
        steps: list[Any] = ["pull"] if self.pulls else []
        for server in servers:
            for part in range(parts):
                put = Put(server, self.rank, slot, (closure, attempt), part, self.seen)
                ring = Send(server, Push(closure, attempt, slot, part, part + 1 == parts))
                steps += [[put], [ring]] if self.splits else [[put, ring]]
        optimizers = (0,) if servers else ()
        steps.append([Send(COORDINATOR, Finished(closure, attempt, tuple(servers), optimizers, bytes([attempt])))])
        return steps

    def go_on(self, seen: tuple[int, ...] = ()) -> list[Any]:
        """Do the next step; `seen` is of one that pulls."""
        self.seen = seen or self.seen
        steps = self.work()
        step = steps[self.at]
        self.at += 1
        if self.at == len(steps):
            if self.pulls:
                closure, attempt, _, (_, *servers) = self.attempts[0]
                self.own.append((closure, attempt, tuple(servers)))
            self._next()
        return [] if step == "pull" else step

    def fail(self) -> list[Any]:
        """The user's function raises: what was pushed is dropped before the coordinator hears of it."""
        closure, attempt, slot, (_, *servers) = self.attempts[0]
        done = [action for step in self.work()[: self.at] if step != "pull" for action in step]
        touched = [server for server in servers if any(isinstance(a, Put) and a.server == server for a in done)]
        self._next()
        return [
            *(Release(server, self.rank, slot) for server in touched),
            *(Send(server, Drop(self.rank, closure, attempt)) for server in touched),
            Send(COORDINATOR, Failed(closure, attempt, bytes([attempt]), "")),
        ]

    def _next(self) -> None:
        self.attempts.pop(0)
        self.at = 0

    def deliver(self, sender: int, message: Message) -> list[Any]:
        """A message comes from the coordinator."""
        if self.status != "there":
            return []
        if isinstance(message, Fence):
            self.status, self.attempts, self.at = "gone", [], 0
        elif isinstance(message, Do):
            self.attempts.append(Attempt(message.closure, message.attempt, message.slot, message.arguments))
        return []
