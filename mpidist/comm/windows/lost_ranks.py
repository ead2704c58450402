"""The ranks of a window that are dead, or thought dead."""

from __future__ import annotations

import errno
import threading
from collections.abc import Sequence

from mpidist.errors import DeadRankError
from mpidist.failures.deaths import IS_SILENT, WATCH, Process

# The kernel has received nothing for too long, or has no route any more.
_SILENCE = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTDOWN)
# The process of a rank that other ranks know, and this one does not yet.
_UNKNOWN = Process("an unknown host", 0, "")


class Losses:
    """The lost ranks of a group, as far as this rank knows.

    The kernel reports deaths on this host (`WATCH`); MPI, or the end of a connection, reports others, by `note`.

    Args:
        processes: The processes of the ranks.

    Attributes:
        processes: The processes of all ranks, with those that have joined.
        forgotten: The ranks that the window's user treats as lost, dead or not.
    """

    def __init__(self, processes: Sequence[Process]) -> None:
        self.processes = list(processes)
        # Background threads change it, too.
        self._lock = threading.Lock()
        self._dead: frozenset[int] = frozenset()
        self._known = 0
        self.forgotten: frozenset[int] = frozenset()
        self._left: frozenset[int] = frozenset()

    def dead(self) -> frozenset[int]:
        """Local. The ranks that are known to be dead."""
        # Counted before the copy: a death that is noted between the two is read again at the next call.
        known = len(WATCH.dead)
        if known != self._known:
            dead = WATCH.dead.copy()
            with self._lock:
                self._known = known
                self._dead |= {rank for rank, process in enumerate(self.processes) if process in dead}
        return self._dead

    def gone(self) -> frozenset[int]:
        """Local. The ranks that are dead, forgotten or without a window: nothing is sent to them or awaited."""
        others = self.forgotten | self._left
        return self.dead() | others if others else self.dead()

    def note(self, rank: int, error: BaseException | None = None) -> None:
        """Local. Note a death.

        Args:
            rank: The dead rank.
            error: The error of its connection; a host that sends nothing any more may be alive.
        """
        if rank not in self.dead():
            with self._lock:
                self._dead |= {rank}
            process, size = self.processes[rank], len(self.processes)
            name = f"rank {rank} of {size} (process {process.number} on {process.host})"
            is_silent = isinstance(error, OSError) and error.errno in _SILENCE
            WATCH.note(process, name + IS_SILENT * is_silent)

    def cut(self, rank: int, error: BaseException | None = None) -> None:
        """Local. Note that a connection has ended: a death, unless the kernel watches that rank's process.

        A rank on this host may have dropped its window, and be alive.

        Args:
            rank: The rank at its other end.
            error: The error of the connection.
        """
        if WATCH.watches(self.processes[rank]):
            self.leave(rank)
        else:
            self.note(rank, error)

    def add(self, rank: int, process: Process) -> None:
        """Local. Note a rank that joins.

        Args:
            rank: The rank that joins. Unknown ranks below it count as lost, until they are added, too.
            process: Its process.
        """
        with self._lock:
            first = len(self.processes)
            self.processes += [_UNKNOWN] * (rank + 1 - first)
            self.processes[rank] = process
            self._left = (self._left | {*range(first, rank)}) - {rank}
            # It may be among the dead already.
            self._known = -1

    def leave(self, rank: int) -> None:
        """Local. Note that a rank has ended its window; what it has sent before is still delivered."""
        with self._lock:
            self._left |= {rank}

    def forget(self, rank: int) -> None:
        """Local. Give a rank up."""
        self.forgotten |= {rank}

    def require_alive(self, rank: int) -> None:
        """Local. Raise DeadRankError if a rank is lost."""
        if rank in self.gone():
            process = self.processes[rank]
            is_silent = WATCH.dead.get(process, "").endswith(IS_SILENT)
            dead = "cannot be reached, since its host no longer responds" if is_silent else "is dead"
            why = dead if rank in self.dead() else "was declared lost" if rank in self.forgotten else "has left"
            raise DeadRankError(
                f"rank {rank} of {len(self.processes)} (process {process.number} on {process.host}) {why}: its "
                "heap is lost to this rank. Restore what it held from the last checkpoint"
            )
