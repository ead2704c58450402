"""What is pulled for a closure before it begins, in one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpidist.comm.windows.window import SoloWindow
from mpidist.failures.peers import Key
from mpidist.parameter_server.heap.dense import HeapVariable
from mpidist.parameter_server.heap.versioned_read import Value
from mpidist.parameter_server.protocol.endpoint import Station
from mpidist.parameter_server.protocol.messages import Do
from mpidist.parameter_server.worker import prefetch
from mpidist.parameter_server.worker.prefetch import Ahead
from mpidist.variables.kinds.served import ServedPlace

SIZE = 100
FUNCTION = 7


class Worker:
    """Pulls ahead, a piece at a time as the test says, from variables in its own heap that hold their numbers."""

    def __init__(self, count: int = 3) -> None:
        window = SoloWindow(1 << 14)
        window.memory[:] = 0
        places = [ServedPlace(number, 0, 4096 * number, (4096 * number + 64, 4096 * number + 1024), (SIZE,), "float64")
                  for number in range(count)]
        self.variables = [HeapVariable(window.memory, place) for place in places]
        for place in places:
            self.write(place.number, place.number)
        self.places = places
        self.known: dict[int, Value] = {}
        self.waiting: list[Do] = []
        station = Station(window, str, lambda rank: Key("", rank, ""), frozenset())
        self.ahead = Ahead(station, self.known, lambda: self.waiting[0] if self.waiting else None)
        # One process has nobody to share its window with: no thread begins.
        self.ahead._is_possible = True
        self.ahead.lock.share = lambda act: None  # type: ignore[method-assign]

    def write(self, number: int, value: float) -> None:
        """Make a version of a variable, as its server does."""
        self.variables[number].change(lambda _, new: new.fill(value))

    def pull(self, pieces: int = 1000) -> int:
        """Do so many pieces of what the thread does; returns how many there were."""
        for done in range(pieces):
            if self.ahead._go_on() is None:
                return done
        return pieces

    def read(self, *numbers: int) -> list[float | None]:
        """Take what was pulled for the function that runs, else read it; None stands for the latter."""
        found: list[float | None] = []
        for number in numbers:
            value = self.ahead.take(self.places[number])
            if value is not None:
                assert (value.array == value.array[0]).all()
            found.append(None if value is None else float(value.array[0]))
            if value is None:
                flat = np.array(self.variables[number].current)
                value = Value(int(self.variables[number].words[0]), flat)
            self.known[number] = value
        return found


def do(closure: int, attempt: int = 1) -> Do:
    """A closure."""
    return Do(closure, attempt, 0, FUNCTION, b"", True)


def after_the_first(numbers: tuple[int, ...] = (0, 1, 2), **shards: Any) -> Worker:
    """A worker that has run the function once."""
    worker = Worker()
    if shards:
        worker.ahead.note_shards(shards["shards"])
    with worker.ahead.during(do(1)):
        assert worker.read(*numbers) == [None] * len(numbers)
    return worker


def run_second(worker: Worker, pieces: int) -> None:
    """The second function reads, and so much is pulled for the third one."""
    with worker.ahead.during(do(2)):
        worker.read(0, 1, 2)
        worker.waiting.append(do(3))
        for number in range(3):
            worker.write(number, 10 + number)
        worker.pull(pieces)
    for number in range(3):
        worker.write(number, 20 + number)


def test_what_was_pulled_is_there() -> None:
    worker = after_the_first()
    run_second(worker, 1000)
    with worker.ahead.during(do(3)):
        assert worker.read(0, 1, 2) == [10, 11, 12]
        # Later reads are the worker's own memory's.
        worker.write(0, 30)
    with worker.ahead.during(do(4)):
        assert worker.read(0) == [None]


def test_what_is_not_pulled_in_time_is_pulled_by_who_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "PIECE_BYTES", 8 * SIZE // 4)
    worker = after_the_first()
    run_second(worker, 5)
    with worker.ahead.during(do(3)):
        # A piece of the second one was there: all of it is of that version.
        assert worker.read(0, 1, 2) == [10, 11, 22]


def test_shards_that_are_not_all_there_when_the_function_ends_are_read_anew() -> None:
    worker = after_the_first(shards=(1, 2))
    # The first variable, and the first of two shards.
    run_second(worker, 2)
    with worker.ahead.during(do(3)):
        assert worker.read(0, 1, 2) == [10, None, None]
    worker = after_the_first(shards=(1, 2))
    run_second(worker, 3)
    with worker.ahead.during(do(3)):
        assert worker.read(0, 1, 2) == [10, 11, 12]


def test_some_shards_of_a_variable_are_not_pulled() -> None:
    worker = after_the_first((0, 1), shards=(1, 2))
    run_second(worker, 0)
    with worker.ahead.during(do(2)):
        worker.read(0, 1)
    with worker.ahead.during(do(3)):
        worker.read(0, 1)
        worker.waiting[:] = [do(4)]
        assert worker.pull() == 1
    with worker.ahead.during(do(4)):
        assert worker.read(0, 1, 2) == [20, None, None]


@pytest.mark.parametrize("closure", [do(4), do(3, attempt=2)])
def test_what_was_pulled_for_another_closure_is_read_anew(closure: Do) -> None:
    worker = after_the_first()
    run_second(worker, 1000)
    with worker.ahead.during(closure):
        assert worker.read(0, 1, 2) == [None] * 3


@pytest.mark.parametrize("is_late", [False, True])
def test_what_the_function_ahead_has_changed_is_read_anew(is_late: bool) -> None:
    worker = after_the_first()
    with worker.ahead.during(do(2)):
        worker.read(0, 1, 2)
        worker.waiting.append(do(3))
        if is_late:
            worker.pull()
        worker.ahead.note_change(1)
        worker.pull()
    with worker.ahead.during(do(3)):
        assert worker.read(0, 1, 2) == [0, None, 2]


def test_the_function_that_runs_reads_first() -> None:
    worker = after_the_first()
    with worker.ahead.during(do(2)):
        worker.waiting.append(do(3))
        worker.read(0, 1)
        worker.pull(10)
        worker.write(0, 10)
        worker.read(2)
        worker.pull()
    with worker.ahead.during(do(3)):
        assert worker.read(0) == [10]


def test_no_version_is_older_than_one_that_was_seen() -> None:
    worker = after_the_first((0,))
    with worker.ahead.during(do(2)):
        worker.read(0)
        worker.waiting.append(do(3))
        worker.pull()
        worker.write(0, 10)
        # It reads what it did not read before; then another version of what was pulled.
        assert worker.read(1) == [None]
        assert worker.read(0) == [None]
    with worker.ahead.during(do(3)):
        assert worker.read(0) == [None]


def test_who_is_lost_drops_what_was_pulled() -> None:
    worker = after_the_first()
    run_second(worker, 2)
    worker.ahead.stop()
    assert worker.pull() == 0
    with worker.ahead.during(do(3)):
        assert worker.read(0, 1, 2) == [None] * 3


def test_an_error_of_the_thread_is_raised_in_the_function() -> None:
    worker = after_the_first()
    worker.ahead._station.window.ring(0, b"no message")

    def run() -> None:
        with worker.ahead.during(do(2)):
            worker.read(0, 1, 2)
            assert worker.pull() == 0

    with pytest.raises(ValueError, match="serving protocol"):
        run()


def test_memory_of_dropped_functions_and_variables_is_given_back() -> None:
    worker = after_the_first()
    run_second(worker, 1000)
    with worker.ahead.during(do(3)):
        worker.read(0, 1, 2)
    assert set(worker.ahead._replaced) == {0, 1, 2}
    worker.ahead.forget("variable", 1)
    assert set(worker.ahead._replaced) == {0, 2}
    assert set(worker.ahead._last[FUNCTION]) == {0, 2}
    worker.ahead.forget("function", FUNCTION)
    assert not worker.ahead._last
    worker.ahead.end()
    assert not worker.ahead._replaced
