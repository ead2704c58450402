"""The deadline of a job: when its last checkpoint must be saved, by the lengths of its steps. Time is an argument."""

from __future__ import annotations

from collections import deque

from mpidist.checkpoint.preemption.termination import GRACE_IS_OVER, TIME_IS_UP

# Training continues in the grace period while there is time for this many steps, as in tf.distribute.
_GRACE_STEPS = 6
# Time reserved before the end of the job, in longest steps: one passes until all ranks have the notice.
_STEPS_BEFORE_END = 2
# The last steps, whose times are kept.
_KEPT_STEPS = 1000


class Deadline:
    """The end of a job and of its grace period, and the lengths of the steps that are still to come before it.

    All times are seconds of one clock.

    Args:
        ends_at: The time at which the job ends; None if it is unknown.
    """

    def __init__(self, ends_at: float | None) -> None:
        self._ends_at = ends_at
        # Once there is a grace period.
        self._grace_ends: float | None = None
        self._called_at: float | None = None
        self._gaps: deque[float] = deque(maxlen=_KEPT_STEPS)

    def note_call(self, now: float) -> None:
        """Local. Note that a step begins.

        Args:
            now: The time.
        """
        if self._called_at is not None:
            self._gaps.append(now - self._called_at)
        self._called_at = now

    @property
    def longest_step(self) -> float:
        """Local. The seconds of the longest step so far; 0 before the second one."""
        return max(self._gaps, default=0.0)

    def begin_grace(self, known_at: float, seconds: float) -> None:
        """Local. Begin the grace period.

        Args:
            known_at: The time at which the end of the job was known first on any rank.
            seconds: The length of the period from then on.
        """
        self._grace_ends = known_at + seconds

    @property
    def in_grace(self) -> bool:
        """Local. Whether there is a grace period, which may be over."""
        return self._grace_ends is not None

    def reason(self, now: float, save: float) -> int:
        """Local. The reason to save the last checkpoint now: TIME_IS_UP or GRACE_IS_OVER; 0 if there is time.

        Args:
            now: The time.
            save: The seconds to leave for the save.
        """
        if self._ends_at is not None:
            steps = _STEPS_BEFORE_END * self.longest_step
            if now + steps + save >= self._ends_at:
                return TIME_IS_UP
        if self._grace_ends is not None:
            steps = _GRACE_STEPS * (sum(self._gaps) / max(1, len(self._gaps)))
            if now + steps + save >= self._grace_ends:
                return GRACE_IS_OVER
        return 0
