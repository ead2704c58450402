"""The coordinator's queue when something comes again: a second attempt, loss or failure, of workers that differ."""

from __future__ import annotations

from collections.abc import Sequence

from mpidist.parameter_server.protocol.messages import Applied, Built, Commit, Finished, Prepared, Send
from mpidist.parameter_server.queue.closures import Closures
from mpidist.parameter_server.queue.commits import Attempt
from mpidist.parameter_server.queue.staleness import Versions
from mpidist.parameter_server.queue.work import ClosureEnd, End, Name, Owing, Rules, Running, Work
from tests.unit.coordinator.test_coordinator_closures import (
    DATA,
    FIRST,
    SECOND,
    SERVERS,
    THIRD,
    at_end,
    done,
    fail,
    finish,
    lose,
    make,
    overdue,
    read,
    schedule,
    take,
    take_inputs,
)


def push(
    closures: Closures, worker: int, closure: int, *, attempt: int = 1, now: float = 0.0,
    servers: tuple[int, ...] = SERVERS,
) -> list[Commit]:
    """A closure that pushes to servers returns. Returns the commits."""
    return commits(take(closures, worker, Finished(closure, attempt, servers, (), b""), now))


def prepare(closures: Closures, server: int, closure: int, *, attempt: int = 1) -> list[Commit]:
    return commits(take(closures, server, Prepared(closure, attempt)))


def commits(actions: Sequence[object]) -> list[Commit]:
    return [one.message for one in actions if isinstance(one, Send) and isinstance(one.message, Commit)]


def making(function: int, label: str = "") -> Work:
    return Work(Name("function", function, b"code"), b"", label=label)


# ------------------------------------------------------------------ attempts


def test_servers_prepare_each_attempt_anew() -> None:
    closures = make((FIRST, SECOND))
    schedule(closures, rules=Rules(retries=1))
    # Both servers have what the first attempt pushed, and its worker is lost before it tells so.
    for server in SERVERS:
        assert prepare(closures, server, 1) == []
    lose(closures, FIRST)
    assert push(closures, SECOND, 1, attempt=2) == []
    assert prepare(closures, 1, 1, attempt=2) == []
    assert len(prepare(closures, 2, 1, attempt=2)) == 2


def test_servers_prepare_an_attempt_after_a_failure_anew() -> None:
    closures = make((FIRST,))
    schedule(closures, rules=Rules(retries=1))
    prepare(closures, 1, 1)
    fail(closures, FIRST, 1)
    assert prepare(closures, 2, 1, attempt=2) == []
    assert push(closures, FIRST, 1, attempt=2) == []
    assert len(prepare(closures, 1, 1, attempt=2)) == 2


def test_what_a_lost_worker_had_finished_and_what_it_ran_are_run_again() -> None:
    closures = make((FIRST, SECOND))
    for _ in range(3):
        schedule(closures)
    # Server 2 has not answered when the worker, which runs the third by now, is lost.
    push(closures, FIRST, 1)
    prepare(closures, 1, 1)
    assert closures.workers[FIRST].running == [3]
    lose(closures, FIRST)
    order = finish(closures, SECOND, 2) + finish(closures, SECOND, 1, attempt=2)
    assert done(order) == [(SECOND, 1), (SECOND, 3)]
    finish(closures, SECOND, 3, attempt=2)
    assert closures.is_done


def test_a_second_loss_makes_a_third_attempt() -> None:
    closures = make((FIRST, SECOND, THIRD))
    schedule(closures)
    assert done(lose(closures, FIRST)) == [(SECOND, 1)]
    # Of the first worker nothing counts, also not when the second is lost, too.
    assert prepare(closures, 1, 1) == []
    assert done(lose(closures, SECOND)) == [(THIRD, 1)]
    assert finish(closures, SECOND, 1, attempt=2) == []
    assert fail(closures, SECOND, 1, attempt=2) == []
    assert finish(closures, THIRD, 1, attempt=3) == [ClosureEnd(1, End.RESULT, b"result")]


def test_losses_are_no_failures_of_a_function_that_is_tried_again() -> None:
    closures = make((FIRST, SECOND))
    schedule(closures, rules=Rules(retries=1))
    lose(closures, FIRST)
    assert done(fail(closures, SECOND, 1, attempt=2)) == [(SECOND, 1)]
    assert fail(closures, SECOND, 1, attempt=3) == [ClosureEnd(1, End.ERROR, b"error", "text")]


def test_the_second_failure_of_an_input_ends_nothing_twice() -> None:
    closures = make((FIRST, SECOND))
    schedule(closures, rules=Rules(on_error="keep"))
    schedule(closures, rules=Rules(on_error="keep"))
    take_inputs(closures, 1, 2, rules=Rules(on_error="keep"))
    assert [one.closure for one in fail(closures, FIRST, 1) if isinstance(one, ClosureEnd)] == [1, 3]
    assert [one.closure for one in fail(closures, SECOND, 2) if isinstance(one, ClosureEnd)] == [2]
    assert closures.is_done


def test_the_slots_of_a_lost_worker_are_in_use_until_its_update_is_applied() -> None:
    """Who joins in its place may get them, and would push over an update that the servers have not applied."""
    closures = make((FIRST, SECOND))
    schedule(closures)
    push(closures, FIRST, 1)
    for server in SERVERS:
        prepare(closures, server, 1)
    lose(closures, FIRST)
    take(closures, 1, Applied(1, 1))
    assert closures.has_work_of(FIRST)
    take(closures, 2, Applied(1, 1))
    assert not closures.has_work_of(FIRST)


