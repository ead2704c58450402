"""The budget of looks: what a host spends on looks at other ranks must not grow with their number.

All ranks of a host often wait at once. If each of n looked at the n others, a host would look n times n times, on the
cores that the job needs. So one rank looks for many (`leaders.py`, `startup/looker.py`), and nobody repeats a look
before a hundred times the time that it took has passed: 1 % of a core.
"""

from __future__ import annotations

import math

from mpidist.recorder.time_limits import CLOCK, Clock

# In a job of so few ranks each one looks as often as it likes: that costs less than 1 %.
FEW = 8
# So many times the time that a look took is the pause after it.
_PAUSES = 100
# A look at one rank takes about so long.
_SECONDS_OF_ONE = 1e-5


class Budget:
    """The budget of one kind of looks of this process.

    Args:
        clock: By which it looks.
    """

    def __init__(self, clock: Clock = CLOCK) -> None:
        self._clock = clock
        self._cost = self._begun = 0.0
        self._last = -math.inf

    def begin(self) -> None:
        """Local. Begin a look."""
        self._begun = self._clock.cpu()

    def end(self) -> None:
        """Local. End the look, and note what it has cost."""
        self._cost, self._last = self._clock.cpu() - self._begun, self._clock.now()

    def pause(self, sharers: int = 1) -> float:
        """Local. The seconds from one look to the next.

        Args:
            sharers: The number of ranks of this host that look like this one, and share the budget with it. Not 1:
                each of them looks at as many, and who has not looked yet knows so what it would cost.
        """
        cost = self._cost if sharers == 1 else max(self._cost, _SECONDS_OF_ONE * sharers)
        return _PAUSES * cost * sharers

    def is_free(self, sharers: int = 1, *, after: float = 0.0) -> bool:
        """Local. Whether the pause after the last look is over.

        Args:
            sharers: See `pause`.
            after: The pause lasts so many seconds at least.
        """
        now = self._clock.now()
        if sharers > 1 and self._last == -math.inf:
            # Not all of them at once.
            self._last = now
        return now - self._last >= max(after, self.pause(sharers))
