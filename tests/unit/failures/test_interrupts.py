"""Interrupts at their times, by a clock that the tests set: heard late, twice, and between calls."""

from __future__ import annotations

import os
import signal
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mpidist.comm.calls.order import CallOrder
from mpidist.comm.group.solo import SoloCommunicator
from mpidist.failures import interrupts
from mpidist.failures.interrupts import PATIENCE_SECONDS, Interrupts
from tests.unit.failures.settable_clock import Clock

HANDLED_SECONDS = interrupts._HANDLED_SECONDS


class Program:
    """A program with interrupts of its own, which notes why it would end the job, and when."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.interrupts, self.order = clock, Interrupts(), SoloCommunicator().order
        self.ends: list[tuple[float, str]] = []
        self.interrupts._end_job = self.end
        self.interrupts.add(self.order)

    def end(self, why: str) -> None:
        """Note why, where the job would end."""
        self.ends.append((self.clock.now, why))

    def share(self) -> CallOrder:
        """From now on there are other ranks in its calls."""
        self.order.is_alone = False
        self.interrupts.share(self.end)
        return self.order

    def signal(self) -> None:
        """The main thread handles a signal."""
        signal.raise_signal(signal.SIGINT)

    def hear(self) -> None:
        """A thread of ours hears a signal."""
        self.interrupts._hear()

    def call(self, *, raised: bool, heard: int, later: float = 0.0) -> None:
        """A call, in which a signal is handled or not, and then heard by several threads at once."""
        with self.order.during("a call"):
            if raised:
                self.signal()
            self.clock.sleep(later)
            for number in range(heard - 1):
                # In the middle of what the first one does.
                self.clock.after(0.001 * (number + 1), self.hear)
            self.hear()


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Iterator[Program]:
    clock = Clock()

    class Timer:
        """A timer by the clock, in the thread of the test."""

        def __init__(self, seconds: float, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
            self.seconds, self.function, self.arguments = seconds, function, arguments
            self.is_cancelled = False

        def run(self) -> None:
            if not self.is_cancelled:
                self.function(*self.arguments)

        def start(self) -> None:
            clock.after(self.seconds, self.run)

        def cancel(self) -> None:
            self.is_cancelled = True

    clock.put_into(monkeypatch, interrupts)
    monkeypatch.setattr(interrupts, "threading", types.SimpleNamespace(
        Timer=Timer, main_thread=threading.main_thread, current_thread=threading.current_thread
    ))
    monkeypatch.setattr(interrupts, "WATCH", types.SimpleNamespace(hear=lambda *_: None))
    program = Program(clock)
    # Nobody else hears these signals.
    woken = signal.set_wakeup_fd(-1)
    before = signal.signal(signal.SIGINT, program.interrupts.take)
    yield program
    signal.signal(signal.SIGINT, before)
    signal.set_wakeup_fd(woken)


def test_what_is_heard_long_after_it_was_handled_ends_nothing(program: Program) -> None:
    with pytest.raises(KeyboardInterrupt):
        program.call(raised=True, heard=1, later=2 * HANDLED_SECONDS)
    assert program.ends == []


def test_what_never_gets_to_the_main_thread_ends_the_job(program: Program) -> None:
    with pytest.raises(KeyboardInterrupt):
        program.call(raised=True, heard=1)
    program.clock.sleep(1)
    begin = program.clock.now
    program.call(raised=False, heard=1)
    ((at, why),) = program.ends
    assert "was interrupted, and its call has not ended within 5 s, the job ends" in why
    assert PATIENCE_SECONDS <= at - begin < PATIENCE_SECONDS + 2 * HANDLED_SECONDS


def test_what_is_heard_outside_of_calls_ends_nothing(program: Program) -> None:
    """A long instruction of the program's: the handler comes after it."""
    program.hear()
    assert program.ends == []


def test_two_signals_and_one_run_of_the_handler(program: Program) -> None:
    """What comes after them is judged as before."""
    with pytest.raises(KeyboardInterrupt):
        program.call(raised=True, heard=2)
    assert program.ends == []
    with pytest.raises(KeyboardInterrupt):
        program.call(raised=True, heard=1, later=2 * HANDLED_SECONDS)
    assert program.ends == []
    program.clock.sleep(1)
    program.call(raised=False, heard=1)
    assert len(program.ends) == 1


def test_a_second_signal_in_a_call_that_runs_no_handler_ends_the_job_at_once(program: Program) -> None:
    begin = program.clock.now
    with program.order.during("a call"):
        program.clock.after(1, program.hear)
        program.hear()
    at, why = program.ends[0]
    assert "was interrupted twice within one call" in why
    assert 1 <= at - begin < 1 + 2 * HANDLED_SECONDS


def test_two_calls_that_are_handled_late_are_no_two_signals_in_one(program: Program) -> None:
    for _ in range(2):
        program.clock.sleep(1)
        program.clock.after(1, program.signal)
        with pytest.raises(KeyboardInterrupt):
            program.call(raised=False, heard=1)
    assert program.ends == []


def test_signals_from_before_there_were_ranks_do_not_count(program: Program) -> None:
    """Nobody has heard them: they would stand for some that get to no handler."""
    with pytest.raises(KeyboardInterrupt):
        program.signal()
    program.clock.sleep(1)
    program.share()
    program.call(raised=False, heard=1)
    assert len(program.ends) == 1


