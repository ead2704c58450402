"""The end of one process when others have died, or it is a second end: what it says, and its exit code."""

from __future__ import annotations

import _thread
import contextlib
import os
import threading
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mpidist.failures import ending
from mpidist.failures.deaths import DISCOVERY_SECONDS
from mpidist.failures.ending import HANDLING_SECONDS, LATER_SECONDS, LEFT_SECONDS
from tests.unit.failures.settable_clock import Clock
from tests.unit.failures.survivor import OTHER_WORKER, SERVER, WORKER, EndedError, Rank


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    rank = Rank(monkeypatch)
    yield rank
    rank.watch.stop()


def test_who_serves_lives_on_until_somebody_dies_whom_it_needs(rank: Rank) -> None:
    rank.serve()
    rank.hear(WORKER, OTHER_WORKER)
    assert (rank.ends, rank.hooks.mourned()) == ([], [])
    begin = rank.clock.now
    rank.hear(SERVER)
    assert rank.ends == rank.exits == [begin + DISCOVERY_SECONDS]
    assert rank.hooks.mourned() == ["process 3"]


def test_two_deaths_are_one_end(rank: Rank, capfd: pytest.CaptureFixture[str]) -> None:
    """Exit functions run once, though the second death comes while the first is found out."""
    rank.clock.after(1, lambda: rank.hear(OTHER_WORKER))
    rank.hear(WORKER)
    assert len(rank.ends) == len(rank.exits) == 1
    text = capfd.readouterr().err
    assert text.count("rank 1 of 3 on host cannot continue: process 1, process 2 terminated unexpectedly") == 1
    assert text.count("This rank was here:\n") == 1


def test_a_rank_that_ends_itself_is_ended_by_nobody(rank: Rank) -> None:
    """Its exit functions would run twice, in two threads."""
    rank.clock.after(1, lambda: setattr(rank.hooks, "ends_itself", True))
    rank.hear(WORKER)
    assert (rank.ends, rank.exits) == ([], [])


@pytest.mark.parametrize("is_raised", [True, False])
def test_a_program_that_got_the_error_may_handle_it(rank: Rank, is_raised: bool) -> None:
    begin = rank.clock.now
    rank.watch.was_raised = is_raised
    rank.hear(WORKER)
    assert rank.ends == [begin + DISCOVERY_SECONDS + (HANDLING_SECONDS if is_raised else 0)]


@pytest.mark.parametrize(("error", "code"), [(ValueError("the cause"), 1), (KeyboardInterrupt(), 130)])
def test_an_error_after_a_death_names_the_dead_once(
    rank: Rank, capfd: pytest.CaptureFixture[str], error: BaseException, code: int
) -> None:
    rank.watch.note(WORKER, "process 1")
    rank.fail(error)
    rank.clock.after(1, lambda: rank.watch.note(OTHER_WORKER, "process 2"))
    assert rank.end() == ("alone", code)
    text = capfd.readouterr().err
    assert text.count("mpidist:") == 1
    assert text.startswith("mpidist: rank 1 of 3 on host cannot continue: process 1 terminated unexpectedly")
    assert type(error).__name__ in text


@pytest.mark.parametrize(("own", "code"), [(None, 1), (4, 4)])
def test_who_comes_to_its_end_after_a_death_has_failed(
    rank: Rank, capfd: pytest.CaptureFixture[str], own: int | None, code: int
) -> None:
    """With its own code, if it has one."""
    rank.hooks.code = own
    rank.watch.note(WORKER, "process 1")
    assert rank.end() == ("alone", code)
    assert "rank 1 of 3 on host has ended without other ranks: process 1" in capfd.readouterr().err


