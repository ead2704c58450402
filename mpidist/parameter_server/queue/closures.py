"""Closures: the coordinator's queue, and its decision which attempt of a closure counts. A pure state machine.

Messages and losses go in, and what is to be sent and what has ended comes out; time is an argument. An attempt is
decided, once and for all, when its worker has finished it and every server it has pushed to is prepared. Until then
the loss of the worker makes it void, and the closure waits again at once; after it nothing can stop the attempt.

A failed function stores the first error (`error`). The next `schedule` or `join` calls `cancel`, waits until nothing
is in flight, and raises `take_error`; then all is as new.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from typing import TypeAlias

from mpidist.parameter_server.protocol.messages import (
    OWN_WRITE,
    Applied,
    Do,
    Failed,
    Fence,
    Finished,
    Message,
    Prepared,
    Send,
    Timed,
)
from mpidist.parameter_server.protocol.references import with_inputs
from mpidist.parameter_server.queue.commits import Attempt
from mpidist.parameter_server.queue.deadlines import Deadlines
from mpidist.parameter_server.queue.resources import Resources
from mpidist.parameter_server.queue.staleness import Versions
from mpidist.parameter_server.queue.unfinished import Book
from mpidist.parameter_server.queue.waiting import give_up
from mpidist.parameter_server.queue.work import Closure, ClosureEnd, End, ResourceEnd, Rules, Work
from mpidist.parameter_server.queue.worker_table import WorkerRecord, WorkerTable

# The largest number of waiting closures, as in tf.distribute.
QUEUE_SIZE = 256 * 1024

Action: TypeAlias = Send | ClosureEnd | ResourceEnd


@dataclass
class Closures(Book):
    """All closures that have not ended, and the workers.

    Methods return actions, which must be done in this order: messages to a rank must not overtake each other.

    Args:
        commits: The order of commits, which the coordinator's own writes share.
        limit: The number of waiting closures from which on `is_full` is true.
        timeout: Seconds that a closure may run on a worker before the worker counts as lost (see `deadlines.py`); None
            is any time.
        prefetch: Whether a worker gets its next closure while it still runs one, if no other worker is free.
        versions: The rules by which attempts may begin, and updates may count.

    Attributes:
        error: The first error since `take_error`.
    """

    limit: int = QUEUE_SIZE
    timeout: InitVar[float | None] = None
    prefetch: bool = False
    versions: Versions = field(default_factory=Versions)
    error: ClosureEnd | None = None
    _is_cancelling: bool = False

    def __post_init__(self, timeout: float | None) -> None:
        self.take_options(self.limit, timeout, prefetch=self.prefetch)
        self._workers = WorkerTable()
        self.workers = self._workers.by_rank
        self.resources = Resources(self.workers)

    def take_options(self, limit: int, timeout: float | None, *, prefetch: bool) -> None:
        """Local. Set the options of the scheduler, before the first worker exists.

        Args:
            limit: See the class.
            timeout: See the class.
            prefetch: See the class.
        """
        self.limit, self.prefetch = limit, prefetch
        self._deadlines = None if timeout is None else Deadlines(timeout)

    @property
    def is_full(self) -> bool:
        """Local. Whether `schedule` should wait."""
        return self._not_begun >= self.limit

    # ------------------------------------------------------------------ the user

    def schedule(self, work: Work, rules: Rules, now: float, inputs: Sequence[int] = ()) -> tuple[int, list[Action]]:
        """Local. Add a closure. Returns its number and the actions.

        Args:
            work: The call of the closure.
            rules: The user's options for the closure.
            now: The time, in seconds; always of the same clock.
            inputs: The closures whose results are its arguments; none of them has ended. If one of them has no result,
                this closure ends as the first of those does.

        Raises:
            RuntimeError: The call is between `cancel` and `take_error`.
        """
        if self._is_cancelling:
            raise RuntimeError("a closure cannot be scheduled while closures are cancelled; take the error first")
        self._number += 1
        self._closures[self._number] = Closure(work, rules)
        if inputs:
            self._awaiting.add(self._number, inputs)
        else:
            self._workers.put(self._number, rules, work.data)
        return self._number, self._dispatch(now)

    def cancel(self) -> list[Action]:
        """Local. End all closures that wait. Those in flight end by themselves, but are not run again."""
        self._is_cancelling = True
        numbers = sorted([*self._awaiting.clear(), *self._workers.waiting.clear(), *self._suspects.clear()])
        return [end for number in numbers for end in self._end(number, End.CANCELLED)]

    def take_error(self) -> ClosureEnd | None:
        """Local. Return and clear the first error; closures can be scheduled again.

        Raises:
            RuntimeError: A closure is in flight.
        """
        if self.in_flight:
            raise RuntimeError(f"{self.in_flight} closures are in flight; an error is taken when nothing runs any more")
        error, self.error, self._is_cancelling = self.error, None, False
        return error

    # ------------------------------------------------------------------ workers

    def joined(self, rank: int, now: float, own: Mapping[int, Work] | None = None) -> list[Action]:
        """Local. Add a worker.

        Args:
            rank: The rank of the worker, which no worker had before.
            now: The time.
            own: See `Resources.joined`.
        """
        timed = [] if self._deadlines is None else [Send(rank, Timed())]
        return [*timed, *self.resources.joined(self._workers.join(rank), own or {}), *self._dispatch(now)]

    def lost(self, rank: int, now: float, how: str = "") -> list[Action]:
        """Local. Note that a worker is lost: it is fenced, and its closures wait again unless they are decided.

        The closure that it ran may be the cause. It is given to a worker again when this loss is settled (`look`), and
        fails after the last loss that its rules allow.

        Args:
            rank: The worker. Nothing happens if it is lost already.
            now: The time.
            how: The known cause, for the error of that closure.
        """
        worker = self._workers.lose(rank)
        if worker is None:
            return []
        fences = [Send(to, Fence(rank)) for to in (*self.commits.servers, rank)]
        actions: list[Action] = [*fences, *self.resources.lost(worker)]
        if self._deadlines is not None:
            self._deadlines.forget(rank)
        for number in sorted({number for number in worker.slots if number is not None}):
            closure = self._closures[number]
            if closure.is_decided:
                continue
            is_suspect = number == worker.runs()
            closure.deaths += (how,) * is_suspect
            actions += self._again(number, lost_at=now if is_suspect else None)
        return [*actions, *self._dispatch(now)]

    def look(self, now: float) -> list[Action]:
        """Local. The actions that are due because time has passed; to be called again and again.

        Args:
            now: The time.
        """
        actions: list[Action] = []
        if self._deadlines is not None and any(worker.running for worker in self.workers.values()):
            actions += self._deadlines.look(now, self.commits.servers)
        settled = self._suspects.settled(now) if self._suspects.held else []
        for number in settled:
            self._workers.put(number, self._closures[number].rules, self._closures[number].work.data)
        return [*actions, *self._dispatch(now)] if settled else actions

    def take(self, sender: int, message: Message, now: float) -> list[Action] | None:
        """Local. The actions that a message asks for, in the order in which they are to be done.

        Messages of a lost worker, and about its attempts, are ignored.

        Args:
            sender: The rank that has sent it.
            message: The message.
            now: The time.

        Returns:
            None if the message is not this machine's.

        Raises:
            RuntimeError: The message breaks the protocol.
        """
        if isinstance(message, Finished | Failed):
            actions = self._returned(sender, message, now)
        elif isinstance(message, Prepared):
            actions = self._prepared(sender, message)
        elif isinstance(message, Applied):
            actions = self._applied(sender, message)
        else:
            noted = self._noted(sender, message, now)
            return None if noted is None else [*noted]
        return [*actions, *self._dispatch(now)]

    # ------------------------------------------------------------------ inside

    def _again(self, number: int, lost_at: float | None = None) -> list[Action]:
        """Queue a closure whose attempt is void, or let it wait where its worker was lost; after `cancel`, end it."""
        closure = self._closures[number]
        self._finished.pop(number, None)
        self.versions.end(number)
        closure.worker = closure.finished = None
        closure.prepared = frozenset()
        if self._is_cancelling:
            return [*self._end(number, End.CANCELLED)]
        if len(closure.deaths) >= closure.rules.max_deaths:
            return [*self._end(number, End.ERROR, give_up(number, closure))]
        if lost_at is None:
            self._workers.put(number, closure.rules, closure.work.data)
        else:
            self._suspects.hold(number, lost_at)
        return []

    def _dispatch(self, now: float) -> list[Action]:
        """Decide the attempts that may count now, and send waiting closures to free workers."""
        actions = self._decide_held()
        for worker, number, slot in self._workers.start(now, self.versions, prefetch=self.prefetch):
            closure = self._closures[number]
            closure.attempt += 1
            closure.worker = worker.rank
            work = closure.work
            do = Do(number, closure.attempt, slot, work.function.number, work.arguments, self.prefetch)
            sends = [*worker.define(work), Send(worker.rank, do)]
            if worker.running[0] == number:
                self._time(worker.rank, sends)
            actions += sends
        return actions

    def _returned(self, rank: int, message: Finished | Failed, now: float) -> list[Action]:
        worker = self.workers.get(rank)
        if worker is None:
            return []
        number = message.closure
        if not self._is_current(rank, number, message.attempt):
            raise RuntimeError(
                f"the worker of rank {rank} has returned attempt {message.attempt} of closure {number}: expected the "
                f"current attempt of the first of the closures {worker.running}"
            )
        self._workers.returned(worker, now)
        self._time(rank)
        if isinstance(message, Failed):
            return self._failed(rank, message)
        self._closures[number].finished = message
        self._finished[number] = now
        worker.finished.append(number)
        return self._decide_in_turn(worker)

    def _failed(self, rank: int, message: Failed) -> list[Action]:
        number = message.closure
        closure = self._closures[number]
        # Its pushes are dropped: the worker has notified the servers before the coordinator.
        self._workers.release(rank, number)
        if message.ended:
            return self._ended(rank, closure, message)
        closure.failures += 1
        if closure.failures <= closure.rules.retries and not self._is_cancelling:
            return self._again(number)
        return [*self._end(number, End.ERROR, message.error, message.traceback)]

    def _ended(self, rank: int, closure: Closure, message: Failed) -> list[Action]:
        """Note that a worker's data has ended. Another worker, whose data has not, runs the closure."""
        self.workers[rank].ended.add(message.ended)
        data, is_bound = closure.work.data, closure.rules.worker in self.workers
        if message.ended in data and not is_bound and self._workers.have_left(data):
            return self._again(message.closure)
        return [*self._end(message.closure, End.AT_END, message.error, message.traceback)]

    def _prepared(self, server: int, message: Prepared) -> list[Action]:
        closure = self._closures.get(message.closure)
        if closure is None or closure.worker is None or closure.attempt != message.attempt:
            return []
        closure.prepared |= {server}
        worker = self.workers.get(closure.worker)
        return [] if worker is None else self._decide_in_turn(worker)

    def _decide_in_turn(self, worker: WorkerRecord) -> list[Action]:
        """Decide a worker's finished closures in their order: its place in its own data is that of the last one."""
        actions: list[Action] = []
        while worker.finished:
            number = worker.finished[0]
            actions += self._decide(number)
            if worker.finished[:1] == [number]:
                break
        return actions

    def _decide_held(self) -> list[Action]:
        """Decide the attempts that had to wait for others, which have ended meanwhile or count."""
        actions: list[Action] = []
        if self.versions.is_synchronous:
            actions += self._commit(self.versions.full(len(self.workers)))
        # Each one that is decided may be what others wait for.
        while self.versions.staleness is not None and (
            more := [one for worker in self.workers.values() for one in self._decide_in_turn(worker)]
        ):
            actions += more
        return actions

    def end_round(self) -> list[Action]:
        """Local. Count updates that wait for others, if no others will come before the program continues."""
        return [*self._commit(self.versions.rest(self.in_flight + len(self._suspects.held)))]

    def _decide(self, number: int) -> list[Action]:
        """Decide an attempt that is finished, and prepared by all servers that it has pushed to."""
        closure = self._closures[number]
        attempt = closure.complete(number)
        if attempt is None:
            return []
        if attempt.servers:
            return [*self._commit(self.versions.offer(attempt))]
        self._note_decided(attempt)
        return self._finish(number, closure)

    def _commit(self, attempts: Sequence[Attempt]) -> list[Send]:
        """Commit attempts that count together."""
        if not attempts:
            return []
        for one in attempts:
            self._note_decided(one)
            self._closures[one.closure].is_decided = True
            self._closures[one.closure].unapplied = frozenset(one.servers)
        counting = [self.versions.counting(one) for one in attempts] if self.versions.is_synchronous else attempts
        sends, refusal = self.commits.decide(counting)
        if refusal is None:
            self.versions.count(attempts)
            return sends
        for one in attempts:
            self._closures[one.closure].refusal = refusal
            self.versions.end(one.closure)
        return sends

    def _note_decided(self, attempt: Attempt) -> None:
        finished = self._closures[attempt.closure].finished
        self.workers[attempt.worker].finished.remove(attempt.closure)
        if finished is not None and finished.read:
            self.resources.positions.note(attempt.worker, finished.read)

    def _applied(self, server: int, message: Applied) -> list[Action]:
        if message.attempt == OWN_WRITE:
            self.commits.written(server, message.closure, message.error)
            return []
        closure = self._closures.get(message.closure)
        if closure is None or closure.attempt != message.attempt or server not in closure.unapplied:
            raise RuntimeError(
                f"the server of rank {server} sends {message!r}: expected one of each server for each commit"
            )
        closure.unapplied -= {server}
        if message.error:
            closure.refusal = message.error, ""
        return self._finish(message.closure, closure)

    def _finish(self, number: int, closure: Closure) -> list[Action]:
        if closure.unapplied or closure.finished is None:
            return []
        self._workers.release(closure.worker, number)
        if closure.refusal is not None:
            return [*self._end(number, End.ERROR, *closure.refusal)]
        return [*self._end(number, End.RESULT, closure.finished.result)]

    def _end(self, number: int, end: End, payload: bytes = b"", text: str = "") -> list[ClosureEnd]:
        """End a closure; those that await its result are queued, or end as it does."""
        ends = [number]
        for one in ends:
            closure = self._closures.pop(one)
            self._finished.pop(one, None)
            self.versions.end(one)
            if end is End.ERROR and closure.rules.on_error == "cancel" and self.error is None:
                self.error = ClosureEnd(one, end, payload, text)
            if one not in self._awaiting.takers:
                continue
            if end is End.RESULT:
                for waiting, inputs in self._awaiting.note(one, payload):
                    begun = self._closures[waiting]
                    begun.work = begun.work._replace(arguments=with_inputs(begun.work.arguments, inputs))
                    self._workers.put(waiting, begun.rules, begun.work.data)
            else:
                ends += self._awaiting.give_up(one)
        return [ClosureEnd(one, end, payload, text) for one in ends]
