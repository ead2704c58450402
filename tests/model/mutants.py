"""Machines with one fault each: the exploration must find them."""

from __future__ import annotations

from typing import Any, NamedTuple

from mpidist.parameter_server.protocol.messages import (
    Commit,
    Drop,
    Fence,
    Left,
    Prepared,
    Push,
    Round,
    Send,
    SnapshotRequest,
)
from mpidist.parameter_server.queue.closures import Closures
from mpidist.parameter_server.queue.commits import Attempt, Commits
from mpidist.parameter_server.queue.synchronous import Rounds
from mpidist.parameter_server.queue.work import ClosureEnd, End, Rules
from mpidist.parameter_server.server.snapshot import Ready, Unsaved
from mpidist.parameter_server.server.staging import Apply, ApplyRound, Free, Save, Staging
from tests.model.parties import Schedule, Write, rate_of_first
from tests.model.world import Job


class DecidesUnprepared(Closures):
    """Decides on the worker's word alone."""

    def _decide(self, number: int) -> list[Any]:
        finished = self._closures[number].finished
        self._closures[number].prepared |= set(finished.servers if finished else ())
        return super()._decide(number)


class TakesOldAttempts(Closures):
    """Counts the word of a server about an attempt that is void."""

    def _prepared(self, server: int, message: Prepared) -> list[Any]:
        closure = self._closures.get(message.closure)
        return super()._prepared(server, message._replace(attempt=closure.attempt) if closure else message)


class RepeatsDecided(Closures):
    """Hands a decided attempt out again when its worker is lost."""

    def lost(self, rank: int, now: float, how: str = "") -> list[Any]:
        for closure in self._closures.values():
            if closure.worker == rank:
                closure.is_decided = False
        return super().lost(rank, now)


class FreesEarly(Closures):
    """Gives a worker's slot away when the attempt is decided, and not applied."""

    def _decide(self, number: int) -> list[Any]:
        actions = super()._decide(number)
        closure = self._closures.get(number)
        if closure is not None and closure.is_decided and closure.worker is not None:
            self._workers.release(closure.worker, number)
        return actions

    def _finish(self, number: int, closure: Any) -> list[Any]:
        worker = self.workers.get(closure.worker)
        if not closure.unapplied and worker is not None and number not in worker.slots:
            closure.worker = -1
        return super()._finish(number, closure)


class EndsEarly(Closures):
    """Gives the result out when the attempt is decided, and not applied."""

    def _decide(self, number: int) -> list[Any]:
        actions = super()._decide(number)
        closure = self._closures.get(number)
        if closure is not None and closure.is_decided:
            closure.unapplied = frozenset()
            actions += self._finish(number, closure)
        return actions


class TellsOneServer(Closures):
    """Sends the commit to the first server only."""

    def _decide(self, number: int) -> list[Any]:
        return super()._decide(number)[:1]


class LosesResults(Closures):
    """Does not say that a closure has ended."""

    def _finish(self, number: int, closure: Any) -> list[Any]:
        super()._finish(number, closure)
        return []


class CallsResultsCancelled(Closures):
    """Says that a closure was cancelled whose update is applied."""

    def _finish(self, number: int, closure: Any) -> list[Any]:
        return [ClosureEnd(number, End.CANCELLED) for _ in super()._finish(number, closure)]


class RaisesAtOnce(Closures):
    """Lets the user have an error while closures run."""

    @property
    def in_flight(self) -> int:
        return 0


class LeavesNothing(Closures):
    """Does not say what a cut leaves to be done."""

    def undecided(self) -> dict[int, Any]:
        return {}


class ForgetsLost(Closures):
    """Does not hand out again what a lost worker had."""

    def _again(self, number: int, lost_at: float | None = None) -> list[Any]:
        return [] if self._closures[number].failures == 0 else super()._again(number, lost_at)


class ForgivesAll(Closures):
    """Hands a closure out again however many workers were lost with it."""

    def _again(self, number: int, lost_at: float | None = None) -> list[Any]:
        closure = self._closures[number]
        closure.rules = closure.rules._replace(max_deaths=100)
        return super()._again(number, lost_at)


class BlamesTheNext(Closures):
    """Blames a closure that was sent ahead for the loss of its worker, too."""

    def lost(self, rank: int, now: float, how: str = "") -> list[Any]:
        for number in (self.workers[rank].running[1:] if rank in self.workers else ()):
            self._closures[number].deaths += (how,)
        return super().lost(rank, now, how)


