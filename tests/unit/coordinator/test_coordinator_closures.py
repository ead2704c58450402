"""The coordinator's queue: who gets which closure and when, errors, losses, resources, and what breaks the protocol."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable

import pytest

from mpidist.parameter_server.protocol.messages import (
    OWN_WRITE,
    Applied,
    Began,
    Build,
    Built,
    Call,
    Commit,
    CommitStep,
    Define,
    Discard,
    Do,
    Drop,
    Failed,
    Fence,
    Finished,
    Message,
    Ping,
    Pong,
    Prepared,
    Push,
    Send,
    SnapshotDone,
    SnapshotRequest,
    Timed,
)
from mpidist.parameter_server.protocol.references import with_inputs
from mpidist.parameter_server.queue.closures import Action, Closures
from mpidist.parameter_server.queue.commits import Commits, RateError
from mpidist.parameter_server.queue.waiting import SETTLED_SECONDS
from mpidist.parameter_server.queue.work import ClosureEnd, End, Name, ResourceEnd, Rules, Work
from mpidist.parameter_server.worker.dataset_iterator import PassPart

SERVERS = (1, 2)
FIRST, SECOND, THIRD = 3, 4, 5
ANY = Rules()


def make(
    workers: tuple[int, ...] = (), *, prefetch: bool = False, limit: int = 10, timeout: float | None = None,
    rate: Callable[[int, int], float] = lambda optimizer, iteration: 10.0 * optimizer + iteration,
) -> Closures:
    closures = Closures(Commits(0, SERVERS, rate), prefetch=prefetch, limit=limit, timeout=timeout)
    for worker in workers:
        assert closures.joined(worker, 0.0) == [Send(worker, Timed())] * (timeout is not None)
    return closures


def schedule(closures: Closures, *, function: int = 1, now: float = 0.0, rules: Rules = ANY) -> list[Action]:
    return closures.schedule(Work(Name("function", function, b"code"), b"arguments"), rules, now)[1]


def take(closures: Closures, sender: int, message: Message, now: float = 0.0) -> list[Action]:
    actions = closures.take(sender, message, now)
    assert actions is not None
    return actions


def done(actions: list[Action]) -> list[tuple[int, int]]:
    """The worker and the closure of each `Do`."""
    sends = [action for action in actions if isinstance(action, Send)]
    return [(send.rank, send.message.closure) for send in sends if isinstance(send.message, Do)]


def finish(closures: Closures, worker: int, closure: int, *, attempt: int = 1, now: float = 0.0) -> list[Action]:
    """A closure that pushes nothing returns."""
    return take(closures, worker, Finished(closure, attempt, (), (), b"result"), now)


def overdue(closures: Closures, begin: float, end: float) -> list[int]:
    """Who is overdue after a while in which the coordinator looks, and servers answer."""
    for tick in range(round((end - begin) * 10)):
        now = begin + tick / 10
        for action in closures.look(now):
            if isinstance(action, Send) and isinstance(action.message, Ping):
                take(closures, action.rank, Pong(action.message.number), now)
    return closures.overdue()


def lose(closures: Closures, worker: int, now: float = 0.0) -> list[Action]:
    """A worker is lost, and then that is settled."""
    return [*closures.lost(worker, now), *closures.look(now + SETTLED_SECONDS)]


def fail(closures: Closures, worker: int, closure: int, *, attempt: int = 1) -> list[Action]:
    return take(closures, worker, Failed(closure, attempt, b"error", "text"))


DATA = 9


def read(closures: Closures, *, rules: Rules = ANY, data: tuple[int, ...] = (DATA,)) -> list[Action]:
    """Schedule a closure that takes iterators over workers' own data."""
    return closures.schedule(Work(Name("function", 1, b"code"), b"arguments", data=data), rules, 0.0)[1]


def at_end(closures: Closures, worker: int, closure: int, *, attempt: int = 1, data: int = DATA) -> list[Action]:
    return take(closures, worker, Failed(closure, attempt, b"error", "text", data))


