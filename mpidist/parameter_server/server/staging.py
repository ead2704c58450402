"""Staging: the updates that a server holds between push and commit. A pure state machine.

Messages go in, and what is to be done comes out, in order: messages to send, updates to apply, a state to save. An
update of a worker is staged until the coordinator commits it. A fence drops what the lost worker has staged, and all
that still comes from it; it never overtakes a commit, since messages from the coordinator arrive in order.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from mpidist.parameter_server.protocol.messages import (
    OWN_WRITE,
    SLOTS,
    Applied,
    Commit,
    CommitPart,
    Drop,
    Fence,
    Message,
    Prepared,
    Push,
    Round,
    Send,
    SnapshotRequest,
)


class Apply(NamedTuple):
    """The update in a slot is to be applied, and the slot marked as free, before what comes after this.

    Attributes:
        commit: The update, and its steps.
        slot: The worker's slot that holds the update.
        pushes: The number of its parts, in the order of their ordinals.
    """

    commit: Commit
    slot: int
    pushes: int


class ApplyRound(NamedTuple):
    """The updates of a round are to be applied as one, and their slots marked as free; see `Apply`.

    Attributes:
        round: The updates, and their steps.
        slots: The slot that holds each part.
        pushes: The number of pushes of each part.
    """

    round: Round
    slots: tuple[int, ...]
    pushes: tuple[int, ...]


class Free(NamedTuple):
    """A slot is to be marked as free; what is in it is not applied."""

    worker: int
    slot: int


class Save(NamedTuple):
    """The state is to be saved as it is after this commit; `SnapshotDone` is to be sent when it is.

    Attributes:
        number: The number of the commit.
        share: See `SnapshotRequest`.
    """

    number: int
    share: bytes


Action: TypeAlias = Send | Apply | ApplyRound | Free | Save


@dataclass
class _Staged:
    """The pushes of an attempt: their slot, the number of parts, and whether these are all."""

    slot: int
    pushes: int = 0
    is_whole: bool = False


@dataclass
class Staging:
    """The staged updates of one server.

    Args:
        coordinator: The rank that commits and fences; it also writes itself, through slots of its own.

    Attributes:
        staged: The attempts (closure, attempt) of each worker that are staged.
        fenced: Workers that are lost. Their ranks are never used again.
        number: The last commit, or snapshot.
    """

    coordinator: int
    staged: dict[int, dict[tuple[int, int], _Staged]] = field(default_factory=dict)
    fenced: set[int] = field(default_factory=set)
    number: int = 0

    def take(self, sender: int, message: Message) -> list[Action] | None:
        """Local. The actions that a message asks for, in the order in which they are to be done.

        Args:
            sender: The rank that has sent it.
            message: The message.

        Returns:
            None if the message is not one of this machine's.

        Raises:
            RuntimeError: The message breaks the protocol; the state is as before it.
        """
        if sender in self.fenced:
            return []
        if isinstance(message, Push):
            return self._push(sender, message)
        # Where one process is all of a job, the coordinator is the worker, and waits for its own messages.
        if isinstance(message, Drop) and sender == message.worker != self.coordinator:
            # It marks its slot as free by itself.
            self._unstage(message)
            return []
        if not isinstance(message, Commit | Round | Drop | Fence | SnapshotRequest):
            return None
        if sender != self.coordinator:
            raise _broken(sender, message, f"it from the coordinator only, which is rank {self.coordinator}")
        if isinstance(message, Commit):
            return self._commit(message)
        if isinstance(message, Round):
            return self._round(message)
        if isinstance(message, Drop):
            return self._drop(message)
        if isinstance(message, SnapshotRequest):
            self._count(message)
            return [Save(message.number, message.share)]
        self.fenced.add(message.worker)
        self.staged.pop(message.worker, None)
        return []

    def _push(self, worker: int, push: Push) -> list[Action]:
        attempts = self.staged.get(worker, {})
        key = (push.closure, push.attempt)
        staged = attempts.get(key, _Staged(push.slot))
        others = {other.slot for name, other in attempts.items() if name != key}
        if staged.is_whole or push.ordinal != staged.pushes or push.slot != staged.slot:
            raise _broken(worker, push, f"part {staged.pushes} of an update that is open: {staged!r}")
        if push.slot in others or not 0 <= push.slot < SLOTS:
            raise _broken(worker, push, f"a free slot of {SLOTS}; in use are {sorted(others)}")
        staged.pushes += 1
        staged.is_whole = push.last
        self.staged.setdefault(worker, attempts)[key] = staged
        # The coordinator knows what it has pushed itself.
        told = push.last and push.attempt != OWN_WRITE
        return [Send(self.coordinator, Prepared(push.closure, push.attempt))] if told else []

    def _commit(self, commit: Commit) -> list[Action]:
        staged = self._whole(commit)
        self._count(commit)
        self._unstage(commit)
        applied = Applied(commit.closure, commit.attempt)
        return [Apply(commit, staged.slot, staged.pushes), Send(self.coordinator, applied)]

    def _round(self, message: Round) -> list[Action]:
        staged = [self._whole(part) for part in message.parts]
        self._count(message)
        for part in message.parts:
            self._unstage(part)
        action = ApplyRound(message, tuple(one.slot for one in staged), tuple(one.pushes for one in staged))
        return [action, *(Send(self.coordinator, Applied(part.closure, part.attempt)) for part in message.parts)]

    def _drop(self, drop: Drop) -> list[Action]:
        staged = self._whole(drop)
        self._unstage(drop)
        return [Free(drop.worker, staged.slot), Send(self.coordinator, Applied(drop.closure, drop.attempt))]

    def _whole(self, message: Commit | CommitPart | Drop) -> _Staged:
        staged = self.staged.get(message.worker, {}).get((message.closure, message.attempt))
        if staged is None or not staged.is_whole:
            raise _broken(self.coordinator, message, f"an update that is staged as a whole; this one is {staged!r}")
        return staged

    def _unstage(self, message: Commit | CommitPart | Drop) -> None:
        attempts = self.staged.get(message.worker, {})
        attempts.pop((message.closure, message.attempt), None)
        if not attempts:
            self.staged.pop(message.worker, None)

    def _count(self, message: Commit | Round | SnapshotRequest) -> None:
        """Take the number of a commit, which must be new, or of a snapshot, which may be that of the last commit."""
        if message.number < self.number + (not isinstance(message, SnapshotRequest)):
            raise _broken(self.coordinator, message, f"a number after {self.number}")
        self.number = message.number


def _broken(sender: int, message: Message | CommitPart, expected: str) -> RuntimeError:
    return RuntimeError(f"rank {sender} sends {message!r}, which breaks the serving protocol: expected {expected}")
