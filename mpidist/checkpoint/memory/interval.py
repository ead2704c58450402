"""The number of steps between two copies in memory, which cost at most a hundredth of the time; pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

# The part of the time that copies may take.
SHARE = 0.01
# Steps that are timed before the first copy; the ones before them compile, or wait for data.
_TIMED = 2


@dataclass
class CopyInterval:
    """The number of steps between two copies, the same on every rank.

    Attributes:
        given: The number that the program has given; None: it is chosen.
        next: The step at which the next copy is due; None before the first step.
        begun: The step from which the time of a step is measured.
        began: The time of that, in seconds.
    """

    given: int | None
    next: int | None = None
    begun: int = 0
    began: float = 0.0

    def is_due(self, step: int, now: float) -> bool:
        """Local. Whether a copy is due, by what all ranks know.

        Args:
            step: The step, the same on every rank.
            now: A monotonic time, in seconds, of this rank alone; it decides nothing here.
        """
        if self.next is None or step < self.begun:
            self.begin(step, now, self.given or _TIMED)
            return False
        return step >= self.next

    def begin(self, step: int, now: float, count: int) -> None:
        """Local. Count from a step, at which the state was copied, saved or restored.

        Args:
            step: The step.
            now: See `is_due`.
            count: The number of steps to the next copy, the same on every rank.
        """
        self.begun, self.began, self.next = step, now, step + count

    def choose(self, step: int, now: float, cost: float) -> int:
        """Local. The number of steps to the next copy, by the times of this rank.

        Args:
            step: The step at which a copy is made.
            now: The time at which it began.
            cost: The seconds that it has taken.
        """
        if self.given is not None:
            return self.given
        seconds = (now - self.began) / max(1, step - self.begun)
        return max(1, math.ceil(cost / (SHARE * max(seconds, 1e-9))))
