"""Interrupts that are heard late, as by a thread on a busy machine."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator

import pytest

from mpidist.comm import interrupts
from mpidist.comm.communicator import SoloCommunicator
from mpidist.comm.interrupts import Interrupts


class Program:
    """A program with interrupts of its own, which notes why it would end the job."""

    def __init__(self) -> None:
        self.interrupts, self.order = Interrupts(), SoloCommunicator().order
        self.ends: list[str] = []
        self.interrupts._end_job = self.ends.append
        self.interrupts.add(self.order)

    def call(self, *, raised: bool, heard: int, later: float = 0.0) -> None:
        """A call, in which a signal is handled or not, and then heard by several threads at once."""
        with self.order.during("a call"):
            if raised:
                signal.raise_signal(signal.SIGINT)
            time.sleep(later)
            threads = [threading.Thread(target=self.interrupts._hear) for _ in range(heard)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Iterator[Program]:
    monkeypatch.setattr(interrupts, "_HANDLED_SECONDS", 0.2)
    monkeypatch.setattr(interrupts, "PATIENCE_SECONDS", 0.5)
    program = Program()
    before = signal.signal(signal.SIGINT, program.interrupts.take)
    yield program
    signal.signal(signal.SIGINT, before)


def test_what_is_heard_long_after_it_was_handled_ends_nothing(program: Program) -> None:
    with pytest.raises(KeyboardInterrupt):
        program.call(raised=True, heard=1, later=0.3)
    assert program.ends == []


def test_what_never_gets_to_the_main_thread_ends_the_job(program: Program) -> None:
    with pytest.raises(KeyboardInterrupt):
        program.call(raised=True, heard=1)
    program.call(raised=False, heard=1)
    assert len(program.ends) == 1
    assert "was interrupted, and its call has not ended within 0.5 s, the job ends" in program.ends[0]


def test_two_signals_and_one_run_of_the_handler(program: Program) -> None:
    """What comes after them is judged as before."""
    with pytest.raises(KeyboardInterrupt):
        program.call(raised=True, heard=2)
    assert program.ends == []
    with pytest.raises(KeyboardInterrupt):
        program.call(raised=True, heard=1, later=0.3)
    assert program.ends == []
    program.call(raised=False, heard=1)
    assert len(program.ends) == 1
