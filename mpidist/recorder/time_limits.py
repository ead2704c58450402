"""Time limits: the time that a rank waits for others before a report, and before the end of the job; the clock."""

from __future__ import annotations

import math
import os
import time

from mpidist import launch

WARN_VARIABLE = "MPIDIST_WARN_SECONDS"
LIMIT_VARIABLE = "MPIDIST_TIMEOUT"
_WARN_SECONDS = 30.0
# Ranks per core up to which watchdogs look twice a second. A look takes up to 0.6 ms of a core, since the other ranks
# have replaced what the caches held: with 256 ranks on two cores, starting MPI took twice as long as without looks.
_RANKS_PER_CORE = 16


def _tick_seconds() -> float:
    """The pause after which a host's watchdogs together look no more often than with `_RANKS_PER_CORE`."""
    ranks_per_core = (launch.node_size() or 1) / (os.cpu_count() or 1)
    return 0.5 * max(1.0, ranks_per_core / _RANKS_PER_CORE)


# Seconds between two looks of a watchdog.
TICK_SECONDS = _tick_seconds()
# The time limit for a rank that is asked for its stack.
ANSWER_SECONDS = 2 * TICK_SECONDS


class Clock:
    """The monotonic clock of this host, which all its processes share. Tests have one that they set."""

    def ns(self) -> int:
        """Local. The time in nanoseconds."""
        return time.monotonic_ns()

    def now(self) -> float:
        """Local. The time in seconds."""
        return self.ns() / 1e9

    def sleep(self, seconds: float) -> None:
        """Local. Wait."""
        time.sleep(seconds)

    def cpu(self) -> float:
        """Local. The seconds that a core has worked for this thread."""
        return time.thread_time()


CLOCK = Clock()


def warn_seconds() -> float:
    """Local. The time after which a wait is reported.

    Raises:
        ValueError: The variable of the environment is not a number.
    """
    return _seconds(WARN_VARIABLE, _WARN_SECONDS)


def limit_seconds() -> float:
    """Local. The time after which a wait ends the job; 0: never.

    Raises:
        ValueError: The variable of the environment is not a number.
    """
    # 0 is no limit, and any wait is longer than a negative one.
    return _seconds(LIMIT_VARIABLE, 0.0, least=0.0)


def _seconds(variable: str, default: float, least: float = -math.inf) -> float:
    text = os.environ.get(variable)
    try:
        seconds = float(text) if text else default
        # A NaN is no limit, either.
        if not seconds >= least:
            raise ValueError
        return seconds
    except ValueError:
        raise ValueError(f"{variable} must be a number of seconds, got {text!r}: set for instance 60") from None