def test_function_is_sent_once_to_each_worker() -> None:
    closures = make((FIRST,))
    do = Do(1, 1, 0, 1, b"arguments")
    assert schedule(closures) == [Send(FIRST, Define("function", 1, b"code")), Send(FIRST, do)]
    finish(closures, FIRST, 1)
    assert schedule(closures) == [Send(FIRST, do._replace(closure=2))]
    assert schedule(closures, function=2) == []
    assert finish(closures, FIRST, 2)[1:] == [
        Send(FIRST, Define("function", 2, b"code")), Send(FIRST, do._replace(closure=3, function=2))
    ]
    # Another worker has neither.
    schedule(closures)
    assert [type(action.message) for action in closures.joined(SECOND, 0.0) if isinstance(action, Send)] == [Define, Do]


def test_closures_go_in_order_to_who_is_free_longest() -> None:
    closures = make((FIRST, SECOND))
    assert [done(schedule(closures)) for _ in range(4)] == [[(FIRST, 1)], [(SECOND, 2)], [], []]
    assert done(finish(closures, SECOND, 2)) == [(SECOND, 3)]
    assert done(finish(closures, FIRST, 1)) == [(FIRST, 4)]
    finish(closures, SECOND, 3)
    finish(closures, FIRST, 4)
    assert done(schedule(closures)) == [(SECOND, 5)]


def test_priority_goes_first() -> None:
    closures = make()
    for priority in (0, 2, 1, 2):
        schedule(closures, rules=Rules(priority=priority))
    order = done(closures.joined(FIRST, 0.0))
    while not closures.is_done:
        order += done(finish(closures, FIRST, order[-1][1]))
    assert [closure for _, closure in order] == [2, 4, 3, 1]


def test_bound_closure_waits_for_its_worker_while_that_lives() -> None:
    closures = make((FIRST, SECOND))
    schedule(closures)
    bound = Rules(worker=FIRST)
    assert schedule(closures, rules=bound) == []
    assert done(schedule(closures)) == [(SECOND, 3)]
    assert done(finish(closures, FIRST, 1)) == [(FIRST, 2)]
    schedule(closures, rules=bound)
    assert finish(closures, SECOND, 3) == [ClosureEnd(3, End.RESULT, b"result")]
    # Then any other one takes it, and what is bound to the dead later.
    assert done(lose(closures, FIRST)) == [(SECOND, 4)]
    # This one the dead had run.
    assert done(finish(closures, SECOND, 4)) == [(SECOND, 2)]
    schedule(closures, rules=bound)
    assert done(finish(closures, SECOND, 2, attempt=2)) == [(SECOND, 5)]


def test_update_is_decided_when_all_of_its_servers_are_prepared() -> None:
    closures = make((FIRST,))
    schedule(closures)
    assert take(closures, 2, Prepared(1, 1)) == []
    assert take(closures, FIRST, Finished(1, 1, SERVERS, (1, 0, 1), b"result")) == []
    commit = Commit(1, FIRST, 1, 1, (CommitStep(1, 0, 10.0), CommitStep(0, 0, 0.0), CommitStep(1, 1, 11.0)))
    assert take(closures, 1, Prepared(1, 1)) == [Send(1, commit), Send(2, commit)]
    assert closures.commits.iterations == {1: 2, 0: 1}
    assert take(closures, 1, Applied(1, 1)) == []
    assert not closures.is_done
    assert take(closures, 2, Applied(1, 1)) == [ClosureEnd(1, End.RESULT, b"result")]
    assert closures.is_done


def test_worker_runs_one_closure_ahead_of_what_is_applied() -> None:
    closures = make((FIRST,))
    for _ in range(3):
        schedule(closures)
    slots = []
    for closure in (1, 2):
        sends = take(closures, FIRST, Finished(closure, 1, (1,), (), b""))
        slots += [send.message.slot for send in sends if isinstance(send, Send) and isinstance(send.message, Do)]
    # Its first update lies in slot 0, its second in slot 1: the third has to wait.
    assert slots == [1]
    take(closures, 1, Prepared(1, 1))
    assert done(take(closures, 1, Prepared(2, 1))) == []
    freed = take(closures, 1, Applied(1, 1))
    assert freed == [ClosureEnd(1, End.RESULT), Send(FIRST, Do(3, 1, 0, 1, b"arguments"))]


