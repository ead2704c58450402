"""Time limits of functions: only who really runs for too long is late, whoever is stopped meanwhile."""

from __future__ import annotations

import math
import random
from collections import deque
from dataclasses import dataclass, field

import pytest

from mpidist.parameter_server.protocol.messages import Define, Do, Ping, Send
from mpidist.parameter_server.queue.deadlines import LOADING, Deadlines
from mpidist.parameter_server.queue.worker_table import WorkerRecord
from tests.helpers.amounts import amount

CHIEF, SERVERS, WORKER = 0, (1, 2), 3
LIMIT, TICK = 1.0, 0.01
# The clock moves with rounds: it may be late by some of them.
LATE = 0.3


@dataclass
class Job:
    """A chief that looks whenever it is not stopped, servers that answer, and a worker that needs both.

    Attributes:
        stops: When and for how long a rank is stopped.
        needs: The seconds that the worker's functions run, one after the other. The last one is what it hangs in.
        now: The time.
        ran: For how long the current function has run; it waits while a server is stopped.
        given_up: How long the function had run when the worker was found late.
    """

    stops: list[tuple[int, float, float]]
    needs: deque[float]
    now: float = 0.0
    ran: float = 0.0
    given_up: float | None = None
    deadlines: Deadlines = field(default_factory=lambda: Deadlines(LIMIT))
    worker: WorkerRecord = field(default_factory=lambda: WorkerRecord(WORKER, running=[1]))
    _asked: list[tuple[int, int]] = field(default_factory=list)
    _answers: list[tuple[int, int]] = field(default_factory=list)
    _has_returned: bool = False

    def __post_init__(self) -> None:
        self.deadlines.begin(WORKER)

    def is_stopped(self, rank: int) -> bool:
        """Whether a rank does nothing now."""
        return any(one == rank and begin <= self.now < begin + seconds for one, begin, seconds in self.stops)

    def run(self, seconds: float) -> float | None:
        """Go on until the worker is given up; returns `given_up`."""
        end = self.now + seconds
        while self.now < end and self.given_up is None:
            self.now += TICK
            awake = [server for server in SERVERS if not self.is_stopped(server)]
            self._answers += [one for one in self._asked if one[0] in awake]
            self._asked = [one for one in self._asked if one[0] not in awake]
            if len(awake) == len(SERVERS) and not self._has_returned:
                self.ran += TICK
                self._has_returned = self.ran >= self.needs[0]
            if not self.is_stopped(CHIEF):
                self._look()
        return self.given_up

    def _look(self) -> None:
        for server, number in self._answers:
            self.deadlines.answered(server, number, self.now)
        self._answers.clear()
        if self._has_returned:
            self.needs.popleft()
            self._has_returned, self.ran = False, 0.0
            self.deadlines.begin(WORKER)
        for send in self.deadlines.look(self.now, SERVERS):
            assert isinstance(send.message, Ping)
            self._asked.append((send.rank, send.message.number))
        if self.deadlines.overdue({WORKER: self.worker}):
            self.given_up = self.ran


def hangs(*stops: tuple[int, float, float]) -> Job:
    """A worker that hangs in its first function."""
    return Job([*stops], deque([math.inf]))


def test_who_hangs_is_late_after_the_limit() -> None:
    found = hangs().run(10)
    assert found is not None
    assert LIMIT <= found <= LIMIT + LATE


@pytest.mark.parametrize("rank", [CHIEF, *SERVERS])
def test_a_stop_of_others_does_not_count(rank: int) -> None:
    job = Job([(rank, 0.2, 5.0)], deque([0.8] * 20))
    assert job.run(15) is None
    assert len(job.needs) < 15


def test_who_hangs_is_found_after_others_were_stopped() -> None:
    found = hangs((1, 0.2, 3.0), (CHIEF, 4.0, 3.0), (2, 8.0, 3.0)).run(30)
    assert found is not None
    assert found > LIMIT


@pytest.mark.parametrize("seed", range(amount(30, 2000)))
def test_random_stops(seed: int) -> None:
    chance = random.Random(seed)
    stops = [
        (chance.choice([CHIEF, *SERVERS]), chance.uniform(0, 20), chance.uniform(0.5, 5)) for _ in range(4)
    ]
    needs = [chance.uniform(0.01, 0.95) * LIMIT for _ in range(chance.randrange(60))]
    job = Job(stops, deque([*needs, math.inf]))
    found = job.run(200)
    assert len(job.needs) == 1, f"a function of {job.needs[0]} s was given up after {found} s"
    assert found is not None
    assert found > LIMIT


def test_loading_takes_longer_and_its_end_begins_the_time_anew() -> None:
    job = hangs()
    job.deadlines.begin(WORKER, is_loading=True)
    assert job.run(LIMIT * LOADING - LATE) is None
    job.deadlines.begin(WORKER)
    assert job.run(LIMIT - LATE) is None
    assert job.run(3 * LATE) is not None


def test_what_is_large_takes_its_time_to_arrive() -> None:
    job = hangs()
    job.deadlines.begin(WORKER, [
        Send(WORKER, Define("function", 1, bytes(20_000_000))), Send(WORKER, Do(1, 1, 0, 1, bytes(10_000_000))),
    ])
    assert job.run(LIMIT + 3 - LATE) is None
    assert job.run(3 * LATE) is not None


def test_who_makes_a_value_of_its_own_is_never_late() -> None:
    job = hangs()
    job.worker.building.append(1)
    assert job.run(20) is None


def test_an_answer_to_an_earlier_question_counts_for_nothing() -> None:
    deadlines = Deadlines(LIMIT)
    for now in (0.0, 1.0, 2.0):
        (number,) = {send.message.number for send in deadlines.look(now, SERVERS) if isinstance(send.message, Ping)}
        deadlines.answered(1, number, now)
        assert deadlines.look(now + 0.5, SERVERS) == []
        before = deadlines.seconds
        deadlines.answered(2, number - 1, now)
        assert deadlines.seconds == before
        deadlines.answered(2, number, now)
    assert deadlines.seconds > 0


def test_who_is_lost_is_forgotten() -> None:
    job = hangs()
    job.deadlines.forget(WORKER)
    job.worker.running.clear()
    assert job.run(3) is None