class ForgetsSuspects(Closures):
    """Does not hand out again a closure whose worker was lost while it ran."""

    def look(self, now: float) -> list[Any]:
        self._suspects.settled(now)
        return []


class FencesWorkersOnly(Closures):
    """Tells the lost worker, but no server."""

    def lost(self, rank: int, now: float, how: str = "") -> list[Any]:
        return [
            action for action in super().lost(rank, now)
            if not (isinstance(action, Send) and isinstance(action.message, Fence) and action.rank != rank)
        ]


class IgnoresDepartures(Closures):
    """Waits for a worker that has left by itself."""

    def take(self, sender: int, message: Any, now: float) -> list[Any] | None:
        return [] if isinstance(message, Left) else super().take(sender, message, now)


class RepeatsDecidedOfTheLeft(Closures):
    """Hands a decided attempt out again when its worker has left by itself."""

    def take(self, sender: int, message: Any, now: float) -> list[Any] | None:
        if isinstance(message, Left):
            for closure in self._closures.values():
                closure.is_decided &= closure.worker != sender
        return super().take(sender, message, now)


class ReadsAtOnce(Commits):
    """Lets the coordinator read before its write is applied."""

    def unwritten(self, server: int) -> bool:
        return False


class CutsLate(Commits):
    """Names a cut that holds one commit too many."""

    def snapshot(self, shares: Any = None) -> list[Send]:
        return [Send(send.rank, SnapshotRequest(self.number + 1)) for send in super().snapshot(shares)]


class RepeatsSteps(Commits):
    """Gives two attempts the same step of an optimizer."""

    def commit(self, worker: int, closure: int, attempt: int, optimizers: Any) -> Commit:
        commit = super().commit(worker, closure, attempt, optimizers)
        self.iterations.clear()
        return commit


class DropsOnce(Staging):
    """A fence drops what is staged, but not what comes after it."""

    def take(self, sender: int, message: Any) -> list[Any] | None:
        actions = super().take(sender, message)
        self.fenced.clear()
        return actions


class RefusesOnly(Staging):
    """A fence refuses what comes after it, but does not drop what is staged."""

    def take(self, sender: int, message: Any) -> list[Any] | None:
        if isinstance(message, Fence):
            self.fenced.add(message.worker)
            return []
        return super().take(sender, message)


class DropsOfTheLeft(Staging):
    """Drops what a worker has staged that leaves by itself, without the coordinator's word."""

    def take(self, sender: int, message: Any) -> list[Any] | None:
        if isinstance(message, Left):
            self.staged.pop(sender, None)
        return super().take(sender, message)


class KeepsFailed(Staging):
    """Does not drop what a failed function has pushed."""

    def take(self, sender: int, message: Any) -> list[Any] | None:
        return [] if isinstance(message, Drop) else super().take(sender, message)


class PreparesEarly(Staging):
    """Says that an update is there when its first part is."""

    def take(self, sender: int, message: Any) -> list[Any] | None:
        actions = super().take(sender, message)
        if isinstance(message, Push) and actions is not None and sender not in self.fenced:
            return [Send(self.coordinator, Prepared(message.closure, message.attempt))] if message.ordinal == 0 else []
        return actions


class KeepsSlots(Staging):
    """Does not free the slot of an update that has no learning rate."""

    def take(self, sender: int, message: Any) -> list[Any] | None:
        actions = super().take(sender, message)
        return None if actions is None else [action for action in actions if not isinstance(action, Free)]


class SavesLate(Staging):
    """Saves the state of a cut after the next commit."""

    def take(self, sender: int, message: Any) -> list[Any] | None:
        actions = super().take(sender, message)
        if isinstance(message, SnapshotRequest):
            self.late = message.number
            return []
        if isinstance(message, Commit) and actions is not None and "late" in vars(self):
            return [*actions, Save(vars(self).pop("late"), b"")]
        return actions


class SavesEarly(Staging):
    """Saves the state of a cut before the last commit is applied."""

    def take(self, sender: int, message: Any) -> list[Any] | None:
        actions = super().take(sender, message)
        if isinstance(message, Commit) and actions is not None:
            self.late = actions
            return []
        late = vars(self).pop("late", [])
        return actions if actions is None else [*actions, *late]


