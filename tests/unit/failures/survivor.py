"""A rank without MPI, with hooks, a watch and a clock of its own, for tests of how it ends."""

from __future__ import annotations

import atexit
import sys
from typing import Any

import pytest

from mpidist.failures import ending, farewell
from mpidist.failures.deaths import DeathWatch, this_process
from tests.unit.failures.settable_clock import Clock

HERE = this_process("here")
WORKER, OTHER_WORKER, SERVER = (HERE._replace(host="there", number=number) for number in (1, 2, 3))


class EndedError(BaseException):
    """Stands for the end of this process, or of the job: "alone", or "abort", and the code."""


class Rank:
    """Rank 1 of 3 with hooks and a watch of its own.

    Attributes:
        ends: The times at which a thread of ours has ended it.
        exits: The times at which exit functions have run.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock, self.watch = Clock(), DeathWatch()
        self.clock.put_into(monkeypatch, ending, farewell)
        for module in (ending, farewell):
            monkeypatch.setattr(module, "WATCH", self.watch)
        monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
        monkeypatch.setattr(ending, "_installed", [])
        monkeypatch.setattr(ending, "end_later", lambda _: None)
        self.watch.start(lambda: None, lambda _: ())
        self.exits: list[float] = []
        self.ends: list[float] = []
        monkeypatch.setattr(atexit, "_run_exitfuncs", lambda: self.exits.append(self.clock.now))
        functions = ending.MpiFunctions(self.abort, lambda: False, lambda: None, lambda _: [])
        self.hooks = ending._Ending(1, 3, "host", functions)
        monkeypatch.setattr(self.hooks, "end_process", self.end_alone)
        ending._installed.append(self.hooks)

    def abort(self, code: int) -> None:
        """End the job, as MPI does."""
        raise EndedError("abort", code)

    def end_alone(self, code: int, *, leaves_dead: bool = False) -> None:
        """End this process."""
        self.ends.append(self.clock.now)
        if not self.hooks.survivor_ends:
            raise EndedError("alone", code)

    def serve(self) -> None:
        """Be a rank that needs a server, and no worker."""
        ending.tolerate_deaths([SERVER])

    def hear(self, *dead: Any) -> None:
        """Hear of deaths, each in a thread that does what follows."""
        for one in dead:
            self.watch.note(one, f"process {one.number}")
            self.hooks.on_death()

    def fail(self, error: BaseException) -> None:
        """Raise an error that nobody catches."""
        self.hooks.on_exception(type(error), error, None)

    def end(self) -> tuple[object, ...]:
        """Come to the end of the program, and see how."""
        try:
            self.hooks.at_exit()
        except EndedError as error:
            return error.args
        return ("together",)