@pytest.mark.parametrize(("own", "code"), [(None, 0), (4, 4)])
def test_who_serves_comes_to_its_end_after_a_death_in_good_order(
    rank: Rank, capfd: pytest.CaptureFixture[str], own: int | None, code: int
) -> None:
    rank.serve()
    rank.hooks.code = own
    rank.watch.note(WORKER, "process 1")
    assert rank.end() == ("alone", code)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(("leads", "dead", "end"), [
    (True, False, ("abort", 4)), (True, True, ("alone", 4)), (False, False, ("alone", 4)), (False, True, ("alone", 4)),
])
def test_whose_code_is_that_of_the_job(rank: Rank, leads: bool, dead: bool, end: tuple[str, int]) -> None:
    """Of who leads, as long as nobody has died: the others must not be ended in the middle of their own ends."""
    ending.tolerate_deaths(leads=leads)
    rank.hooks.code = 4
    if dead:
        rank.watch.note(WORKER, "process 1")
    assert rank.end() == end


def test_a_code_that_all_agree_on_ends_nobody_in_the_middle(rank: Rank) -> None:
    ending.agree_on_exit()
    rank.hooks.code = 4
    assert rank.end() == ("together",)
    assert ending.exit_code() == 4


def leave_by(program: Callable[[], None]) -> None:
    """Call it in a thread below which there are no frames of Python: what it raises leaves a program."""
    before, begins = _thread._count(), threading.Event()

    def begin() -> None:
        begins.set()
        program()

    _thread.start_new_thread(begin, ())
    begins.wait()
    while _thread._count() > before:
        time.sleep(1e-4)


@pytest.mark.parametrize(("codes", "noted", "end"), [
    ((3,), 3, ("abort", 3)),
    ((3, 4), 4, ("abort", 4)),
    ((3, 0), 0, ("together",)),
    ((256,), 0, ("together",)),
    ((-1,), 255, ("abort", 255)),
    (("a text",), 1, ("abort", 1)),
    ((3, None), None, ("together",)),
])
def test_the_last_exit_gives_the_code_as_the_parent_sees_it(
    rank: Rank, codes: tuple[object, ...], noted: int | None, end: tuple[object, ...]
) -> None:
    """The ones before it were caught. None: no exit any more."""
    def program() -> None:
        for code in codes[:-1]:
            # `pytest.raises` would keep it.
            with contextlib.suppress(SystemExit):
                rank.hooks.exit(code)
        if codes[-1] is not None:
            rank.hooks.exit(codes[-1])

    leave_by(program)
    assert rank.hooks.code == noted
    assert rank.end() == end


@pytest.mark.parametrize("code", [None, 3])
def test_a_child_ends_by_itself(rank: Rank, monkeypatch: pytest.MonkeyPatch, code: int | None) -> None:
    """Its errors and exits are no end of its parent's job, nor a farewell."""
    printed: list[str] = []
    rank.hooks.previous_hook = lambda _, error, __: printed.append(str(error))
    monkeypatch.setattr(os, "getpid", lambda: -1)
    if code is None:
        rank.fail(ValueError("of the child"))
        assert printed == ["of the child"]
    rank.hooks.code = code or rank.hooks.code
    assert rank.end() == ("alone", code or 1)


