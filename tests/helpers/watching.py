"""Ranks whose watchdogs look when a test turns their clock: all of them in one process, without MPI.

Each watchdog has a thread, which runs only when the world hands it on, and until it sleeps: by the test's clock. One
runs at a time, in an order that is always the same, and no test waits.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterable
from typing import Protocol

import pytest

from mpidist.failures import deadlocks
from mpidist.failures.peers import Key, Peer
from mpidist.failures.watchdog import Watchdog
from mpidist.recorder.calls import Calls
from mpidist.recorder.rank_page import PAGE_BYTES, Page
from mpidist.recorder.recorder import Recorder
from mpidist.recorder.time_limits import TICK_SECONDS, Clock

IDENTITY = 77


class TurnedClock(Clock):
    """A clock that stands until it is turned."""

    def __init__(self) -> None:
        # Some time after the start of the host, which is 0.
        self.time = 1000 * 10**9
        self.pass_time: Callable[[float], None] = self.turn

    def ns(self) -> int:
        """The time."""
        return self.time

    def cpu(self) -> float:
        """The time of the core, which is the test's: a look costs nothing."""
        return 0.0

    def turn(self, seconds: float) -> None:
        """Let time pass."""
        self.time += round(seconds * 1e9)

    def sleep(self, seconds: float) -> None:
        """Let others do what they do in this time."""
        self.pass_time(seconds)


class GoneError(Exception):
    """Stands for the end of a rank's process."""


class Rank:
    """A rank of the test's process: what it shows, and its watchdog.

    Args:
        world: Where it is.
        order: Its rank.
        number: Of its process; the test's, which is alive, by default.
        ends: Whether its watchdog may end the job.
    """

    def __init__(self, world: World, order: int, number: int, *, ends: bool) -> None:
        self.world, self.order = world, order
        self.page = Page(memoryview(bytearray(PAGE_BYTES)))
        self.recorder = Recorder()
        self.recorder.show(self.page.places)
        # Their processes are one; a key is a rank's own.
        self.key = Key("n0", number, f"pid:[{order}]")
        self.left: list[int] = []
        self.watchdog = Watchdog(world.clock, self.recorder, self._leave)
        self.name = f"rank {order} of {world.size}"
        self.peer = Peer(self.key, self.name, order, self.page, "", world.clock)
        self.dead: list[Key] = []
        self.ticks = 0
        self.is_stopped = False
        self.due = world.clock.now() + TICK_SECONDS
        self._baton = threading.Semaphore(0)
        self.thread: threading.Thread | None = None
        self.has_ended = False
        self.error: BaseException | None = None
        self.watchdog.look_after(self.key, self.name, order, self.page)
        if ends:
            self.let_end()

    def let_end(self, differing: deadlocks.Differing = deadlocks.unknown) -> None:
        """Let its watchdog end the job; `differing` as of `Watchdog.end_by`."""
        self.watchdog.end_by(
            self._end, lambda: self.world.is_over, lambda key, _: self.dead.append(key), differing
        )

    def _end(self) -> None:
        self.world.ended_by.append(self.order)
        raise GoneError

    def _leave(self, code: int) -> None:
        self.left.append(code)
        if self.thread is threading.current_thread():
            raise GoneError

    def open(self, members: Iterable[Rank], identity: int = IDENTITY) -> Calls:
        """Its calls on a communicator of some ranks."""
        ranks = list(members)
        return self.recorder.open(identity, [one.key for one in ranks], ranks.index(self))

    def go_on(self) -> None:
        """Let its watchdog work until it sleeps."""
        if self.thread is None:
            self.thread = threading.Thread(target=self._work, name=self.name)
            self.thread.start()
        self._baton.release()
        self.world.baton.acquire()
        if self.error is not None:
            raise self.error

    def sleep(self, seconds: float) -> None:
        """Hand on; called in its thread."""
        self.due = self.world.clock.now() + seconds
        self.world.baton.release()
        self._baton.acquire()
        if self.world.is_closed:
            raise GoneError

    def _work(self) -> None:
        self._baton.acquire()
        try:
            while not self.world.is_closed:
                self.ticks += 1
                self.watchdog.tick(self.page)
                self.sleep(TICK_SECONDS)
        except GoneError:
            pass
        except BaseException as error:
            self.error = error
        # Not `is_alive`: the thread lives a moment longer than its last release, and nobody would release after it.
        self.has_ended = True
        self.world.baton.release()