def test_prefetch_gives_the_next_closure_to_who_is_busy_if_nobody_is_free() -> None:
    closures = make((FIRST, SECOND), prefetch=True)
    starts = [[(FIRST, 1)], [(SECOND, 2)], [(FIRST, 3)], [(SECOND, 4)], []]
    assert [done(schedule(closures)) for _ in starts] == starts
    assert done(finish(closures, SECOND, 2)) == [(SECOND, 5)]


def test_lost_worker_is_fenced_and_its_closures_go_first() -> None:
    closures = make((FIRST, SECOND))
    for _ in range(3):
        schedule(closures)
    fence = Fence(FIRST)
    assert lose(closures, FIRST) == [Send(1, fence), Send(2, fence), Send(FIRST, fence)]
    assert lose(closures, FIRST) == []
    assert done(finish(closures, SECOND, 2)) == [(SECOND, 1)]
    # What the lost one says does not count, nor what servers say about it.
    assert finish(closures, FIRST, 1) == []
    assert fail(closures, FIRST, 1) == []
    assert take(closures, 1, Prepared(1, 1)) == []
    take(closures, SECOND, Finished(1, 2, (1,), (), b""))
    assert take(closures, 1, Prepared(1, 2)) == [Send(1, Commit(1, SECOND, 1, 2, ()))]


def test_decided_attempt_of_a_lost_worker_goes_on() -> None:
    closures = make((FIRST, SECOND))
    schedule(closures)
    take(closures, 1, Prepared(1, 1))
    take(closures, FIRST, Finished(1, 1, (1,), (), b"result"))
    assert done(lose(closures, FIRST)) == []
    assert take(closures, 1, Applied(1, 1)) == [ClosureEnd(1, End.RESULT, b"result")]


def test_first_error_is_raised_once_after_all_that_runs_has_ended() -> None:
    closures = make((FIRST, SECOND))
    for _ in range(4):
        schedule(closures)
    assert fail(closures, FIRST, 1) == [
        ClosureEnd(1, End.ERROR, b"error", "text"), Send(FIRST, Do(3, 1, 0, 1, b"arguments"))
    ]
    assert closures.error == ClosureEnd(1, End.ERROR, b"error", "text")
    assert closures.cancel() == [ClosureEnd(4, End.CANCELLED)]
    with pytest.raises(RuntimeError, match="2 closures are in flight"):
        closures.take_error()
    with pytest.raises(RuntimeError, match="cannot be scheduled while closures are cancelled"):
        schedule(closures)
    # A second failure is seen by its own value only; what runs and succeeds, succeeds; what is lost is not run again.
    assert fail(closures, SECOND, 2) == [ClosureEnd(2, End.ERROR, b"error", "text")]
    assert lose(closures, FIRST)[-1] == ClosureEnd(3, End.CANCELLED)
    assert closures.take_error() == ClosureEnd(1, End.ERROR, b"error", "text")
    assert closures.take_error() is None
    assert done(schedule(closures)) == [(SECOND, 5)]


def take_inputs(closures: Closures, *inputs: int, rules: Rules = ANY) -> list[Action]:
    """Schedule a closure whose arguments take the results of others."""
    return closures.schedule(Work(Name("function", 1, b"code"), b"arguments"), rules, 0.0, inputs)[1]


