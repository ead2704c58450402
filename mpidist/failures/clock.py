"""The clock by which ranks look after each other; tests have one that they turn themselves."""

from __future__ import annotations

import time


class Clock:
    """The monotonic clock of this host, which all its processes share."""

    def ns(self) -> int:
        """Local. The time in nanoseconds."""
        return time.monotonic_ns()

    def now(self) -> float:
        """Local. The time in seconds."""
        return self.ns() / 1e9

    def sleep(self, seconds: float) -> None:
        """Local. Wait."""
        time.sleep(seconds)


CLOCK = Clock()