# ------------------------------------------------------------------ workers that come and go


def test_what_was_bound_to_the_last_worker_goes_to_who_joins() -> None:
    closures = make((FIRST,))
    schedule(closures)
    schedule(closures, rules=Rules(worker=FIRST))
    lose(closures, FIRST)
    assert done(closures.joined(SECOND, 0.0)) == [(SECOND, 1)]
    assert done(finish(closures, SECOND, 1, attempt=2)) == [(SECOND, 2)]


def test_what_was_bound_to_a_lost_worker_goes_on_where_data_is_left() -> None:
    closures = make((FIRST, SECOND, THIRD))
    read(closures, rules=Rules(worker=FIRST))
    schedule(closures)
    assert done(lose(closures, FIRST)) == [(THIRD, 1)]
    finish(closures, SECOND, 2)
    # It is no longer bound: the end of the data of one worker is not its end.
    assert done(at_end(closures, THIRD, 1, attempt=2)) == [(SECOND, 1)]
    assert done(lose(closures, SECOND)) == [(THIRD, 1)]
    assert at_end(closures, THIRD, 1, attempt=4) == [ClosureEnd(1, End.AT_END, b"error", "text")]


def test_who_joins_has_data_again() -> None:
    closures = make((FIRST,))
    read(closures)
    at_end(closures, FIRST, 1)
    assert closures.is_at_end(DATA)
    read(closures)
    closures.joined(SECOND, 0.0)
    assert not closures.is_at_end(DATA)
    # It was given to the first worker in vain.
    assert done(at_end(closures, FIRST, 2)) == [(SECOND, 2)]


def test_the_time_of_a_function_that_was_sent_ahead_begins_with_it() -> None:
    closures = make((FIRST,), timeout=10.0)
    closures.prefetch = True
    schedule(closures, now=100.0)
    assert overdue(closures, 100.0, 109.0) == []
    schedule(closures, now=109.0)
    # What comes behind it does not make a function younger.
    assert overdue(closures, 109.0, 112.0) == [FIRST]
    assert [one.since for one in closures.running()] == [100.0]
    finish(closures, FIRST, 1, now=112.0)
    assert overdue(closures, 112.0, 121.0) == []
    assert [one.since for one in closures.running()] == [112.0]
    assert overdue(closures, 121.0, 124.0) == [FIRST]


# ------------------------------------------------------------------ reports


def test_a_server_owes_until_it_has_answered_and_then_until_it_has_applied() -> None:
    closures = make((FIRST,))
    schedule(closures)
    push(closures, FIRST, 1, now=5.0)
    assert closures.owing() == [Owing(1, 5.0), Owing(2, 5.0)]
    prepare(closures, 1, 1)
    assert closures.owing() == [Owing(2, 5.0)]
    prepare(closures, 2, 1)
    assert closures.owing() == [Owing(1, 5.0), Owing(2, 5.0)]
    take(closures, 2, Applied(1, 1))
    assert closures.owing() == [Owing(1, 5.0)]
    take(closures, 1, Applied(1, 1))
    assert closures.owing() == []


def test_a_server_owes_since_the_first_of_two_functions() -> None:
    closures = make((FIRST, SECOND))
    schedule(closures)
    schedule(closures)
    push(closures, SECOND, 2, now=5.0, servers=(1,))
    push(closures, FIRST, 1, now=7.0)
    assert closures.owing() == [Owing(1, 5.0), Owing(2, 7.0)]


def test_a_server_owes_nothing_for_an_attempt_that_is_void() -> None:
    closures = make((FIRST, SECOND, THIRD))
    schedule(closures)
    schedule(closures)
    push(closures, FIRST, 1, now=1.0)
    closures.lost(FIRST, 2.0)
    assert closures.owing() == []
    push(closures, SECOND, 2, now=5.0)
    push(closures, THIRD, 1, attempt=2, now=9.0)
    assert closures.owing() == [Owing(1, 5.0), Owing(2, 5.0)]


def test_the_value_that_is_made_first_is_told_of_first() -> None:
    closures = make((FIRST,))
    schedule(closures, now=5.0)
    assert closures.running() == [Running(FIRST, 1, 1, "", 5.0)]
    finish(closures, FIRST, 1)
    closures.resources.build(making(2, "read_all"))
    schedule(closures, now=7.0)
    # The worker makes the value before it runs the function that it has got, too.
    assert closures.running() == [Running(FIRST, 0, 0, "read_all", 0.0)]
    take(closures, FIRST, Built(1), now=9.0)
    assert closures.running() == [Running(FIRST, 2, 1, "", 9.0)]


# ------------------------------------------------------------------ versions


def test_an_attempt_that_begins_again_is_behind_those_that_run() -> None:
    """Its number is the lower one, and the version that it reads the newer one."""
    versions = Versions(staleness=2)
    for closure in (1, 2, 4):
        versions.begin(closure)
    versions.count([Attempt(FIRST, 4, 1, SERVERS, ())])
    versions.end(4)
    versions.end(1)
    versions.begin(3)
    versions.begin(1)
    # The second may still be one update late; the first has read the version before this one.
    offered = Attempt(SECOND, 3, 1, SERVERS, ())
    assert versions.offer(offered) == [offered]