def test_a_closure_begins_when_all_its_inputs_are_there() -> None:
    closures = make((FIRST, SECOND), limit=2)
    schedule(closures)
    schedule(closures)
    assert take_inputs(closures, 2, 1) == []
    assert (closures.in_flight, closures.is_full, closures.is_done) == (2, False, False)
    assert take_inputs(closures, 3) == []
    assert closures.is_full, "what waits for an input takes a place in the queue"
    assert done(take(closures, FIRST, Finished(1, 1, (), (), b"one"))) == []
    actions = take(closures, SECOND, Finished(2, 1, (), (), b"two"))
    # In the order in which the arguments name them.
    do = Do(3, 1, 0, 1, with_inputs(b"arguments", [b"two", b"one"]))
    assert actions == [ClosureEnd(2, End.RESULT, b"two"), Send(FIRST, do)]
    # Lost, and run again with the same arguments.
    again = lose(closures, FIRST)
    assert again[-1] == Send(SECOND, do._replace(attempt=2))
    assert done(finish(closures, SECOND, 3, attempt=2)) == [(SECOND, 4)]
    finish(closures, SECOND, 4)
    assert closures.is_done


def test_a_closure_ends_as_its_input_that_has_no_result() -> None:
    closures = make((FIRST, SECOND))
    schedule(closures, rules=Rules(on_error="keep"))
    schedule(closures)
    take_inputs(closures, 1, 2)
    take_inputs(closures, 3)
    ends = [ClosureEnd(number, End.ERROR, b"error", "text") for number in (1, 3, 4)]
    assert fail(closures, FIRST, 1) == ends
    # The first has kept its error; the one that took its result has not.
    assert closures.error == ends[1]
    assert closures.cancel() == []
    finish(closures, SECOND, 2)
    assert closures.is_done
    assert closures.take_error() == ends[1]


def test_a_cancellation_ends_what_waits_for_an_input() -> None:
    closures = make((FIRST, SECOND))
    schedule(closures)
    schedule(closures)
    take_inputs(closures, 2)
    schedule(closures)
    assert done(fail(closures, FIRST, 1)) == [(FIRST, 4)]
    assert closures.cancel() == [ClosureEnd(3, End.CANCELLED)]
    assert finish(closures, SECOND, 2) == [ClosureEnd(2, End.RESULT, b"result")]
    finish(closures, FIRST, 4)
    assert closures.take_error() is not None
    assert closures.is_done


def test_kept_error_stops_nobody() -> None:
    closures = make((FIRST,))
    schedule(closures, rules=Rules(on_error="keep"))
    assert fail(closures, FIRST, 1) == [ClosureEnd(1, End.ERROR, b"error", "text")]
    assert closures.error is None


def test_failed_function_is_tried_again() -> None:
    closures = make((FIRST,))
    schedule(closures, rules=Rules(retries=2))
    schedule(closures)
    assert done(fail(closures, FIRST, 1)) == [(FIRST, 1)]
    assert done(fail(closures, FIRST, 1, attempt=2)) == [(FIRST, 1)]
    assert fail(closures, FIRST, 1, attempt=3)[0] == ClosureEnd(1, End.ERROR, b"error", "text")
    assert closures.error is not None


def test_failed_function_is_not_tried_again_after_a_cancellation() -> None:
    closures = make((FIRST, SECOND))
    schedule(closures, rules=Rules(retries=2))
    schedule(closures)
    fail(closures, SECOND, 2)
    closures.cancel()
    assert fail(closures, FIRST, 1) == [ClosureEnd(1, End.ERROR, b"error", "text")]
    assert closures.take_error() == ClosureEnd(2, End.ERROR, b"error", "text")