def test_a_program_handler_that_hears_a_signal_ends_nothing(program: Program) -> None:
    own: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: own.append(number))
    program.call(raised=False, heard=1)
    assert program.ends == []


def test_one_interrupt_of_all_ranks_is_raised_once(program: Program) -> None:
    """Another rank's came with a call, and this rank's own is late. The next one counts."""
    program.share()
    with pytest.raises(KeyboardInterrupt):
        program.interrupts.deliver()
    program.clock.sleep(PATIENCE_SECONDS / 2)
    program.signal()
    assert not program.interrupts.is_asked
    program.signal()
    assert program.interrupts.is_asked


@pytest.mark.parametrize("why", ["own", "asked", "late", "forgotten"])
def test_an_interrupt_that_nobody_expects_counts(program: Program, why: str) -> None:
    program.share()
    if why == "asked":
        program.signal()
        assert program.interrupts.is_asked
    with pytest.raises(KeyboardInterrupt):
        program.interrupts.deliver(is_own=why == "own")
    assert not program.interrupts.is_asked
    if why == "late":
        program.clock.sleep(PATIENCE_SECONDS)
    if why == "forgotten":
        program.interrupts.forget()
    program.signal()
    assert program.interrupts.is_asked


def test_where_no_call_comes_it_is_raised_after_some_seconds(program: Program) -> None:
    program.share()
    program.signal()
    begin = program.clock.now
    with pytest.raises(KeyboardInterrupt):
        program.clock.run()
    assert program.clock.now == begin + PATIENCE_SECONDS
    assert not program.interrupts.is_asked
    assert program.ends == []
    # The next one is asked for anew.
    program.signal()
    assert program.interrupts.is_asked


def test_a_second_interrupt_between_calls_is_raised_at_once(program: Program) -> None:
    program.share()
    program.signal()
    with pytest.raises(KeyboardInterrupt):
        program.signal()
    assert not program.interrupts.is_asked
    program.clock.run()
    assert program.ends == []


def test_a_second_interrupt_within_a_call_of_ranks_ends_the_job(program: Program) -> None:
    with program.share().during("a call"):
        program.signal()
        assert program.ends == []
        program.signal()
    assert "was interrupted twice" in program.ends[0][1]


def test_each_interrupt_has_its_own_time(program: Program) -> None:
    """The timer of one that was raised long ago does not shorten that of the next."""
    program.share()
    program.signal()
    program.clock.sleep(2)
    with pytest.raises(KeyboardInterrupt):
        program.interrupts.deliver()
    program.clock.sleep(2)
    program.signal()
    begin = program.clock.now
    with pytest.raises(KeyboardInterrupt):
        program.clock.run()
    assert program.clock.now == begin + PATIENCE_SECONDS


def test_a_call_that_does_not_end_after_an_interrupt_ends_the_job(program: Program) -> None:
    order = program.share()
    order.number = 1
    with order.during("a call"):
        program.signal()
        program.clock.run()
    assert "was interrupted, and its call has not ended within 5 s" in program.ends[0][1]


def test_calls_that_come_and_go_after_an_interrupt_end_nothing(program: Program) -> None:
    """One of them brings the ranks together: the second one has only begun."""
    order = program.share()
    order.number = 1
    with order.during("the first"):
        program.signal()
    order.number = 2
    with order.during("the second"):
        program.clock.sleep(PATIENCE_SECONDS)
        assert program.ends == []
        program.clock.sleep(PATIENCE_SECONDS - 1)
        assert program.ends == []
        program.clock.sleep(1)
    assert len(program.ends) == 1


def test_calls_between_nodes_take_the_interrupt_with_them(program: Program) -> None:
    """This rank is in none of them when its patience is over, and raises it only when no more come."""
    order = program.share()
    order.is_across = True
    program.signal()
    begin = program.clock.now
    program.clock.after(PATIENCE_SECONDS - 1, lambda: setattr(order, "number", order.number + 1))
    with pytest.raises(KeyboardInterrupt):
        program.clock.run()
    assert program.clock.now == begin + 2 * PATIENCE_SECONDS


def test_a_child_raises_it_in_the_middle_of_its_parents_call(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(KeyboardInterrupt), program.share().during("a call"):
        program.signal()
    assert not program.interrupts.is_asked


@pytest.mark.parametrize("others", [True, False])
def test_others_wait_for_who_has_left_its_last_call(
    program: Program, monkeypatch: pytest.MonkeyPatch, others: bool
) -> None:
    """And not for one that has left an earlier call, which all of them have behind them."""
    monkeypatch.setattr(interrupts, "WATCHDOG", types.SimpleNamespace(others_are_inside=lambda _: others))
    order = program.share()
    second = SoloCommunicator().order
    program.interrupts.add(second)
    order.number, order.left = 5, (5, "reduce was left by ValueError")
    assert program.interrupts.why_awaited() == ("reduce was left by ValueError" if others else "")
    order.number = 6
    assert program.interrupts.why_awaited() == ""
    second.broken = "reduce was left in the middle"
    assert program.interrupts.why_awaited() == "reduce was left in the middle"
