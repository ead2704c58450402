"""Time limits of functions, explored: the product's `Closures` with all moments at which a rank is stopped for a while.

A coordinator has two workers and two servers. Workers load a function, say so, run it, and wait meanwhile for a server
that is stopped; the last function of the program never returns. Time goes in ticks. At each tick nobody is stopped, or
a server, a worker, or the coordinator, which may have read its messages just before. Messages to workers take time.
`STALL_MUTANTS` break a rule each.

Rules:

    late       a worker is given up only if it was stopped itself, or has run a function for longer than the limit, or
               has loaded one for longer than it may; stops of others do not count
    found      who hangs is given up
    done       what does not hang has its result
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from mpidist.parameter_server.protocol.messages import Began, Do, Failed, Finished, Message, Ping, Pong, Send
from mpidist.parameter_server.queue.closures import Action, Closures
from mpidist.parameter_server.queue.commits import Commits
from mpidist.parameter_server.queue.deadlines import LOADING, Deadlines
from mpidist.parameter_server.queue.work import ClosureEnd, End, Name, Rules, Work
from mpidist.parameter_server.queue.worker_table import WorkerRecord
from tests.model.parties import BrokenError, rate
from tests.model.ways import go_all_ways

CHIEF, SERVERS, WORKERS = 0, (1, 2), (3, 4)
LIMIT, TICK = 1.0, 0.1
# The clock may be late by some rounds, and so is who is found.
_LATE_TICKS = 8
_LIMIT_TICKS = round(LIMIT / TICK)
_HANGS = 10_000


class StallJob(NamedTuple):
    """The job that is explored.

    Attributes:
        runs: For how many ticks each function runs; one that hangs comes after them.
        loads: For how many ticks each is loaded before.
        travels: For how many ticks a function is on its way to a worker.
        stops: So many times somebody is stopped.
        length: For so many ticks.
        every: Somebody may be stopped at each so-manieth tick.
        prefetch: As of `Closures`.
        reads: How many messages the coordinator reads in a tick.
        judges_unread: It looks who is late though it has not read all messages.
        closures: The class of the coordinator's machine.
        deadlines: The class of its clock.
    """

    runs: tuple[int, ...] = (8, 8, 8)
    loads: int = 0
    travels: int = 0
    stops: int = 1
    length: int = 17
    every: int = 1
    prefetch: bool = False
    reads: int = 9
    judges_unread: bool = False
    closures: type[Closures] = Closures
    deadlines: type[Deadlines] = Deadlines


@dataclass
class _Worker:
    """A worker: what is on its way to it, and what it does.

    Attributes:
        came: When messages reach it, and they.
        do: What it runs.
        loaded, ran: For so many ticks.
        was_stopped: Since it has begun with that, or since that is on its way.
        is_lost: Whether it was given up.
    """

    came: deque[tuple[int, Do]] = field(default_factory=deque)
    do: Do | None = None
    loaded: int = 0
    ran: int = 0
    was_stopped: bool = False
    is_lost: bool = False


class _Walk:
    """One way through a job; arguments as of `tests.model.ahead`."""

    def __init__(self, job: StallJob, choices: list[int]) -> None:
        self.job, self.choices = job, choices
        self.counts: list[int] = []
        self.tick, self.left = 0, job.stops
        # Until which tick a rank is stopped.
        self.stopped: dict[int, int] = {}
        self.workers = {rank: _Worker() for rank in WORKERS}
        self.asked: list[tuple[int, int]] = []
        self.inbox: deque[tuple[int, Message]] = deque()
        self.needs: dict[int, int] = {}
        self.ends: dict[int, End] = {}
        self.is_between = self.has_stopped_worker = False
        self.closures = job.closures(Commits(CHIEF, SERVERS, rate), timeout=LIMIT, prefetch=job.prefetch)
        self.closures._deadlines = job.deadlines(LIMIT)
        for rank in WORKERS:
            self._act(self.closures.joined(rank, 0.0))

    @property
    def now(self) -> float:
        return self.tick * TICK

    def go(self) -> None:
        """Go to the end.

        Raises:
            BrokenError: A rule does not hold.
        """
        for number, need in enumerate((*self.job.runs, _HANGS), 1):
            self.needs[number] = need
            work = Work(Name("function", 1, b"f"), b"")
            _, actions = self.closures.schedule(work, Rules(max_deaths=1, on_error="keep"), self.now)
            self._act(actions)
        hanging = len(self.needs)
        while not self.closures.is_done and self.closures.workers:
            self.tick += 1
            self._stop_somebody()
            self._serve()
            for rank, worker in self.workers.items():
                self._work(rank, worker)
            self._coordinate()
            # While somebody is stopped nobody may look.
            most = _LIMIT_TICKS + _LATE_TICKS + self.job.stops * self.job.length
            if any(one.do and one.do.closure == hanging and one.ran > most for one in self.workers.values()):
                raise BrokenError(f"found: a worker hangs, and at {self.now:.1f} nobody has found it")
            if self.tick > 400:
                raise BrokenError(f"done: closures {sorted(self.needs.keys() - self.ends.keys())} have not ended")
        lacking = {number for number in self.needs if self.ends.get(number) is not End.RESULT} - {hanging}
        if lacking and not self.has_stopped_worker:
            raise BrokenError(f"done: closures {sorted(lacking)} have no result")

    def _stop_somebody(self) -> None:
        self.stopped = {rank: end for rank, end in self.stopped.items() if end > self.tick}
        if self.left and not self.tick % self.job.every:
            can: list[int | None] = [None, CHIEF, SERVERS[0], WORKERS[0]]
            if not self.is_between:
                can.append(-1)
            place = len(self.counts)
            self.counts.append(len(can))
            chosen = can[self.choices[place] if place < len(self.choices) else 0]
            if chosen is None:
                return
            self.left -= 1
            if chosen == -1:
                # The coordinator has read its messages when it is stopped, and goes on with what it knows.
                self._read()
                self.is_between, chosen = True, CHIEF
            self.stopped[chosen] = self.tick + self.job.length
            if chosen in self.workers:
                self.workers[chosen].was_stopped = self.has_stopped_worker = True

    def _serve(self) -> None:
        self.inbox += [(server, Pong(number)) for server, number in self.asked if server not in self.stopped]
        self.asked = [one for one in self.asked if one[0] in self.stopped]

    def _work(self, rank: int, worker: _Worker) -> None:
        if rank in self.stopped or worker.is_lost:
            return
        if worker.do is None:
            if not worker.came or worker.came[0][0] > self.tick:
                return
            worker.do = worker.came.popleft()[1]
            worker.loaded = worker.ran = 0
            self._say(rank, worker.do, is_loaded=False)
        elif worker.loaded < self.job.loads:
            worker.loaded += 1
        elif SERVERS[0] not in self.stopped and SERVERS[1] not in self.stopped:
            worker.ran += 1
        if worker.loaded == self.job.loads and not worker.ran:
            self._say(rank, worker.do, is_loaded=True)
        if worker.ran >= self.needs[worker.do.closure]:
            self.inbox.append((rank, Finished(worker.do.closure, worker.do.attempt, (), (), b"")))
            worker.do, worker.was_stopped = None, False

    def _say(self, rank: int, do: Do, *, is_loaded: bool) -> None:
        self.inbox.append((rank, Began(do.closure, do.attempt, is_loaded)))

    def _coordinate(self) -> None:
        if CHIEF in self.stopped:
            return
        if not self.is_between:
            self._read()
        has_read_all = self.is_between or not self.inbox
        self.is_between = False
        self._act(self.closures.look(self.now))
        for rank in self.closures.overdue() if has_read_all or self.job.judges_unread else ():
            self._give_up(rank)

    def _read(self) -> None:
        for _ in range(min(self.job.reads, len(self.inbox))):
            sender, message = self.inbox.popleft()
            actions = self.closures.take(sender, message, self.now)
            assert actions is not None
            self._act(actions)

    def _give_up(self, rank: int) -> None:
        worker = self.workers[rank]
        is_late = (worker.do is not None and worker.ran > _LIMIT_TICKS) or worker.loaded > _LIMIT_TICKS * LOADING
        if not (is_late or worker.was_stopped):
            raise BrokenError(
                f"late: at {self.now:.1f} worker {rank} is given up, which has loaded for {worker.loaded} ticks and "
                f"run {worker.do} for {worker.ran}"
            )
        worker.is_lost, worker.do = True, None
        self._act(self.closures.lost(rank, self.now))

    def _act(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, ClosureEnd):
                self.ends[action.closure] = action.end
            elif isinstance(action, Send) and isinstance(action.message, Ping):
                self.asked.append((action.rank, action.message.number))
            elif isinstance(action, Send) and isinstance(action.message, Do):
                self.workers[action.rank].came.append((self.tick + self.job.travels, action.message))


def explore_stalls(job: StallJob) -> tuple[str, int]:
    """Go all ways through a job; returns as `go_all_ways`."""
    return go_all_ways(lambda choices: _Walk(job, choices))


class CountsStops(Deadlines):
    """Counts a round for as long as it took."""

    def answered(self, server: int, number: int, now: float) -> None:
        before = self._answered if self._answered is not None else now
        counted = self.seconds
        super().answered(server, number, now)
        if self.seconds > counted:
            self.seconds = counted + now - before


class AsksOneServer(Deadlines):
    """Begins the next round when one server has answered."""

    def look(self, now: float, servers: Sequence[int]) -> list[Send]:
        return super().look(now, servers[1:])


class LoadsInTime(Deadlines):
    """Gives no more time to load a function than to run it."""

    def begin(self, rank: int, sends: Sequence[Send] = (), *, is_loading: bool = False) -> None:
        super().begin(rank, sends)


class FindsNobody(Deadlines):
    """Finds nobody late."""

    def overdue(self, workers: Mapping[int, WorkerRecord]) -> list[int]:
        return []


class CountsTheWay(Closures):
    """Counts the time in which a function is on its way, since it does not hear that the worker has begun."""

    def take(self, sender: int, message: Message, now: float) -> list[Action] | None:
        return [] if isinstance(message, Began) else super().take(sender, message, now)


class GoesOnCounting(Closures):
    """Does not begin anew with a worker's next function."""

    def _returned(self, rank: int, message: Finished | Failed, now: float) -> list[Action]:
        timed, self._deadlines = self._deadlines, None
        try:
            return super()._returned(rank, message, now)
        finally:
            self._deadlines = timed

    def take(self, sender: int, message: Message, now: float) -> list[Action] | None:
        return [] if isinstance(message, Began) else super().take(sender, message, now)


STALL_JOBS = {
    "functions": StallJob(),
    "loading": StallJob(loads=15),
    "on-their-way": StallJob(travels=6),
    "prefetch": StallJob(prefetch=True),
    "slow-coordinator": StallJob(reads=4),
    "two-stops": StallJob(stops=2, every=3),
}
STALL_MUTANTS = {
    "counts-stops": ("late", StallJob(deadlines=CountsStops)),
    "asks-one-server": ("late", StallJob(deadlines=AsksOneServer)),
    "loads-in-time": ("late", StallJob(loads=15, deadlines=LoadsInTime)),
    "finds-nobody": ("found", StallJob(deadlines=FindsNobody)),
    "counts-the-way": ("late", StallJob(travels=6, closures=CountsTheWay)),
    "goes-on-counting": ("late", StallJob(prefetch=True, closures=GoesOnCounting)),
}