def test_closure_at_the_end_of_its_data_goes_to_who_has_some_left() -> None:
    closures = make((FIRST, SECOND))
    for _ in range(3):
        read(closures)
    # The first worker gets nothing more of this data, though it is free.
    assert at_end(closures, FIRST, 1) == []
    assert not closures.is_at_end(DATA)
    assert done(finish(closures, SECOND, 2)) == [(SECOND, 1)]
    # What needs none, or that of the first worker alone, does not mind.
    assert done(schedule(closures)) == [(FIRST, 4)]
    assert read(closures, rules=Rules(worker=FIRST)) == []
    assert done(finish(closures, FIRST, 4)) == [(FIRST, 5)]
    assert at_end(closures, FIRST, 5) == [ClosureEnd(5, End.AT_END, b"error", "text")]
    # When it has ended everywhere, closures end in vain, one at a time and without an error.
    actions = at_end(closures, SECOND, 1, attempt=2)
    assert actions[0] == ClosureEnd(1, End.AT_END, b"error", "text")
    assert closures.is_at_end(DATA)
    ((worker, closure),) = done(actions)
    assert closure == 3
    assert at_end(closures, worker, 3) == [ClosureEnd(3, End.AT_END, b"error", "text")]
    assert (closures.is_done, closures.error) == (True, None)


def test_end_of_data_is_of_one_iterator_and_of_workers_that_live() -> None:
    closures = make((FIRST, SECOND))
    read(closures)
    schedule(closures)
    assert at_end(closures, FIRST, 1) == []
    assert done(read(closures, data=(DATA + 1,))) == [(FIRST, 3)]
    read(closures, data=(DATA, DATA + 1))
    # Who has data left is lost: the other one may try, and that is the end.
    assert done(finish(closures, FIRST, 3)) == []
    assert done(lose(closures, SECOND)) == [(FIRST, 1)]
    assert closures.is_at_end(DATA)
    assert done(at_end(closures, FIRST, 1, attempt=2)) == [(FIRST, 2)]
    # A resource that has the iterator inside: where the closure may run is not known.
    assert not closures.is_at_end(DATA + 2)
    assert at_end(closures, FIRST, 2, attempt=2, data=DATA + 2)[0] == ClosureEnd(2, End.AT_END, b"error", "text")


def test_what_takes_the_value_of_a_closure_at_the_end_ends_with_it() -> None:
    closures = make((FIRST,))
    read(closures)
    take_inputs(closures, 1)
    assert at_end(closures, FIRST, 1) == [ClosureEnd(number, End.AT_END, b"error", "text") for number in (1, 2)]
    assert closures.is_done


def test_closure_at_the_end_of_its_data_is_not_run_again_after_a_cancellation() -> None:
    closures = make((FIRST, SECOND))
    read(closures)
    schedule(closures)
    fail(closures, SECOND, 2)
    closures.cancel()
    assert at_end(closures, FIRST, 1) == [ClosureEnd(1, End.CANCELLED)]
    assert closures.take_error() == ClosureEnd(2, End.ERROR, b"error", "text")


def test_dropped_iterator_has_no_end() -> None:
    closures = make((FIRST,))
    number, _ = closures.resources.build(Work(Name("function", 1, b"code"), b""))
    read(closures, data=(number,))
    at_end(closures, FIRST, 1, data=number)
    closures.discard("resource", number)
    assert closures.workers[FIRST].ended == set()


def test_loss_does_not_count_as_failure() -> None:
    closures = make((FIRST, SECOND))
    schedule(closures, rules=Rules(retries=0))
    assert done(lose(closures, FIRST)) == [(SECOND, 1)]
    assert closures.error is None


def test_closure_that_takes_too_long() -> None:
    closures = make((FIRST, SECOND), timeout=10.0)
    schedule(closures, now=100.0)
    assert overdue(closures, 100.0, 105.0) == []
    schedule(closures, now=105.0)
    schedule(closures, now=105.0)
    assert overdue(closures, 105.0, 110.0) == []
    assert overdue(closures, 110.0, 112.0) == [FIRST]
    finish(closures, FIRST, 1, now=112.0)
    # The third has begun now; and who runs nothing is never overdue.
    assert overdue(closures, 112.0, 117.0) == [SECOND]
    finish(closures, SECOND, 2, now=117.0)
    assert overdue(closures, 117.0, 122.0) == []
    assert overdue(closures, 122.0, 130.0) == [FIRST]
    without = make((FIRST,))
    schedule(without)
    assert overdue(without, 0.0, 100.0) == []


