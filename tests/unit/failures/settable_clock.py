"""A clock that tests set: time passes where the code under test sleeps, and things happen at their times."""

from __future__ import annotations

import types
from collections.abc import Callable

import pytest


class Clock:
    """A clock in place of the module `time` of some modules, for code that runs in one thread.

    Attributes:
        now: The time.
        slept: The seconds of each sleep so far.
    """

    def __init__(self) -> None:
        self.now = 1000.0
        self.slept: list[float] = []
        self._plans: list[tuple[float, Callable[[], object]]] = []

    def put_into(self, monkeypatch: pytest.MonkeyPatch, *modules: types.ModuleType) -> None:
        """Let these modules read this clock, and sleep by it."""
        for module in modules:
            monkeypatch.setattr(module, "time", types.SimpleNamespace(monotonic=self.monotonic, sleep=self.sleep))

    def monotonic(self) -> float:
        return self.now

    def after(self, seconds: float, action: Callable[[], object]) -> None:
        """Do something in so many seconds, in the middle of a sleep or a step."""
        self._plans.append((self.now + seconds, action))

    def sleep(self, seconds: float) -> None:
        """Let time pass; an action that sleeps itself may make it more."""
        self.slept.append(seconds)
        assert len(self.slept) < 100_000, "the code under test waits for ever"
        end = self.now + seconds
        while self._plans and (plan := min(self._plans, key=lambda one: one[0]))[0] <= end:
            self._plans.remove(plan)
            self.now = max(self.now, plan[0])
            plan[1]()
        self.now = max(self.now, end)

    def run(self) -> None:
        """Let time pass until nothing is planned any more."""
        while self._plans:
            self.sleep(max(0.0, min(plan[0] for plan in self._plans) - self.now))