def test_a_rank_that_is_not_the_first_to_wait_speaks_later(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    first = types.SimpleNamespace(is_first_to_end=lambda: False, tell_late=lambda: "")
    monkeypatch.setattr(ending, "WATCHDOG", first)
    monkeypatch.setenv("MPIDIST_TIMEOUT", "7")
    monkeypatch.setenv("MPIDIST_WARN_SECONDS", "1")
    rank.hooks.wait_at_end(7 + LATER_SECONDS)
    with pytest.raises(EndedError):
        rank.hooks.wait_at_end(7.1 + LATER_SECONDS)
    assert not rank.hooks.has_explained
    first.is_first_to_end = lambda: True
    with pytest.raises(EndedError):
        rank.hooks.wait_at_end(7.1)


def test_who_is_awaited_by_others_has_some_seconds_for_its_end(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may find out, and say more."""
    monkeypatch.setattr(ending, "INTERRUPTS", types.SimpleNamespace(why_awaited=lambda: "reduce was left"))
    rank.hooks.wait_at_end(LEFT_SECONDS)
    with pytest.raises(EndedError):
        rank.hooks.wait_at_end(LEFT_SECONDS + 0.1)


class Done:
    """The end of MPI at some time of the clock."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self.clock, self.at = clock, clock.now + seconds

    def wait(self, seconds: float) -> bool:
        self.clock.sleep(max(0.0, min(seconds, self.at - self.clock.now)))
        return self.clock.now >= self.at


@pytest.mark.parametrize(("seconds", "ends"), [(4.0, False), (9.0, True)])
def test_a_death_while_mpi_ends_is_left_to_mpi_for_some_seconds(
    rank: Rank, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], seconds: float, ends: bool
) -> None:
    begin = rank.clock.now
    dies_at = begin + 2
    peers = [
        types.SimpleNamespace(name="rank 0", key=("host", 10, "pid:[1]"), has_died_at_end=lambda: False),
        types.SimpleNamespace(
            name="rank 2", key=("host", 12, "pid:[1]"), has_died_at_end=lambda: rank.clock.now >= dies_at
        ),
    ]
    monkeypatch.setattr(ending, "WATCHDOG", types.SimpleNamespace(peers=lambda: peers))
    done: Any = Done(rank.clock, seconds)
    if not ends:
        rank.hooks._watch_end_of_mpi(done)
        return
    with pytest.raises(EndedError, match="'alone', 1"):
        rank.hooks._watch_end_of_mpi(done)
    assert rank.clock.now == dies_at + DISCOVERY_SECONDS
    assert "rank 1 of 3 on host leaves MPI_Finalize: rank 2 died in it" in capfd.readouterr().err


@pytest.mark.parametrize(("name", "is_ended"), [("mpidist-deaths", True), ("of the program", False)])
def test_mpi_is_not_ended_under_a_thread_of_the_program(
    rank: Rank, monkeypatch: pytest.MonkeyPatch, name: str, is_ended: bool
) -> None:
    ended: list[bool] = []
    monkeypatch.setattr(rank.hooks, "finalize", lambda: ended.append(True))
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name=name, daemon=True)
    alone = [one for one in threading.enumerate() if not one.daemon]
    monkeypatch.setattr(threading, "enumerate", lambda: [*alone, thread])
    thread.start()
    rank.hooks.end_mpi()
    stop.set()
    thread.join()
    assert bool(ended) == is_ended


@pytest.mark.parametrize("aborts", [True, False])
def test_a_thread_aborts_only_where_it_may_call_mpi(rank: Rank, monkeypatch: pytest.MonkeyPatch, aborts: bool) -> None:
    told: list[object] = []
    monkeypatch.setattr(rank.hooks, "abort", lambda code: told.append(("abort", code)))
    monkeypatch.setattr(ending, "WATCHDOG", types.SimpleNamespace(end_others=lambda: told.append("others")))
    monkeypatch.setattr(os, "_exit", told.append)
    rank.hooks.give_up(aborts, 3)
    assert told == [*([("abort", 3)] if aborts else []), "others", 3]


@pytest.mark.parametrize(("serves", "dies", "is_child", "closes"), [
    (True, True, False, True), (True, False, False, False), (False, True, False, False), (True, True, True, False),
])
def test_the_launcher_is_told_of_an_end_alone(
    rank: Rank, monkeypatch: pytest.MonkeyPatch, serves: bool, dies: bool, is_child: bool, closes: bool
) -> None:
    """Where several ranks may end now: it would take each for a death, and tell the others."""
    closed: list[bool] = []
    socket: Any = types.SimpleNamespace(close=lambda *, lets_live: closed.append(lets_live))
    rank.hooks.launcher_socket = socket
    codes: list[int] = []
    awaited: list[object] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.setattr(ending, "await_survivors", lambda page, peers: awaited.append(peers))
    if serves:
        rank.serve()
    if dies:
        rank.watch.note(WORKER, "process 1")
    if is_child:
        monkeypatch.setattr(os, "getpid", lambda: -1)
    end_process: Callable[[int], None] = type(rank.hooks).end_process.__get__(rank.hooks)
    end_process(5)
    assert (codes, closed) == ([5], [True] * closes)
    # Only where the death ends this rank: the others end with it.
    assert len(awaited) == (dies and not serves and not is_child)