def test_a_function_has_its_time_from_when_it_has_begun() -> None:
    closures = make(timeout=10.0)
    assert closures.joined(FIRST, 0.0) == [Send(FIRST, Timed())]
    schedule(closures)
    assert overdue(closures, 0.0, 9.0) == []
    take(closures, FIRST, Began(1, 1, is_loaded=False))
    assert overdue(closures, 9.0, 100.0) == []
    take(closures, FIRST, Began(1, 1, is_loaded=True))
    # What an earlier attempt has sent, or one that is lost, changes nothing.
    assert overdue(closures, 100.0, 109.0) == []
    take(closures, FIRST, Began(1, 0, is_loaded=True))
    take(closures, SECOND, Began(1, 1, is_loaded=True))
    assert overdue(closures, 109.0, 112.0) == [FIRST]


def test_nobody_is_asked_while_nothing_runs() -> None:
    closures = make((FIRST,), timeout=10.0)
    assert closures.look(5.0) == []
    schedule(closures, now=6.0)
    assert closures.look(6.0) == [Send(1, Ping(1)), Send(2, Ping(1))]


def test_making_a_resource_takes_any_time() -> None:
    closures = make((FIRST,), timeout=10.0)
    closures.resources.build(Work(Name("function", 1, b"code"), b""))
    schedule(closures, now=0.0)
    assert overdue(closures, 0.0, 100.0) == []
    take(closures, FIRST, Built(1), now=100.0)
    assert overdue(closures, 100.0, 110.0) == []
    assert overdue(closures, 110.0, 112.0) == [FIRST]


def test_queue_is_bounded() -> None:
    closures = make((FIRST,), limit=2)
    was_full = []
    for _ in range(4):
        was_full.append(closures.is_full)
        schedule(closures)
    assert was_full == [False, False, False, True]
    finish(closures, FIRST, 1)
    finish(closures, FIRST, 2)
    assert not closures.is_full


def test_resources_are_made_on_all_workers_and_on_who_joins() -> None:
    closures = make((FIRST, SECOND))
    number, sends = closures.resources.build(Work(Name("function", 1, b"code"), b"arguments"))
    build = Build(number, 1, b"arguments")
    assert [send for send in sends if isinstance(send.message, Build)] == [Send(FIRST, build), Send(SECOND, build)]
    assert take(closures, FIRST, Built(number)) == [ResourceEnd(number, FIRST, End.RESULT)]
    assert take(closures, SECOND, Built(number, b"error", "text")) == [
        ResourceEnd(number, SECOND, End.ERROR, b"error", "text")
    ]
    # A resource that cannot be made is nobody's error but of the closures that use it.
    assert closures.error is None
    assert lose(closures, SECOND)[-1] == ResourceEnd(number, SECOND, End.CANCELLED)
    assert take(closures, SECOND, Built(number)) == []
    schedule(closures)
    schedule(closures)
    joined = closures.joined(THIRD, 0.0)
    assert [type(action.message) for action in joined if isinstance(action, Send)] == [Define, Build, Do]
    discard = Discard("resource", number)
    assert closures.discard("resource", number) == [Send(FIRST, discard), Send(THIRD, discard)]
    assert take(closures, THIRD, Built(number)) == []
    assert lose(closures, THIRD)[-1] != ResourceEnd(number, THIRD, End.CANCELLED)


def test_what_a_function_names_is_sent_before_it_and_once_to_each_worker() -> None:
    closures = make((FIRST,))
    function, one, two = Name("function", 1, b"f"), Name("variable", 1, b"v"), Name("variable", 2, b"w")
    work = Work(function, b"arguments", captured=(one,), named=(two,))
    sent = [[action.message for action in closures.schedule(work, ANY, 0.0)[1] if isinstance(action, Send)]]
    sent.append([action.message for action in finish(closures, FIRST, 1) if isinstance(action, Send)])
    closures.schedule(work, ANY, 0.0)
    sent.append([action.message for action in closures.joined(SECOND, 0.0) if isinstance(action, Send)])
    do = Do(1, 1, 0, 1, b"arguments")
    defines = [Define(*two), Define(*one), Define(*function)]
    assert sent == [[*defines, do], [], []]
    closures.schedule(work, ANY, 0.0)
    finish(closures, FIRST, 2)
    # The second worker has got the third closure, and with it all of them.
    assert closures.discard("variable", 2) == [Send(rank, Discard("variable", 2)) for rank in (FIRST, SECOND)]
    assert closures.discard("variable", 2) == []


