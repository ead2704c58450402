"""Clocks of tests: code that takes its clock as an argument sees the times that a test wants, under any load."""

from __future__ import annotations


class SetClock:
    """A clock that stands still until the test sets it forward.

    Attributes:
        now: The seconds that it shows.
    """

    def __init__(self, now: float = 1e6) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def forward(self, seconds: float) -> None:
        """Let seconds pass."""
        self.now += seconds