class World:
    """Ranks of one node, which know each other.

    Args:
        monkeypatch: Takes their words.
        size: Their number.
        ends: Whether watchdogs may end the job.
        numbers: Of processes, by rank.

    Attributes:
        said: What they have said, and when, in seconds since the beginning.
        ended_by: The ranks that have ended the job.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, size: int, *, ends: bool = True, numbers: dict[int, int] | None = None
    ) -> None:
        self.clock, self.size = TurnedClock(), size
        self.clock.pass_time = self._sleep
        self.baton = threading.Semaphore(0)
        self.is_closed = False
        self.begin = self.clock.now()
        self.said: list[tuple[float, str]] = []
        self.ended_by: list[int] = []
        self.ranks = [
            Rank(self, order, (numbers or {}).get(order, os.getpid()), ends=ends) for order in range(size)
        ]
        for one in self.ranks:
            one.watchdog.meet([other.peer for other in self.ranks if other is not one])
        self.calls = [one.open(self.ranks) for one in self.ranks]
        monkeypatch.setattr("mpidist.failures.watchdog.say", self._say)

    def _say(self, text: str) -> None:
        self.said.append((self.clock.now() - self.begin, text))

    @property
    def is_over(self) -> bool:
        """Whether a watchdog has ended the job."""
        return bool(self.ended_by)

    @property
    def first_lines(self) -> list[str]:
        """The first line of each report."""
        return [text.split("\n")[0] for _, text in self.said]

    @property
    def times(self) -> list[float]:
        """When reports came, in seconds since the first look."""
        return [round(time - TICK_SECONDS, 3) for time, _ in self.said]

    def run(self, seconds: float) -> None:
        """Let time pass: each watchdog works when it is its time, unless its rank is stopped."""
        end = self.clock.now() + seconds
        while not self.is_over:
            moving = [one for one in self.ranks if not one.is_stopped and not one.left]
            due = min((one.due for one in moving), default=math.inf)
            if due > end:
                break
            self.clock.turn(max(0.0, due - self.clock.now()))
            next(one for one in moving if one.due == due).go_on()
        self.clock.turn(max(0.0, end - self.clock.now()))

    def _sleep(self, seconds: float) -> None:
        for one in self.ranks:
            if one.thread is threading.current_thread():
                one.sleep(seconds)
                return
        self.run(seconds)

    def close(self) -> None:
        """End the threads."""
        self.is_closed = True
        for one in self.ranks:
            if one.thread is not None:
                if not one.has_ended:
                    one.go_on()
                one.thread.join()
            one.watchdog.stop()

    def stop(self, order: int) -> None:
        """Let a rank stand still, as by SIGSTOP."""
        self.ranks[order].is_stopped = True

    def go_on(self, order: int) -> None:
        """Let a rank go on that stood still."""
        self.ranks[order].is_stopped = False
        self.ranks[order].due = max(self.ranks[order].due, self.clock.now())

    def enter(self, name: str, *orders: int) -> None:
        """Let ranks come to a call."""
        for order in orders:
            self.calls[order].enter(name)

    def leave(self, *orders: int) -> None:
        """Let ranks come out of their call."""
        for order in orders:
            self.calls[order].leave()


class MakeWorld(Protocol):
    """Makes a world, with arguments as of `World`."""

    def __call__(self, size: int = 2, *, ends: bool = True, numbers: dict[int, int] | None = None) -> World:
        """Make one."""
        ...
