"""The budget of looks: the time that a host spends on checks of other ranks must not grow with their number.

All ranks of a host often wait at once. If each of n ranks checked the n others, a host would make n times n checks, on
the cores that the job needs. So one rank checks for many (`leaders.py`, `startup/looker.py`), and no rank repeats a
look before a hundred times its duration has passed: it takes 1 % of a core.
"""

from __future__ import annotations

import math

from mpidist.recorder.time_limits import CLOCK, Clock

# A job of fewer ranks needs no budget: all their looks cost less than 1 %.
FEW = 8
# The pause after a look, as a multiple of its duration.
_PAUSES = 100
# The approximate duration of a look at one rank.
_SECONDS_OF_ONE = 1e-5


class Budget:
    """The budget of one kind of looks of this process.

    Args:
        clock: The clock for the times of looks.
    """

    def __init__(self, clock: Clock = CLOCK) -> None:
        self._clock = clock
        self._cost = self._begun = 0.0
        self._last = -math.inf

    def begin(self) -> None:
        """Local. Begin a look."""
        self._begun = self._clock.cpu()

    def end(self) -> None:
        """Local. End the look, and note its duration."""
        self._cost, self._last = self._clock.cpu() - self._begun, self._clock.now()

    def pause(self, sharers: int = 1) -> float:
        """Local. The seconds from one look to the next.

        Args:
            sharers: Number of ranks of this host that make the same looks and share the budget. If there are several,
                each of them looks at that many ranks: the cost is at least that estimate, also before the first look.
        """
        cost = self._cost if sharers == 1 else max(self._cost, _SECONDS_OF_ONE * sharers)
        return _PAUSES * cost * sharers

    def is_free(self, sharers: int = 1, *, after: float = 0.0) -> bool:
        """Local. Whether the pause after the last look has passed.

        Args:
            sharers: See `pause`.
            after: The shortest pause in seconds.
        """
        now = self._clock.now()
        if sharers > 1 and self._last == -math.inf:
            # Not all ranks look at once.
            self._last = now
        return now - self._last >= max(after, self.pause(sharers))
