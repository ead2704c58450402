"""A function that reads several small variables: over sockets they come together, as they are between two updates."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist.comm.group.communicator import Communicator
from mpidist.comm.windows.ways import OVERRIDE
from mpidist.coordinator.coordinator import ClusterCoordinator
from mpidist.options import WindowOptions
from mpidist.parameter_server.options import ServerOptions
from mpidist.parameter_server.protocol.endpoint import Station
from mpidist.strategy.parameter_server.strategy import ParameterServerStrategy
from tests.parallel.serving.test_parameter_server import on_chief

pytestmark = pytest.mark.mpi(min_size=3)

SOCKETS = ServerOptions(heap_bytes=1 << 24, window=WindowOptions(way="SOCKETS"))
COUNT = 9


@pytest.fixture(autouse=True)
def _ways_as_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(OVERRIDE, raising=False)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What this rank asks others: names, with numbers of variables where there are some."""
    calls: list[Any] = []
    call_on = Station.call

    def call(self: Station, rank: int, name: str, *arguments: Any) -> Any:
        if name == "several":
            calls.append([number for number, _ in arguments[0]])
        return call_on(self, rank, name, *arguments)

    monkeypatch.setattr(Station, "call", call)
    return calls


def test_what_it_read_last_time_comes_in_one_answer(communicator: Communicator, asked: list[Any]) -> None:
    def program(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        with strategy.scope():
            small = [mpidist.Variable(np.full(3, float(number))) for number in range(COUNT)]
            large = mpidist.Variable(np.zeros(100_000))

        def read(count: int) -> list[float]:
            found = [float(variable.value().sum()) for variable in small[:count]]
            return [*found, float(large.value().sum())]

        def change(number: int) -> None:
            # Read after an add, and not at all after an assign.
            small[number].assign_add(np.ones(3))
            assert small[number].value()[0] > number
            small[0].assign(small[0].value() + 1)

        right = [3.0 * number for number in range(COUNT)]
        for turn in range(6):
            count = COUNT if turn < 4 else 4
            assert coordinator.schedule(read, (count,), worker=0).fetch() == [*right[:count], 0.0]
            coordinator.schedule(change, (turn,), worker=0)
            coordinator.join()
            right[turn] += 3
            right[0] += 3

    on_chief(communicator, program, SOCKETS)
    if communicator.rank == 1:
        # Of the first turn nothing is known, and after the fifth one that only four are read.
        assert [len(numbers) for numbers in asked if len(numbers) > 2] == [COUNT] * 4 + [4]
    else:
        assert asked == [] or communicator.rank > 1


def test_they_are_of_one_moment(communicator: Communicator) -> None:
    """The chief changes all of them in one function, again and again, while others read them."""
    def program(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        with strategy.scope():
            variables = [mpidist.Variable(np.zeros(2000)) for _ in range(COUNT)]

        def change() -> None:
            for variable in variables:
                variable.assign_add(np.ones(2000))

        def read() -> set[float]:
            return {float(end) for variable in variables for end in variable.value()[[0, -1]]}

        last = len(strategy.roles.workers) - 1
        # The first one of a worker reads one variable after another.
        coordinator.schedule(read, worker=last).fetch()
        values = []
        for _ in range(60):
            coordinator.schedule(change, worker=0)
            values.append(coordinator.schedule(read, worker=last))
        assert [len(seen) for seen in coordinator.fetch(values)] == [1] * 60
        coordinator.join()
        assert coordinator.schedule(read, worker=last).fetch() == {60.0}

    on_chief(communicator, program, SOCKETS)


def test_what_the_function_has_changed_stays(communicator: Communicator, asked: list[Any]) -> None:
    def program(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        with strategy.scope():
            assigned, added, other, far = [mpidist.Variable(np.zeros(3)) for _ in range(4)]

        def work(number: float) -> list[float]:
            assigned.assign(np.full(3, number))
            added.assign_add(np.full(3, number))
            return [float(one.value()[1]) for one in (other, assigned, added, far)]

        whole = 0.0
        for number in range(1, 6):
            whole += number
            assert coordinator.schedule(work, (float(number),), worker=0).fetch() == [0, number, whole, 0]
            far.assign(np.zeros(3))

    on_chief(communicator, program, SOCKETS)
    if communicator.rank == 1:
        assert [len(numbers) for numbers in asked] == [3] * 4


def test_a_variable_that_is_dropped_is_asked_for_no_more(communicator: Communicator, asked: list[Any]) -> None:
    def program(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        with strategy.scope():
            kept = [mpidist.Variable(np.ones(3)) for _ in range(3)]
            dropped = [mpidist.Variable(np.full(3, 2.0))]

        def read(others: Any) -> float:
            return sum(float(one.value().sum()) for one in [*kept, *others])

        for _ in range(2):
            assert coordinator.schedule(read, (dropped,), worker=0).fetch() == 15
        dropped.clear()
        coordinator.join()
        for _ in range(3):
            assert coordinator.schedule(read, ([],), worker=0).fetch() == 9

    on_chief(communicator, program, SOCKETS)
    if communicator.rank == 1:
        assert [len(numbers) for numbers in asked] == [4, 3, 3, 3] or [len(one) for one in asked] == [4, 4, 3, 3]


def test_of_memory_of_the_node_nothing_is_asked(communicator: Communicator, asked: list[Any]) -> None:
    """A server that is busy does not answer; a copy does not wait for it."""
    def program(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        with strategy.scope():
            variables = [mpidist.Variable(np.ones(3)) for _ in range(3)]

        def read() -> float:
            return sum(float(one.value().sum()) for one in variables)

        for _ in range(3):
            assert coordinator.schedule(read, worker=0).fetch() == 9

    on_chief(communicator, program, dataclasses.replace(SOCKETS, window=WindowOptions(way="RMA")))
    is_one_node = communicator.node.size == communicator.size
    assert not asked or not is_one_node
