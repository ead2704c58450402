"""What goes between ranks for a closure: few bytes of messages, and no question to a server where reads are relaxed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist.comm.communicator import Communicator
from mpidist.coordinator.coordinator import ClusterCoordinator
from mpidist.serving.messages import Define, Do, Finished, Message, Send, encode
from mpidist.serving.station import Station
from mpidist.strategy.parameter_server import ParameterServerStrategy, ServerOptions
from tests.parallel.serving.test_parameter_server import on_chief

pytestmark = pytest.mark.mpi(min_size=3)

CLOSURES = 40


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Message]:
    """All messages that this rank sends."""
    messages: list[Message] = []
    send_on = Station.send

    def send(self: Station, one: Send) -> None:
        messages.append(one.message)
        send_on(self, one)

    monkeypatch.setattr(Station, "send", send)
    return messages


@pytest.mark.parametrize("servers", [1, pytest.param(2, marks=pytest.mark.mpi(min_size=4))])
def test_a_closure_takes_few_bytes_on_all_ranks_together(
    communicator: Communicator, sent: list[Message], servers: int
) -> None:
    """Of a function that reads its worker's data, changes variables on all servers and steps an optimizer."""
    begun: list[int] = []

    def program(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        with strategy.scope():
            weights = [mpidist.Variable(np.zeros(5)) for _ in range(servers)]
            count, steps = mpidist.Variable(0, dtype="int64"), mpidist.optimizers.Adam(0.1)
        steps.build(weights)
        numbers = iter(coordinator.create_per_worker_dataset(mpidist.data.Dataset.range(4 * CLOSURES).shuffle(9)))

        def step(numbers: Any, factor: float) -> float:
            gradient = np.full(5, factor * next(numbers))
            steps.apply_gradients([(gradient, weight) for weight in weights])
            count.assign_add(1)
            return factor

        def run() -> None:
            for number in range(CLOSURES):
                coordinator.schedule(step, (numbers, number / 3), worker=0)
            coordinator.join()

        run()
        begun.append(CLOSURES)
        sent.clear()
        run()
        assert int(count) == 2 * CLOSURES

    on_chief(communicator, program, servers=servers)
    first = communicator.all_reduce_max(max(begun, default=0))
    # The chief has begun anew; the others leave out what is of the first run.
    counted = [one for one in sent if getattr(one, "closure", first + 1) > first]
    users = sum(len(one.arguments) for one in counted if isinstance(one, Do))
    users += sum(len(one.result) for one in counted if isinstance(one, Finished))
    assert not any(isinstance(one, Define) for one in counted)
    of_closures = [one for one in counted if hasattr(one, "closure")]
    total = sum(len(encode(one)) for one in of_closures) - users
    everyone = communicator.all_gather_object((total, len(of_closures)))
    assert sum(number for _, number in everyone) >= CLOSURES * (2 + 4 * servers)
    assert sum(size for size, _ in everyone) <= 256 * CLOSURES
    # What the user gives is small, too.
    assert users <= CLOSURES * 2 * 64


@pytest.mark.parametrize("consistency", ["whole", "relaxed"])
def test_a_relaxed_read_asks_no_server(
    communicator: Communicator, monkeypatch: pytest.MonkeyPatch, consistency: Any
) -> None:
    """It comes to its end by itself; a whole one may need the server's copy."""
    asked: list[str] = []
    call_on = Station.call

    def call(self: Station, rank: int, name: str, *arguments: Any) -> Any:
        asked.append(name)
        return call_on(self, rank, name, *arguments)

    monkeypatch.setattr(Station, "call", call)

    def program(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        with strategy.scope():
            weight = mpidist.Variable(np.zeros(200_000))

        def read() -> tuple[float, float]:
            value = weight.value()
            return float(value.min()), float(value.max())

        values = [coordinator.schedule(read, worker=0) for _ in range(20)]
        number = 0
        while not all(value.is_done for value in values):
            number += 1
            weight.assign(np.full(200_000, float(number)))
        for low, high in coordinator.fetch(values):
            assert low == int(low) <= high <= number
            assert low == high or consistency == "relaxed"

    on_chief(communicator, program, ServerOptions(heap_bytes=1 << 25, slot_bytes=1 << 21, consistency=consistency))
    snapshots = sum(communicator.all_gather_object(asked.count("snapshot")))
    assert snapshots == 0 or consistency == "whole"
