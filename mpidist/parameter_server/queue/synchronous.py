"""Rounds: synchronous updates. The first updates of a version make the next one together, and later ones come too late.

It is what `tf.compat.v1.train.SyncReplicasOptimizer` does. A worker gets a function when all servers have the last
version, and the next one when its update has counted, or was dropped. The first m updates of a version are added and
count as their mean; an update that was begun at an older version has its gradients dropped, and is counted as late.
What a function changes otherwise, such as a metric, counts in any case. So the version at which an update counts is the
one that its worker has read. A pure state machine.

A round waits for m updates, or for one of each worker where fewer are not lost. When the program waits, and all that
has begun is in the round, and nothing else can begin, the round counts with the present ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from mpidist.parameter_server.options import Pace
from mpidist.parameter_server.queue.commits import Attempt
from mpidist.parameter_server.queue.staleness import Versions
from mpidist.recorder.recorder import RECORDER


@dataclass
class Rounds(Versions):
    """The versions of the variables of all servers: each round makes the next one.

    Args:
        wanted: The number of updates that make a round.
    """

    is_synchronous: ClassVar[bool] = True

    wanted: int = 1
    _open: dict[int, Attempt] = field(default_factory=dict)

    def may_begin(self, *, is_owing: bool) -> bool:
        """Local. See `Versions`: whether the last round is applied, and the worker is not in this one."""
        return not (is_owing or self._unapplied)

    def offer(self, attempt: Attempt) -> list[Attempt]:
        """Local. See `Versions`. It makes no step, or is late; or else it waits in the round."""
        if not attempt.optimizers or self._is_late(attempt):
            return [attempt]
        self._open[attempt.closure] = attempt
        return []

    def full(self, workers: int) -> list[Attempt]:
        """Local. See `Versions`: the round, in the order of the workers."""
        return sorted(self._open.values()) if len(self._open) >= max(1, min(self.wanted, workers)) else []

    def rest(self, in_flight: int) -> list[Attempt]:
        """Local. See `Versions`: the round, if all that has begun is in it."""
        return sorted(self._open.values()) if len(self._open) == in_flight else []

    def counting(self, attempt: Attempt) -> Attempt:
        """Local. See `Versions`: late steps do not count."""
        return attempt._replace(optimizers=()) if self._is_late(attempt) else attempt

    def count(self, attempts: Sequence[Attempt]) -> None:
        """Local. See `Versions`. A round is a version; updates that make no step in time are none."""
        mine = [one for one in attempts if one.closure in self._open]
        for one in attempts:
            is_late = bool(one.optimizers) and self._is_late(one)
            read = self._begun.pop(one.closure)
            self.late += is_late
            if is_late or one.closure in self._open:
                self._note(one, read, is_late=is_late)
        self.number += bool(mine)
        for one in mine:
            del self._open[one.closure]
            self._unapplied[one.closure] = self.number

    def end(self, closure: int) -> None:
        """Local. See `Versions`."""
        super().end(closure)
        self._open.pop(closure, None)

    def _is_late(self, attempt: Attempt) -> bool:
        return self._begun[attempt.closure] < self.number


def versions_of(pace: Pace, workers: int) -> Versions:
    """Local. The versions of a strategy, noted in this process's recorder.

    Args:
        pace: The pace of the strategy.
        workers: Number of workers.
    """
    if pace.synchronous:
        return Rounds(note=RECORDER.updates.append, wanted=workers - pace.backup_workers)
    return Versions(pace.staleness, RECORDER.updates.append)
