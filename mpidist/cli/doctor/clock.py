"""The clock of a measurement: all ranks stop together."""

from __future__ import annotations

import time

from mpidist.comm.group.communicator import Communicator


class SharedClock:
    """Rank 0's clock, by which all ranks go on, or stop together.

    Local. Args:
        communicator: The ranks.
        seconds: From now on.
    """

    def __init__(self, communicator: Communicator, seconds: float) -> None:
        self._communicator = communicator
        self.end = time.monotonic() + seconds

    def allows(self, seconds: float, until: float | None = None) -> bool:
        """Collective. Whether rank 0 has time for so many seconds more, before its end, or an earlier one."""
        end = self.end if until is None else min(until, self.end)
        return self._communicator.broadcast_object(time.monotonic() + seconds <= end)

    def share(self, parts: int) -> float:
        """Local. The end of the first of so many equal parts of the time that is left."""
        now = time.monotonic()
        return now + max(0.0, self.end - now) / parts
