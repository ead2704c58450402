"""The rules of a coordinator, with workers that run at the same time: the queue, affinity, errors and retries."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

import mpidist
from mpidist.comm.group.communicator import Communicator
from mpidist.coordinator import experimental_get_current_worker_index
from mpidist.coordinator.coordinator import ClusterCoordinator
from mpidist.strategy.parameter_server.strategy import ParameterServerStrategy
from tests.parallel.serving.test_parameter_server import on_chief

pytestmark = pytest.mark.mpi(min_size=3)


def wait_for(gate: Path) -> None:
    while not gate.exists():
        time.sleep(0.01)


def test_schedule_waits_for_a_worker_when_the_queue_is_full(communicator: Communicator, mpi_tmp_path: Path) -> None:
    workers, gate = communicator.size - 2, mpi_tmp_path / "gate"

    def work(number: int) -> int:
        wait_for(gate)
        return number

    def program(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        del strategy
        running = [coordinator.schedule(work, (number,), worker=number) for number in range(workers)]
        waiting = [coordinator.schedule(work, (number,)) for number in range(2)]
        assert not any(value.is_done for value in (*running, *waiting))
        gate.touch()
        value = coordinator.schedule(abs, (-7,))
        # The queue had no room before a worker had taken one that waited.
        assert any(one.is_done for one in running)
        assert value.fetch() == 7
        assert coordinator.fetch([running, waiting]) == [list(range(workers)), [0, 1]]

    on_chief(communicator, program, queue_size=2)


def test_a_function_runs_on_its_worker(communicator: Communicator) -> None:
    workers = communicator.size - 2

    def program(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        def index() -> int:
            return strategy.run(experimental_get_current_worker_index)

        for prefer in [*range(workers), *reversed(range(workers))]:
            values = [coordinator.schedule(index, worker=prefer) for _ in range(5)]
            assert coordinator.fetch(values) == [prefer] * 5
        here = coordinator.create_per_worker_value(experimental_get_current_worker_index)
        for number in range(workers):
            assert coordinator.schedule(lambda value: value, (here,), worker=number).fetch() == number
        with pytest.raises(RuntimeError, match="inside a function that a worker runs"):
            experimental_get_current_worker_index()

    on_chief(communicator, program)


def test_nothing_runs_any_more_when_an_error_is_raised(communicator: Communicator, mpi_tmp_path: Path) -> None:
    workers, start, gate = communicator.size - 2, mpi_tmp_path / "start", mpi_tmp_path / "gate"

    def fail() -> None:
        # Else its error may come before the other one is scheduled.
        wait_for(start)
        raise LookupError("of the first")

    def wait_and_fail() -> None:
        wait_for(gate)
        raise KeyError("of another")

    def program(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        with strategy.scope():
            count = mpidist.Variable(0)

        def work() -> str:
            count.assign_add(1)
            return "counted"

        failed = coordinator.schedule(fail, worker=0)
        # In flight with another worker, where there is one.
        other = coordinator.schedule(wait_and_fail, worker=1) if workers > 1 else None
        start.touch()
        while not failed.is_done:
            time.sleep(0.001)
        gate.touch()
        with pytest.raises(LookupError, match="of the first"):
            coordinator.schedule(work)
        assert coordinator.done()
        assert int(count) == 0, "what was given to the `schedule` that raised is not scheduled"
        if other is not None:
            assert other.is_done, "what ran has ended"
            with pytest.raises(KeyError, match="of another"):
                other.fetch()
        coordinator.join()
        assert coordinator.schedule(work).fetch() == "counted"
        assert int(count) == 1

    on_chief(communicator, program)


def test_a_function_that_raises_is_tried_again(communicator: Communicator, mpi_tmp_path: Path) -> None:
    def program(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        with strategy.scope():
            count = mpidist.Variable(0)

        def work(number: int) -> int:
            tries = mpi_tmp_path / f"{number}"
            with tries.open("a") as file:
                file.write("x")
            count.assign_add(1)
            if len(tries.read_text()) <= 2:
                raise LookupError(f"try {len(tries.read_text())} of {number}")
            return number

        values = [coordinator.schedule(work, (number,), retries=2) for number in range(4)]
        coordinator.join()
        assert coordinator.fetch(values) == [0, 1, 2, 3]
        assert int(count) == 4, "a try that has raised changes nothing"
        failed = coordinator.schedule(work, (4,), retries=1)
        with pytest.raises(LookupError, match="try 2 of 4"):
            coordinator.join()
        with pytest.raises(LookupError, match="try 2 of 4"):
            failed.fetch()
        assert int(count) == 4

    on_chief(communicator, program)