def test_own_writes_take_their_place_among_commits() -> None:
    closures = make((FIRST,))
    commits = closures.commits
    slot = commits.free_slot()
    assert slot == 0
    push, commit = Push(1, OWN_WRITE, 0, 0, True), Commit(1, 0, 1, OWN_WRITE, ())
    assert commits.write(0, [2]) == [Send(2, push), Send(2, commit)]
    assert commits.free_slot() == 1
    with pytest.raises(RuntimeError, match="expected a free slot for a write, got slot 0"):
        commits.write(0, [1])
    commits.write(1, SERVERS)
    assert commits.free_slot() is None
    assert (commits.unwritten(1), commits.unwritten(2)) == (True, True)
    assert take(closures, 1, Applied(2, OWN_WRITE)) == []
    assert (commits.unwritten(1), commits.unwritten(2)) == (False, True)
    take(closures, 2, Applied(1, OWN_WRITE))
    assert commits.free_slot() == 0
    take(closures, 2, Applied(2, OWN_WRITE))
    assert not commits.unwritten(2)
    with pytest.raises(RuntimeError, match="server of rank 2 has applied write 2"):
        take(closures, 2, Applied(2, OWN_WRITE))


def test_cut_is_whole_when_all_servers_have_saved() -> None:
    closures = make()
    commits = closures.commits
    commits.write(0, [1])
    assert commits.snapshot() == [Send(1, SnapshotRequest(1)), Send(2, SnapshotRequest(1))]
    with pytest.raises(RuntimeError, match=r"ranks \[1, 2\] are still saving"):
        commits.snapshot()
    take(closures, 2, SnapshotDone(1))
    assert commits.saving == {1}
    take(closures, 1, SnapshotDone(1))
    assert commits.saving == set()
    with pytest.raises(RuntimeError, match="server of rank 1 sends SnapshotDone"):
        take(closures, 1, SnapshotDone(1))


def test_what_no_commit_holds_is_left_by_a_cut() -> None:
    closures = make((FIRST,))
    for function in (1, 2, 3):
        schedule(closures, function=function, rules=Rules(priority=-function))
    assert list(closures.undecided()) == [1, 2, 3]
    take(closures, FIRST, Finished(1, 1, (1,), (), b""))
    take(closures, 1, Prepared(1, 1))
    assert closures.undecided() == {
        function: (Work(Name("function", function, b"code"), b"arguments"), Rules(priority=-function))
        for function in (2, 3)
    }


def rate_of_first(optimizer: int, iteration: int) -> float:
    if iteration == 1:
        raise ZeroDivisionError("no second step")
    return math.nan if iteration else 0.5


def test_update_without_a_learning_rate_is_dropped_and_fails() -> None:
    closures = make((FIRST,), rate=rate_of_first)
    schedule(closures)
    schedule(closures)
    for server in SERVERS:
        take(closures, server, Prepared(1, 1))
    drop = Drop(FIRST, 1, 1)
    # Of two steps the second has none: nothing is counted.
    assert take(closures, FIRST, Finished(1, 1, SERVERS, (0, 0), b""))[:2] == [Send(1, drop), Send(2, drop)]
    assert (closures.commits.number, closures.commits.iterations) == (0, {})
    assert take(closures, 1, Applied(1, 1)) == []
    (end,) = take(closures, 2, Applied(1, 1))
    assert isinstance(end, ClosureEnd)
    assert (end.closure, end.end, closures.error) == (1, End.ERROR, end)
    assert "ZeroDivisionError: no second step" in end.traceback
    with pytest.raises(RateError, match="of optimizer 0 at its step 1: the schedule raises Zero"):
        raise pickle.loads(end.payload)
    closures.commits.iterations[0] = 2
    with pytest.raises(RateError, match="optimizer 0 at its step 2: expected a number, got nan"):
        closures.commits.commit(FIRST, 2, 1, (0,))