class CopiesLate(Unsaved):
    """Changes a block without a copy."""

    def next(self, changed_by: Any) -> Ready | None:
        before = dict(self.live)
        ready = super().next(changed_by)
        self.live, self.copied = before, {}
        return None if ready is None else ready._replace(copies=[])


class CopiesOne(Unsaved):
    """Copies the first of the blocks that a commit changes."""

    def next(self, changed_by: Any) -> Ready | None:
        return super().next(lambda apply: changed_by(apply)[:1])


class WaitsForRoom(Unsaved):
    """Waits for room for all that a commit changes, be it saved or not."""

    def next(self, changed_by: Any) -> Ready | None:
        for action in self.waiting[:1]:
            if isinstance(action, Apply) and len(changed_by(action)) > self.limit and (self.live or self.is_stuck):
                self.is_stuck = True
                return None
        return super().next(changed_by)

    is_stuck = False


class Overtakes(Unsaved):
    """Lets what comes behind a commit that waits go first."""

    def next(self, changed_by: Any) -> Ready | None:
        ready = super().next(changed_by)
        if ready is None and len(self.waiting) > 1:
            return Ready(self.waiting.pop(), [])
        return ready


class BeginsEarly(Rounds):
    """Lets functions begin before all servers have the last round."""

    def may_begin(self, *, is_owing: bool) -> bool:
        return not is_owing

    def begin(self, closure: int) -> None:
        self._begun[closure] = self.number


class BeginsInRound(Rounds):
    """Gives a worker its next function while its update waits in the round."""

    def may_begin(self, *, is_owing: bool) -> bool:
        return super().may_begin(is_owing=False)


class TakesLate(Rounds):
    """Adds up updates that are too late."""

    def _is_late(self, attempt: Attempt) -> bool:
        return False


class NeverEndsRounds(Rounds):
    """Waits for updates that do not come."""

    def rest(self, in_flight: int) -> list[Attempt]:
        return []


class AppliesFirst(Staging):
    """Applies one update of a round."""

    def take(self, sender: int, message: Any) -> list[Any] | None:
        actions = super().take(sender, message)
        if isinstance(message, Round) and actions and isinstance(actions[0], ApplyRound):
            _, slots, pushes = actions[0]
            half = ApplyRound(message._replace(parts=message.parts[:1]), slots[:1], pushes[:1])
            return [half, *actions[1:]]
        return actions


BOTH = Schedule((1, 2))
BOUND, OTHER = (Schedule((1, 2), Rules(worker=worker)) for worker in (3, 4))
PARTS = Schedule((1,), parts=2)
POISON = Schedule((1,), Rules(max_deaths=1, on_error="keep"))


class Mutant(NamedTuple):
    """A job that breaks a rule.

    Attributes:
        rule: The rule.
        job: The job.
    """

    rule: str
    job: Job


def one(*, workers: int = 1, **options: Any) -> Job:
    """A job with one closure."""
    return Job((BOTH, "join"), upfront=1, workers=workers, **options)


def inherited(**options: Any) -> Job:
    """A job with two closures, whose one worker may be lost, and another one gets its slots."""
    return Job((BOTH, BOTH, "join"), upfront=2, workers=1, suspicions=1, joins=1, splits=True, inherits=True, **options)


def rounds(*more: Schedule, wanted: int = 2, **options: Any) -> Job:
    """A job with two closures, or more, in rounds."""
    all_of_them = (BOTH, BOTH, *more)
    return Job((*all_of_them, "join"), len(all_of_them), pulls=True, wanted=wanted, **options)


