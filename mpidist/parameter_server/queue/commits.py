"""Commits: the one order in which all servers apply updates, and the places in it: steps, own writes, and snapshots."""

from __future__ import annotations

import math
import pickle
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from mpidist.parameter_server.protocol.messages import (
    OWN_WRITE,
    SLOTS,
    Commit,
    CommitPart,
    CommitStep,
    Drop,
    Push,
    Round,
    Send,
    SnapshotDone,
    SnapshotRequest,
)


class RateError(RuntimeError):
    """A schedule of the user returns no learning rate, or one that the optimizer refuses."""


class Attempt(NamedTuple):
    """An attempt whose update is decided.

    Attributes:
        worker: The worker that has pushed it.
        closure: The closure.
        attempt: The attempt.
        servers: The servers that hold a part of the update.
        optimizers: The optimizers that make a step, in order; one that steps twice comes twice.
    """

    worker: int
    closure: int
    attempt: int
    servers: tuple[int, ...]
    optimizers: tuple[int, ...]


def numbered(optimizer: int) -> str:
    """Local. The name of an optimizer of which only the number is known."""
    return f"optimizer {optimizer}"


@dataclass
class Commits:
    """The numbers of commits. The messages of one call reach each server in this order, with no others between them.

    Args:
        rank: The coordinator's rank.
        servers: The ranks of all servers.
        rate: A function that returns the learning rate of an optimizer, given its number and its iteration, counted
            from 0. It raises RateError for a rate that the optimizer refuses, and the errors of a schedule.
        name: A function that returns the name of an optimizer for display, given its number.

    Attributes:
        number: The number of the last commit.
        iterations: The number of steps of each optimizer so far; it may be set, from a checkpoint for instance.
        saving: The servers that have not saved the last snapshot.
        saved: The answers of the other servers about the last snapshot.
        refused: By the numbers of own writes, the pickled exception of a variable that could not be changed.
        unapplied: By the numbers of own writes, the servers that have not applied them.
    """

    rank: int
    servers: Sequence[int]
    rate: Callable[[int, int], float]
    name: Callable[[int], str] = numbered
    number: int = 0
    iterations: MutableMapping[int, int] = field(default_factory=dict)
    saving: set[int] = field(default_factory=set)
    saved: dict[int, SnapshotDone] = field(default_factory=dict)
    refused: dict[int, bytes] = field(default_factory=dict)
    unapplied: dict[int, set[int]] = field(default_factory=dict)
    _slots: dict[int, int] = field(default_factory=dict)

    def commit(self, worker: int, closure: int, attempt: int, optimizers: Sequence[int]) -> Commit:
        """Local. The next commit, for all servers that hold a part of the update.

        Args:
            worker: The worker that has pushed it.
            closure: The closure.
            attempt: The attempt.
            optimizers: The optimizers that make a step, in order.

        Raises:
            RateError: There is no learning rate. Nothing is counted then.
        """
        steps = self._steps(optimizers)
        self.number += 1
        return Commit(self.number, worker, closure, attempt, steps)

    def _steps(self, optimizers: Sequence[int]) -> tuple[CommitStep, ...]:
        """The next steps of these optimizers; nothing is counted if one has no learning rate."""
        iterations: dict[int, int] = {}
        steps = []
        for optimizer in optimizers:
            iteration = iterations.get(optimizer, self.iterations.get(optimizer, 0))
            steps.append(CommitStep(optimizer, iteration, self._rate(optimizer, iteration)))
            iterations[optimizer] = iteration + 1
        self.iterations.update(iterations)
        return tuple(steps)

    def decide(self, attempts: Sequence[Attempt]) -> tuple[list[Send], tuple[bytes, str] | None]:
        """Local. The messages to the servers of updates that count together: a commit of one, or a round of several.

        Args:
            attempts: The attempts in the order of their workers, one of each worker.

        Returns:
            The messages. Where there is no learning rate these are `Drop`, and the pickled error with its traceback
            comes with them. The workers' slots are free when all servers have dropped the updates.
        """
        try:
            if len(attempts) > 1:
                return self._round(attempts), None
            worker, closure, attempt, servers, optimizers = attempts[0]
            commit = self.commit(worker, closure, attempt, optimizers)
            return [Send(server, commit) for server in servers], None
        except RateError as error:
            refusal = pickle.dumps(error), "".join(traceback.format_exception(error))
            return [Send(server, Drop(*one[:3])) for one in attempts for server in one.servers], refusal

    def _round(self, attempts: Sequence[Attempt]) -> list[Send]:
        """The next commit, of several updates."""
        # The second step of an optimizer in one function belongs with the second one in others.
        named = [
            [(optimizer, one.optimizers[:at].count(optimizer)) for at, optimizer in enumerate(one.optimizers)]
            for one in attempts
        ]
        counts = Counter(name for names in named for name in names)
        # An optimizer's second step follows its first one in each of them.
        steps = self._steps([optimizer for optimizer, _ in counts])
        self.number += 1
        places = {name: place for place, name in enumerate(counts)}
        parts = [
            (one.servers, CommitPart(*one[:3], tuple(places[name] for name in names)))
            for one, names in zip(attempts, named, strict=True)
        ]
        of_server = {
            server: tuple(part for servers, part in parts if server in servers)
            for server in dict.fromkeys(server for one in attempts for server in one.servers)
        }
        return [
            Send(server, Round(self.number, some, steps, tuple(counts.values()))) for server, some in of_server.items()
        ]

    def _rate(self, optimizer: int, iteration: int) -> float:
        try:
            rate = float(self.rate(optimizer, iteration))
        except RateError as error:
            raise self._refused(optimizer, iteration, str(error)) from error
        except Exception as error:
            raise self._refused(optimizer, iteration, f"the schedule raises {error!r}") from error
        if math.isnan(rate):
            raise self._refused(optimizer, iteration, "expected a number, got nan")
        return rate

    def _refused(self, optimizer: int, iteration: int, why: str) -> RateError:
        return RateError(
            f"the learning rate of {self.name(optimizer)} at its step {iteration}: {why}. The update is not applied"
        )

    # ------------------------------------------------------------------ the coordinator's own writes

    def free_slot(self) -> int | None:
        """Local. A slot of the coordinator on every server, or None: then a write must be applied first."""
        return next((slot for slot in range(SLOTS) if slot not in self._slots.values()), None)

    def write(self, slot: int, servers: Iterable[int]) -> list[Send]:
        """Local. Commit the content of the coordinator's slot on these servers; no other rank is involved.

        A closure that is decided later is applied later. The write can be read when `unwritten` is False.

        Args:
            slot: The slot that `free_slot` returned; the data is in it already.
            servers: The servers that hold a part of the write.

        Raises:
            RuntimeError: The slot is in use.
        """
        if slot in self._slots.values():
            raise RuntimeError(f"expected a free slot for a write, got slot {slot}, in use are {self._slots}")
        commit = self.commit(self.rank, self.number + 1, OWN_WRITE, ())
        self._slots[commit.number] = slot
        self.unapplied[commit.number] = set(servers)
        push = Push(commit.closure, OWN_WRITE, slot, 0, True)
        return [Send(server, message) for server in servers for message in (push, commit)]

    def written(self, server: int, write: int, error: bytes = b"") -> None:
        """Local. Note that a server has applied a write: `Applied` with the attempt OWN_WRITE.

        Args:
            server: The server.
            write: The number of the write, `Applied.closure`.
            error: See `Applied`.

        Raises:
            RuntimeError: No such write is outstanding there.
        """
        if server not in self.unapplied.get(write, ()):
            raise RuntimeError(f"server of rank {server} has applied write {write}, which it must not apply")
        self.unapplied[write].remove(server)
        if error:
            self.refused[write] = error
        if not self.unapplied[write]:
            del self.unapplied[write], self._slots[write]

    def unwritten(self, server: int) -> bool:
        """Local. Whether a one-sided read from this server may miss a write of the coordinator.

        A `Call` never does: it follows the commit.
        """
        return any(server in servers for servers in self.unapplied.values())

    # ------------------------------------------------------------------ snapshots

    def snapshot(self, shares: Mapping[int, bytes] | None = None) -> list[Send]:
        """Local. Let all servers save the state of this moment: with all commits so far, and no later one.

        Args:
            shares: The part that each server saves; see `SnapshotRequest`.

        Raises:
            RuntimeError: The previous snapshot is not saved yet.
        """
        if self.saving:
            raise RuntimeError(f"the servers of ranks {sorted(self.saving)} are still saving the previous snapshot")
        # New objects: the caller that has begun the last snapshot keeps its own.
        self.saving, self.saved = set(self.servers), {}
        return [Send(server, SnapshotRequest(self.number, (shares or {}).get(server, b""))) for server in self.servers]

    def snapshot_done(self, server: int, message: SnapshotDone) -> None:
        """Local. Note that a server has saved its state, or cannot; `saved` has all answers when `saving` is empty.

        Args:
            server: The server.
            message: The server's message.

        Raises:
            RuntimeError: The server had nothing to save.
        """
        if server not in self.saving:
            raise RuntimeError(f"server of rank {server} sends {message!r}: expected it from {sorted(self.saving)}")
        # First: another thread may wait for `saving` to be empty.
        self.saved[server] = message
        self.saving.remove(server)