def test_a_server_could_not_change_a_variable() -> None:
    closures = make((FIRST,))
    schedule(closures, rules=Rules(retries=2))
    for server in SERVERS:
        take(closures, server, Prepared(1, 1))
    take(closures, FIRST, Finished(1, 1, SERVERS, (), b"result"))
    assert take(closures, 1, Applied(1, 1, b"error")) == []
    # It is not run again: the rest of its update counts.
    assert take(closures, 2, Applied(1, 1)) == [ClosureEnd(1, End.ERROR, b"error")]
    assert closures.error == ClosureEnd(1, End.ERROR, b"error")


@pytest.mark.parametrize(("sender", "message", "text"), [
    (FIRST, Finished(2, 1, (), (), b""), r"attempt 1 of closure 2: expected .* the first of the closures \[1\]"),
    (FIRST, Failed(1, 2, b"", ""), "attempt 2 of closure 1: expected the current attempt"),
    (SECOND, Finished(1, 1, (), (), b""), r"first of the closures \[\]"),
    (1, Applied(1, 1), "expected one of each server for each commit"),
    (1, Applied(7, 1), "expected one of each server for each commit"),
])
def test_breach_of_the_protocol(sender: int, message: Message, text: str) -> None:
    closures = make((FIRST, SECOND))
    schedule(closures)
    with pytest.raises(RuntimeError, match=text):
        closures.take(sender, message, 0.0)


def test_other_messages_are_somebody_elses() -> None:
    assert make().take(1, Call(1, "x", b""), 0.0) is None


def test_what_a_worker_has_finished_is_decided_in_its_order() -> None:
    """Else a place in its data could count a closure that is void, with its worker, and not applied."""
    closures = make((FIRST, SECOND), prefetch=True)
    closures.resources.positions.begin(DATA, {FIRST: [PassPart(1, 0)]})
    for _ in range(4):
        read(closures)
    assert closures.workers[FIRST].running == [1, 3]
    assert take(closures, FIRST, Finished(1, 1, SERVERS, (), b"one", ((DATA, 0, 1),))) == []
    # It pushes nothing, so nobody is waited for but the closure before it.
    assert done(finish_reading(closures, 3, 2)) == []
    assert closures.resources.positions.left(DATA) == [PassPart(1, 0)]
    assert list(closures.undecided()) == [1, 2, 3, 4]
    assert take(closures, 1, Prepared(1, 1)) == []
    actions = take(closures, 2, Prepared(1, 1))
    assert [send.message for send in actions[:2] if isinstance(send, Send)] == [Commit(1, FIRST, 1, 1, ())] * 2
    assert ClosureEnd(3, End.RESULT, b"result") in actions
    assert closures.resources.positions.left(DATA) == [PassPart(1, 0, 2)]


def test_place_in_the_data_of_a_lost_worker_stays() -> None:
    closures = make((FIRST, SECOND), prefetch=True)
    closures.resources.positions.begin(DATA, {FIRST: [PassPart(2, 0)], SECOND: [PassPart(2, 1)]})
    for _ in range(4):
        read(closures)
    finish_reading(closures, 1, 1)
    take(closures, FIRST, Finished(3, 1, SERVERS, (), b"result", ((DATA, 0, 2),)))
    lose(closures, FIRST)
    assert closures.resources.positions.left(DATA) == [PassPart(2, 0, 1), PassPart(2, 1)]


def finish_reading(closures: Closures, closure: int, place: int) -> list[Action]:
    return take(closures, FIRST, Finished(closure, 1, (), (), b"result", ((DATA, 0, place),)))