MUTANTS = {
    "decides-unprepared": Mutant("protocol", one(closures=DecidesUnprepared)),
    "takes-old-attempts": Mutant("protocol", one(workers=2, suspicions=1, closures=TakesOldAttempts)),
    "repeats-decided": Mutant("protocol", one(workers=2, kills=1, closures=RepeatsDecided)),
    "frees-early": Mutant("payload", Job((BOTH,) * 3, upfront=3, workers=1, closures=FreesEarly)),
    "ends-early": Mutant("done", one(closures=EndsEarly)),
    "tells-one-server": Mutant("together", one(closures=TellsOneServer)),
    "loses-results": Mutant("result", one(closures=LosesResults)),
    "calls-results-cancelled": Mutant("void", one(closures=CallsResultsCancelled)),
    "raises-at-once": Mutant("errors", Job((BOTH, BOTH, "join"), upfront=2, fails=1, closures=RaisesAtOnce)),
    "leaves-nothing": Mutant("cut", Job((BOTH, "cut", "join"), workers=1, closures=LeavesNothing)),
    "forgets-lost": Mutant("progress", one(workers=2, kills=1, closures=ForgetsLost)),
    "forgives-all": Mutant("guilt", Job((POISON, "join"), upfront=1, workers=2, kills=2, closures=ForgivesAll)),
    "blames-the-next": Mutant(
        "guilt", Job((POISON, POISON, "join"), upfront=2, workers=1, kills=1, prefetch=True, closures=BlamesTheNext)
    ),
    "forgets-suspects": Mutant("progress", one(workers=2, kills=1, closures=ForgetsSuspects)),
    "ignores-departures": Mutant("progress", one(workers=2, leaves=1, closures=IgnoresDepartures)),
    "repeats-decided-of-the-left": Mutant("protocol", one(workers=2, leaves=1, closures=RepeatsDecidedOfTheLeft)),
    "drops-of-the-left": Mutant("protocol", one(leaves=1, staging=DropsOfTheLeft)),
    "fences-workers-only": Mutant("memory", one(kills=1, closures=FencesWorkersOnly)),
    "reads-at-once": Mutant("write", Job((Write((1, 2)), "read"), commits=ReadsAtOnce)),
    "cuts-late": Mutant("protocol", Job((BOTH, "cut"), workers=1, commits=CutsLate)),
    "copies-late": Mutant("cut", Job((BOTH, "cut", BOTH), workers=1, unsaved=CopiesLate)),
    "copies-one": Mutant("cut", Job((BOTH, BOTH, "cut"), upfront=2, workers=1, copies=2, unsaved=CopiesOne)),
    "waits-for-ever": Mutant("progress", Job((BOTH, BOTH, "cut"), upfront=2, workers=1, unsaved=WaitsForRoom)),
    "overtakes": Mutant("done", Job((BOTH, "cut", BOTH), workers=1, copies=0, unsaved=Overtakes)),
    "saves-early": Mutant("cut", Job((BOTH, "cut"), workers=1, staging=SavesEarly)),
    "saves-late": Mutant("cut", Job((BOTH, "cut"), workers=1, staging=SavesLate)),
    "repeats-steps": Mutant("order", Job((BOTH, BOTH), upfront=2, workers=1, commits=RepeatsSteps)),
    "fence-drops-once": Mutant("memory", one(suspicions=1, staging=DropsOnce)),
    "fence-refuses-only": Mutant("memory", one(kills=1, staging=RefusesOnly)),
    "keeps-failed": Mutant("memory", Job((BOTH,), workers=1, fails=1, staging=KeepsFailed)),
    "keeps-slots": Mutant(
        "progress", Job((BOTH, BOTH, BOTH, "join", BOTH, "join"), workers=1, pulls=True, rate=rate_of_first,
                        staging=KeepsSlots)
    ),
    "prepares-early": Mutant("protocol", Job((PARTS,), workers=1, staging=PreparesEarly)),
    "slot-of-the-lost": Mutant("payload", one(suspicions=1, joins=1, splits=True, inherits=True, forgets=False)),
    "slot-in-use": Mutant("payload", inherited(clears=False)),
    "begins-early": Mutant(
        "version", Job((BOTH, Schedule(()), OTHER, "join"), upfront=3, pulls=True, wanted=1, rounds=BeginsEarly)
    ),
    "begins-in-round": Mutant(
        "memory", Job((BOUND, BOUND, "join"), upfront=2, pulls=True, wanted=2, rounds=BeginsInRound)
    ),
    "takes-late": Mutant("version", rounds(wanted=1, rounds=TakesLate)),
    "never-ends-rounds": Mutant("memory", one(workers=2, pulls=True, wanted=2, rounds=NeverEndsRounds)),
    "applies-first": Mutant("done", rounds(staging=AppliesFirst)),
    "worker-does-not-wait": Mutant("own", Job((BOTH, BOTH), upfront=2, workers=1, pulls=True, waits=False)),
}
