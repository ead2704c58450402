"""The call log: a collective's calls are numbered, the last ones are kept, and some are compared between ranks."""

from __future__ import annotations

from collections import deque
from typing import NoReturn

from mpidist.arrays import AnyArray
from mpidist.comm.agreement import same_on_all
from mpidist.comm.arrival import Arrival
from mpidist.comm.communicator import Communicator
from mpidist.comm.deaths import WATCH
from mpidist.options import CommunicationOptions, ReduceOp

# Shapes and dtypes are compared in so many first calls, then at powers of two. All ranks must compare or none, so only
# something that all ranks share may decide it: the number of calls.
CHECKED_CALLS = 16
HINT = "Give `axis=0` to reduce a batch whose size differs between ranks, and make the same calls on all ranks."
_NEVER = 1 << 62


class CallLog:
    """The calls of a collective.

    Args:
        communicator: The ranks.
        options: `check` compares at every call, `timeout_seconds` limits the wait for late ranks.

    Attributes:
        recent: The last calls, newest last: number, name, detail (operation or root), bytes of this rank's array.
    """

    def __init__(self, communicator: Communicator, options: CommunicationOptions) -> None:
        self.recent: deque[tuple[int, str, ReduceOp | int | None, int]] = deque(maxlen=64)
        self._communicator = communicator
        self._checks = options.check
        self._arrival: Arrival | _Closed | None = (
            Arrival(communicator, options.timeout_seconds) if options.timeout_seconds else None
        )
        self._count = 0
        self._next_comparison = 0 if communicator.size > 1 else _NEVER

    def enter(self, call: str, detail: ReduceOp | int, array: AnyArray) -> None:
        """Collective. Note a call, and in some calls compare it between the ranks.

        Raises:
            MismatchError: The ranks' calls differ; on every rank.
            CollectiveTimeoutError: A rank has not come in time.
        """
        self._count = count = self._count + 1
        self.recent.append((count, call, detail, array.nbytes))
        # A call of MPI in a group that has lost a rank may never return.
        if WATCH.dead:
            self._communicator.require_whole(call)
        if self._arrival is not None:
            self._arrival.wait(call)
        if count >= self._next_comparison:
            same_on_all(
                self._communicator, "the collective call, its shape and dtype",
                (f"{call} {detail.name if isinstance(detail, ReduceOp) else detail}", array.shape, array.dtype.name),
                HINT,
            )
            self._next_comparison = count + 1 if self._checks or count < CHECKED_CALLS else 1 << count.bit_length()

    def note(self, call: str, detail: ReduceOp | int | None, array: AnyArray) -> None:
        """Collective. Note a call that does its own comparison."""
        self._count += 1
        self.recent.append((self._count, call, detail, array.nbytes))
        self.wait(call)

    def wait(self, call: str) -> None:
        """Collective. Wait for late ranks if the options limit that time.

        Raises:
            DeadRankError: A rank has died.
            CollectiveTimeoutError: A rank has not come in time.
        """
        if WATCH.dead:
            self._communicator.require_whole(call)
        if self._arrival is not None:
            self._arrival.wait(call)

    def refuse_calls(self) -> None:
        """Local. From now on every call raises RuntimeError: the collective is closed."""
        self._arrival = _Closed()

    def is_broken(self) -> bool:
        """Local. Whether ranks no longer meet, since one of them came too late."""
        return isinstance(self._arrival, Arrival) and self._arrival.is_broken

    def compares_soon(self) -> bool:
        """Local. Whether one of the next 16 calls will compare shapes and dtypes; the same on every rank."""
        return self._next_comparison - self._count <= CHECKED_CALLS


class _Closed:
    """Stands where ranks meet before a call, in a collective that is closed."""

    def wait(self, call: str) -> NoReturn:
        raise RuntimeError(
            f"{call}: this collective is closed, or its strategy is. Call it before `close()`, or make a new strategy"
        )
