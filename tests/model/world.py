"""A job as one state, and all that can happen next: deliveries, work, deaths, false suspicion, losses, joins.

A state is a flat tuple of small numbers that name the states of parties, the contents of channels and those of slots.
A party's answer to an event is worked out once and remembered, so that a step costs little more than a look-up.

Rules, of every state or where nothing moves any more:

    once       no server applies a closure twice
    together   a closure is applied on all servers that it has pushed to, or on none
    done       a closure whose result the user can see is applied everywhere, by the attempt that gave the result
    result     a closure that is applied has a result
    void       a closure that failed or was cancelled is applied nowhere
    progress   with a worker that is neither dead nor suspected, everything that the user wants gets done
    payload    what is applied is what that attempt has put, all parts of it
    memory     nothing stays staged
    order      servers apply commits, and steps of an optimizer, in one order
    write      a read of the coordinator sees its own writes
    own        a worker that begins a closure sees what it finished before
    version    what a synchronous round adds up has read the version before it, and no other one, on all servers
    cut        each block that a server saves holds the commits up to the cut's number, all and only these
    errors     the user gets an error when no closure is there any more
    guilt      a closure fails when as many workers as its rules allow were lost while they had it first, and only then
    protocol   no machine gets a message that breaks the protocol
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NamedTuple

from mpidist.parameter_server.protocol.messages import SLOTS, Fence, Left, Send
from mpidist.parameter_server.queue.closures import Closures
from mpidist.parameter_server.queue.commits import Commits
from mpidist.parameter_server.queue.staleness import Versions
from mpidist.parameter_server.queue.synchronous import Rounds
from mpidist.parameter_server.queue.worker_table import FreeWorkers
from mpidist.parameter_server.server.snapshot import Unsaved
from mpidist.parameter_server.server.staging import Apply, ApplyRound, Free, Staging
from tests.model.parties import (
    COORDINATOR,
    BrokenError,
    Coordinator,
    Put,
    Release,
    Server,
    Worker,
    rate,
    updates_of,
)
from tests.model.rules import check_always, check_own, check_rest


@dataclass(frozen=True)
class Job:
    """The job that is explored.

    Attributes:
        program: What the user does; see `parties.Coordinator`.
        upfront: So many operations of it happen before anything else.
        servers: The number of servers.
        workers: The number of workers at the start.
        kills: So many workers may die.
        suspicions: So many living workers may be called lost.
        fails: So many functions may raise.
        joins: So many workers may join after a loss.
        leaves: So many workers may leave by themselves.
        prefetch: As of `Closures`.
        pulls: Workers read variables when they begin a closure.
        waits: And wait until their own last update is applied.
        splits: Something may happen between a Put and the message about it.
        rate: The learning rate of an optimizer's step.
        inherits: Who joins has the place of the first worker, and its slots.
        clears: It gets them when the coordinator has no work of those any more that had them before.
        forgets: A server that has heard of it takes nothing into them from those.
        reduces: What commutes with all else is not tried in other orders.
        copies: So many of the two variables of a server may be copied while a cut is saved.
        wanted: So many updates make a synchronous round; 0 is for jobs without rounds. Workers must pull.
        closures: The class of the coordinator's machine.
        commits: The class of its commits.
        staging: The class of the servers' machine.
        unsaved: The class of what saves a cut there.
        rounds: The class of the rounds, if there are some.
    """

    program: tuple[Any, ...]
    upfront: int = 0
    servers: int = 2
    workers: int = 2
    kills: int = 0
    suspicions: int = 0
    fails: int = 0
    joins: int = 0
    leaves: int = 0
    prefetch: bool = False
    pulls: bool = False
    waits: bool = True
    splits: bool = False
    rate: Callable[[int, int], float] = rate
    inherits: bool = False
    clears: bool = True
    forgets: bool = True
    reduces: bool = True
    copies: int = 1
    wanted: int = 0
    closures: type[Closures] = Closures
    commits: type[Commits] = Commits
    staging: type[Staging] = Staging
    unsaved: type[Unsaved] = Unsaved
    rounds: type[Rounds] = Rounds


class Cell(NamedTuple):
    """The content of a slot: whose update, which parts, whether its worker has to wait for it, and what that saw."""

    worker: int
    name: tuple[int, int]
    parts: tuple[int, ...]
    is_held: bool
    seen: tuple[int, ...]


State = tuple[int, ...]
# What happens, in words to be joined; whether it must happen at some time; the state after it.
Step = tuple[tuple[Any, ...], bool, State]
Steps = Iterator[Step]
NOTHING, HEARD = 0, 1


def freeze(thing: Any) -> Any:
    """A hashable picture of a state. Only the order of free workers counts; that of other dictionaries does not."""
    if isinstance(thing, FreeWorkers):
        return tuple(map(tuple, thing.by_running))
    if isinstance(thing, dict):
        return frozenset((key, freeze(value)) for key, value in thing.items())
    if isinstance(thing, (list, tuple)):
        # Two messages of different kinds may have equal fields.
        return (type(thing).__name__, *map(freeze, thing))
    if isinstance(thing, set):
        return frozenset(thing)
    if not is_dataclass(thing):
        return thing
    state = vars(thing) if hasattr(thing, "__dict__") else {one.name: getattr(thing, one.name) for one in fields(thing)}
    return (type(thing).__name__, *map(freeze, state.values()))


class World:
    """All states of a job.

    Args:
        job: What is explored.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self._numbers: dict[Any, int] = {None: NOTHING, freeze(()): NOTHING}
        self._things: list[Any] = [None]
        self._answers: dict[Any, tuple[int, tuple[Any, ...]] | Exception | None] = {}
        self._longer: dict[Any, int] = {}
        self._shorter: dict[tuple[int, bool], int] = {}
        self._ended: dict[tuple[int, str], int] = {}
        self._checked: set[Any] = set()
        self.server_ranks = range(1, 1 + job.servers)
        self.worker_ranks = range(1 + job.servers, 1 + job.servers + job.workers + job.joins)
        ranks = [COORDINATOR, *self.server_ranks, *self.worker_ranks]
        pairs = [(a, b) for a in ranks for b in ranks if self._is_channel(a, b)]
        # Where things are in a state: parties first, by rank.
        at = len(ranks)
        self.channels = {pair: at + number for number, pair in enumerate(pairs)}
        at += len(pairs)
        cells = [(server, owner, slot) for server in self.server_ranks for owner in ranks for slot in range(SLOTS)]
        self.cells = {cell: at + number for number, cell in enumerate(cells)}
        at += len(cells)
        joiners = self.worker_ranks[job.workers :]
        # Which servers have heard of who has joined.
        self.known = {(server, rank): at + number for number, (server, rank) in enumerate(
            (server, rank) for server in self.server_ranks for rank in joiners
        )}
        at += len(self.known)
        self.kills, self.suspicions, self.fails, self.joins, self.leaves = range(at, at + 5)
        self.size = at + 5

    def _is_channel(self, a: int, b: int) -> bool:
        kinds = [0 if rank == COORDINATOR else 1 if rank in self.server_ranks else 2 for rank in (a, b)]
        return kinds in ([0, 1], [1, 0], [0, 2], [2, 0], [2, 1])

    def initial(self) -> State:
        """The state before anything has happened, but for what happens up front."""
        job = self.job
        state = [NOTHING] * self.size
        commits = job.commits(COORDINATOR, tuple(self.server_ranks), job.rate)
        versions = job.rounds(wanted=job.wanted) if job.wanted else Versions()
        closures = job.closures(commits, prefetch=job.prefetch, versions=versions)
        state[COORDINATOR] = self._number(Coordinator(closures, job.program))
        for rank in self.server_ranks:
            state[rank] = self._number(Server(job.staging(COORDINATOR), job.unsaved(job.copies)))
        for rank in self.worker_ranks:
            state[rank] = self._number(Worker(rank, pulls=job.pulls, splits=job.splits))
        state[self.kills:] = [job.kills, job.suspicions, job.fails, job.joins, job.leaves]
        for rank in self.worker_ranks[: job.workers]:
            self._join(state, rank)
        for _ in range(job.upfront):
            self._do(state, COORDINATOR, "user")
        return tuple(state)

    # ------------------------------------------------------------------ names of things

    def _number(self, thing: Any) -> int:
        key = freeze(thing)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._things)
            self._things.append(thing)
        return number

    def party(self, state: State | list[int], rank: int) -> Any:
        """The party of this rank in a state; not to be changed."""
        return self._things[state[rank]]

    def messages(self, state: State | list[int], pair: tuple[int, int]) -> tuple[Any, ...]:
        """The messages that are under way."""
        number = state[self.channels[pair]]
        return () if number == NOTHING else self._things[number]

    def _without(self, channel: int, *, first: bool) -> int:
        """The channel after its first message was taken, or its last was lost."""
        key = (channel, first)
        if key not in self._shorter:
            messages = self._things[channel]
            self._shorter[key] = self._number(messages[1:] if first else messages[:-1])
        return self._shorter[key]

    # ------------------------------------------------------------------ what happens

    def _do(self, state: list[int], rank: int, method: str, *arguments: Any, channel: int = NOTHING) -> bool:
        """Let a party answer, and do what it wants done; False if it has nothing to do.

        The number of the channel stands for its first message among the arguments.
        """
        key = (state[rank], method, channel or arguments, arguments[0] if channel else None)
        if key not in self._answers:
            party = pickle.loads(pickle.dumps(self._things[state[rank]]))
            try:
                actions = getattr(party, method)(*arguments)
                self._answers[key] = None if actions is None else (self._number(party), tuple(actions))
            except BrokenError as broken:
                self._answers[key] = broken
            except RuntimeError as error:
                self._answers[key] = BrokenError(f"protocol: {error}")
        answer = self._answers[key]
        if answer is None:
            return False
        if isinstance(answer, Exception):
            raise answer
        state[rank], actions = answer
        for action in actions:
            self._act(state, rank, action)
        return True

    def _act(self, state: list[int], rank: int, action: Any) -> None:
        if isinstance(action, Send):
            index = self.channels[rank, action.rank]
            key = (state[index], type(action.message), action.message)
            if key not in self._longer:
                self._longer[key] = self._number((*self.messages(state, (rank, action.rank)), action.message))
            state[index] = self._longer[key]
        elif isinstance(action, Put):
            if (action.server, rank) in self.known:
                # It says who it is first on its connection.
                state[self.known[action.server, rank]] = HEARD
            if self._is_forgotten(state, action.server, rank):
                return
            index = self.cells[action.server, self._owner(action.owner), action.slot]
            cell = self._things[state[index]]
            goes_on = cell is not None and cell[:2] == (action.owner, action.name)
            parts = (*cell.parts, action.part) if goes_on else (action.part,)
            state[index] = self._number(Cell(action.owner, action.name, parts, True, action.seen))
        elif isinstance(action, Release | Free):
            server, owner, slot = action if isinstance(action, Release) else (rank, *action)
            if isinstance(action, Release) and self._is_forgotten(state, server, rank):
                return
            index = self.cells[server, self._owner(owner), slot]
            state[index] = self._number(self._things[state[index]]._replace(is_held=False))
        elif isinstance(action, Apply | ApplyRound):
            slots, pushes = ((action.slot,), (action.pushes,)) if isinstance(action, Apply) else action[1:]
            for commit, slot, count in zip(updates_of(action), slots, pushes, strict=True):
                index = self.cells[rank, self._owner(commit.worker), slot]
                cell = self._things[state[index]]
                wanted = (commit.worker, commit[2:4], tuple(range(count)))
                if cell is None or cell[:3] != wanted:
                    raise BrokenError(f"payload: server {rank} applies {wanted} out of a slot that holds {cell}")
                if self.job.wanted and commit.steps:
                    before = self.party(state, COORDINATOR).steps.index(commit.number)
                    if set(cell.seen) != {before}:
                        raise BrokenError(f"version: {commit} has read {cell.seen}, and comes after {before} rounds")
                state[index] = self._number(cell._replace(is_held=False))

    def _owner(self, rank: int) -> int:
        """Whose slots a rank has: its own, unless who joins gets those of a first worker that was lost."""
        joined = rank in self.worker_ranks[self.job.workers:]
        return self.worker_ranks[0] if joined and self.job.inherits else rank

    def _place(self) -> list[int]:
        """The ranks that have the first worker's place, if who joins gets it, in their order."""
        return [self.worker_ranks[0], *self.worker_ranks[self.job.workers :]] if self.job.inherits else []

    def _is_forgotten(self, state: State | list[int], server: int, rank: int) -> bool:
        """Whether a server has heard of one that has a rank's slots now, and takes nothing more into them from that."""
        place = self._place()
        heirs = place[place.index(rank) + 1 :] if rank in place else []
        return self.job.forgets and any(state[self.known[server, one]] for one in heirs)

    def _may_join(self, state: State, rank: int) -> bool:
        """Whether a worker may join now."""
        coordinator, place = self.party(state, COORDINATOR), self._place()
        before = place[: place.index(rank)] if place else []
        has_work = self.job.clears and any(map(coordinator.closures.has_work_of, before))
        return coordinator.lost.issuperset(before) and not has_work

    def _join(self, state: list[int], rank: int) -> None:
        worker = pickle.loads(pickle.dumps(self.party(state, rank)))
        worker.status = "there"
        state[rank] = self._number(worker)
        self._do(state, COORDINATOR, "join", rank)

    def _is_waiting(self, state: State, rank: int) -> bool:
        """Whether a worker waits, before it reads, until its own updates are applied."""
        owner = self._owner(rank)
        cells = [state[self.cells[server, owner, slot]] for server in self.server_ranks for slot in range(SLOTS)]
        held = [self._things[cell] for cell in cells if cell != NOTHING]
        return any(cell.is_held and cell.worker == rank for cell in held)

    def steps(self, state: State) -> Steps:
        """All that can happen next.

        Raises:
            BrokenError: One of these breaks a rule.
        """
        lost = self.party(state, COORDINATOR).lost
        eager = self._eager(state, lost) if self.job.reduces else None
        if eager is not None:
            yield eager
            return
        for (sender, receiver), index in self.channels.items():
            if state[index] != NOTHING:
                yield self._delivery(state, sender, receiver)
                if sender in self.worker_ranks and self.party(state, sender).status == "dead":
                    # What the dead had sent may be lost, from the last message on.
                    copy = list(state)
                    copy[index] = self._without(state[index], first=False)
                    yield ("LOST", self._things[state[index]][-1], "from", sender, "to", receiver), False, tuple(copy)
        for rank in self.server_ranks:
            copy = list(state)
            if self._do(copy, rank, "save_block"):
                yield ("server", rank, "saves a block"), True, tuple(copy)
        for rank in self.worker_ranks:
            if state[rank] != NOTHING:
                yield from self._work(state, rank)
                if rank not in lost:
                    yield from self._mishaps(state, rank)
        copy = list(state)
        if self._do(copy, COORDINATOR, "user"):
            yield ("the user goes on",), True, tuple(copy)
        copy = list(state)
        if self._do(copy, COORDINATOR, "settle"):
            yield ("losses are settled",), True, tuple(copy)
        rank = self.worker_ranks[-max(1, state[self.joins])]
        if state[self.joins] and lost and self._may_join(state, rank):
            copy = list(state)
            copy[self.joins] -= 1
            self._join(copy, rank)
            yield ("worker", rank, "joins"), True, tuple(copy)

    def _eager(self, state: State, lost: set[int]) -> Step | None:
        """Something that commutes with all else, now and later, so that no other order need be tried.

        A closure that reaches a living worker; a message that is passed over for good, since its sender is lost; the
        end of a worker that is lost to the coordinator and to all servers.
        """
        for rank in self.worker_ranks:
            index = self.channels[COORDINATOR, rank]
            copy = list(state)
            if state[index] != NOTHING:
                if self.party(state, rank).status != "there":
                    copy[index] = NOTHING
                    return ("worker", rank, "reads nothing any more"), True, tuple(copy)
                if not isinstance(self._things[state[index]][0], Fence):
                    return self._delivery(state, COORDINATOR, rank)
            if rank in lost:
                fences = [server for server in self.server_ranks if rank in self.party(state, server).staging.fenced]
                for receiver in (COORDINATOR, *fences):
                    copy[self.channels[rank, receiver]] = NOTHING
                if len(fences) == len(self.server_ranks) and not self.job.inherits:
                    copy[rank] = self._with_status(copy[rank], "gone")
                if tuple(copy) != state:
                    return ("worker", rank, "speaks to nobody any more"), True, tuple(copy)
        return None

    def _with_status(self, worker: int, status: str) -> int:
        """A worker that does nothing any more."""
        key = (worker, status)
        if key not in self._ended:
            copy = pickle.loads(pickle.dumps(self._things[worker]))
            copy.status, copy.attempts, copy.at = status, [], 0
            self._ended[key] = self._number(copy)
        return self._ended[key]

    def _delivery(self, state: State, sender: int, receiver: int) -> Step:
        index = self.channels[sender, receiver]
        channel = state[index]
        message = self._things[channel][0]
        copy = list(state)
        copy[index] = self._without(channel, first=True)
        self._do(copy, receiver, "deliver", sender, message, channel=channel)
        return (message, "from", sender, "to", receiver), True, tuple(copy)

    def _work(self, state: State, rank: int) -> Steps:
        worker = self.party(state, rank)
        if worker.status != "there" or not worker.attempts:
            return
        copy = list(state)
        is_pull = worker.pulls and worker.at == 0
        if is_pull:
            if self.job.waits and self._is_waiting(state, rank):
                return
            if any(self._is_forgotten(state, server, rank) for server in self.server_ranks):
                # It is not answered.
                return
            servers = [self.party(state, server) for server in self.server_ranks]
            check_own(worker, servers)
            self._do(copy, rank, "go_on", tuple(server.steps for server in servers) if self.job.wanted else ())
        else:
            self._do(copy, rank, "go_on")
        yield ("worker", rank, "pulls" if is_pull else "goes on with", worker.attempts[0]), True, tuple(copy)
        if state[self.fails]:
            copy = list(state)
            copy[self.fails] -= 1
            self._do(copy, rank, "fail")
            yield ("worker", rank, "RAISES in", worker.attempts[0]), False, tuple(copy)

    def _mishaps(self, state: State, rank: int) -> Steps:
        """Death, departure, and loss, of a worker that is not lost."""
        status = self.party(state, rank).status
        if status == "there" and state[self.kills]:
            copy = list(state)
            copy[self.kills] -= 1
            copy[rank] = self._with_status(state[rank], "dead")
            yield ("KILL worker", rank), False, tuple(copy)
        if status == "there" and state[self.leaves]:
            yield ("worker", rank, "LEAVES"), False, self._leave(state, rank)
        is_dead = status == "dead" or rank in self.party(state, COORDINATOR).left
        if is_dead or (status == "there" and state[self.suspicions]):
            copy = list(state)
            copy[self.suspicions] -= not is_dead
            self._do(copy, COORDINATOR, "lose", rank)
            yield ("worker", rank, "is gone" if is_dead else "is SUSPECTED though alive"), is_dead, tuple(copy)

    def _leave(self, state: State, rank: int) -> State:
        """The state after a worker has left by itself."""
        copy = list(state)
        copy[self.leaves] -= 1
        copy[rank] = self._with_status(state[rank], "left")
        for receiver in (*self.server_ranks, COORDINATOR):
            self._act(copy, rank, Send(receiver, Left("an error of its own")))
        return tuple(copy)

    # ------------------------------------------------------------------ rules

    def check(self, state: State) -> None:
        """Check the rules of every state.

        Raises:
            BrokenError: One does not hold.
        """
        key = state[: 1 + self.job.servers]
        if key not in self._checked:
            self._checked.add(key)
            check_always(self.party(state, COORDINATOR), [self.party(state, rank) for rank in self.server_ranks])

    def outcome(self, state: State) -> Any:
        """The part of a state that a user could see: how closures ended, and what servers have applied."""
        servers = [self.party(state, rank) for rank in self.server_ranks]
        return freeze([self.party(state, COORDINATOR).ends, [server.applied for server in servers]])

    def check_rest(self, state: State) -> None:
        """Check the rules of a state where nothing moves any more.

        Raises:
            BrokenError: One does not hold.
        """
        coordinator = self.party(state, COORDINATOR)
        workers = [self.party(state, rank) for rank in self.worker_ranks]
        can_work = any(worker.status == "there" and worker.rank not in coordinator.lost for worker in workers)
        check_rest(coordinator, [self.party(state, rank) for rank in self.server_ranks], can_work=can_work)
