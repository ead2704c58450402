"""The calls of a collective: numbered, kept for a look back, and compared between the ranks now and then."""

from __future__ import annotations

from collections import deque

from mpidist.arrays import AnyArray
from mpidist.comm.agreement import same_on_all
from mpidist.comm.arrival import Arrival
from mpidist.comm.communicator import Communicator
from mpidist.options import CommunicationOptions, ReduceOp

# Shapes and dtypes are compared in so many first calls, then at powers of two: whether a check runs may depend only
# on what all ranks share, and the number of calls is that.
CHECKED_CALLS = 16
HINT = "Give `axis=0` to reduce a batch whose size differs between ranks, and make the same calls on all ranks."
_NEVER = 1 << 62


class CallLog:
    """What a collective was asked for.

    Args:
        communicator: The ranks.
        options: `check` compares at every call, `timeout_seconds` waits no longer than that for the others.

    Attributes:
        recent: The last calls, newest last: number, call, detail (operation or root), bytes of this rank's array.
    """

    def __init__(self, communicator: Communicator, options: CommunicationOptions) -> None:
        self.recent: deque[tuple[int, str, ReduceOp | int | None, int]] = deque(maxlen=64)
        self._communicator = communicator
        self._checks = options.check
        self._arrival = Arrival(communicator, options.timeout_seconds) if options.timeout_seconds else None
        self._count = 0
        self._next_comparison = 0 if communicator.size > 1 else _NEVER

    def enter(self, call: str, detail: ReduceOp | int, array: AnyArray) -> None:
        """Collective. Note a call, and compare, now and then, what the ranks are about to do.

        Raises:
            MismatchError: It differs, on every rank.
            CollectiveTimeoutError: A rank has not come in time.
        """
        self._count = count = self._count + 1
        self.recent.append((count, call, detail, array.nbytes))
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
        """Collective. Note a call that compares by itself."""
        self._count += 1
        self.recent.append((self._count, call, detail, array.nbytes))
        self.wait(call)

    def wait(self, call: str) -> None:
        """Collective. Wait for late ranks, if the user limits that time.

        Raises:
            CollectiveTimeoutError: A rank has not come in time.
        """
        if self._arrival is not None:
            self._arrival.wait(call)

    def compares_soon(self) -> bool:
        """Local. Whether one of the next 16 calls compares shapes and dtypes; the same on every rank."""
        return self._next_comparison - self._count <= CHECKED_CALLS
