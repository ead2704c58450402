"""Finite data of workers: its end is a state, and cancels nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist.comm.group.communicator import Communicator
from mpidist.coordinator.coordinator import ClusterCoordinator
from mpidist.errors import EndOfDataError
from mpidist.strategy.parameter_server.strategy import ParameterServerStrategy
from tests.parallel.serving.test_parameter_server import on_chief

pytestmark = pytest.mark.mpi(min_size=3)


@pytest.mark.parametrize("prefetch", [False, True])
def test_each_element_of_each_worker_counts_once(communicator: Communicator, prefetch: bool) -> None:
    workers = communicator.size - 2

    def numbers(context: mpidist.InputContext) -> mpidist.data.Dataset:
        # As unlike as can be: the first worker has none.
        return mpidist.data.Dataset.range(10 * context.input_pipeline_id).prefetch(2)

    def program(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        with strategy.scope():
            weight, count = mpidist.Variable(np.zeros(3)), mpidist.Variable(0, dtype="int64")
            optimizer = mpidist.optimizers.SGD(1.0)
        optimizer.build([weight])

        def step(numbers: Any) -> int:
            def replica() -> int:
                # All of it is void where there is no number.
                count.assign_add(1)
                optimizer.apply_gradients([(np.ones(3), weight)])
                return int(next(numbers))

            return strategy.run(replica)

        dataset = coordinator.create_per_worker_dataset(numbers)
        expected = sorted(number for worker in range(workers) for number in range(10 * worker))
        for epoch in (1, 2):
            iterator = iter(dataset)
            values, others = [], []
            while not iterator.is_at_end:
                values += [coordinator.schedule(step, (iterator,)) for _ in range(7)]
                others.append(coordinator.schedule(lambda: 3))
                coordinator.join()
            assert sorted(coordinator.fetch([one for one in values if not one.is_at_end])) == expected
            assert {one.fetch() for one in others} == {3}
            assert int(count) == optimizer.iterations == epoch * len(expected)
            assert weight.numpy().tolist() == [-epoch * len(expected)] * 3
            assert "at the end of the data" in repr(values[-1])
            with pytest.raises(EndOfDataError, match="its data has ended on every worker that may run it"):
                values[-1].fetch()
        assert not iter(dataset).is_at_end

    on_chief(communicator, program, prefetch=prefetch)


def test_what_takes_the_value_ends_as_well(communicator: Communicator) -> None:
    def program(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        del strategy
        numbers = iter(coordinator.create_per_worker_dataset(mpidist.data.Dataset.range(0)))
        first = coordinator.schedule(next, (numbers,))
        second = coordinator.schedule(lambda number: number + 1, (first,))
        coordinator.join()
        # The same when the state is known before.
        third = coordinator.schedule(lambda number: number + 1, (first,))
        fourth = coordinator.schedule(lambda number: number + 1, (third,))
        assert coordinator.done()
        assert [one.is_at_end for one in (first, second, third, fourth)] == [True] * 4
        with pytest.raises(EndOfDataError):
            fourth.fetch()

    on_chief(communicator, program)


def test_a_function_that_is_bound_to_a_worker_sees_its_end_alone(communicator: Communicator) -> None:
    workers = communicator.size - 2

    def program(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        del strategy
        numbers = iter(coordinator.create_per_worker_dataset(mpidist.data.Dataset.range(2)))
        values = [coordinator.schedule(next, (numbers,), worker=0) for _ in range(4)]
        coordinator.join()
        assert [one.is_at_end for one in values] == [False, False, True, True]
        assert numbers.is_at_end == (workers == 1)
        rest = [coordinator.schedule(next, (numbers,)) for _ in range(2 * workers)]
        coordinator.join()
        assert [one.is_at_end for one in rest] == [False] * (2 * workers - 2) + [True] * 2
        assert numbers.is_at_end

    on_chief(communicator, program)


def test_another_stop_iteration_is_an_error(communicator: Communicator) -> None:
    def program(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        del strategy
        dataset = coordinator.create_per_worker_dataset(mpidist.data.Dataset.range(3))
        numbers = iter(dataset)
        # Who handles the end has a value.
        assert coordinator.schedule(lambda given: sum(1 for _ in given), (numbers,), worker=0).fetch() == 3
        assert coordinator.schedule(lambda given: next(given, "none"), (numbers,), worker=0).fetch() == "none"
        assert not numbers.is_at_end
        # It is the data set's own iterator otherwise.
        assert coordinator.schedule(lambda given: given.state()["batch"], (numbers,), worker=0).fetch() == 3

        def end(given: Any) -> None:
            next(given, None)
            next(iter(()))

        value = coordinator.schedule(end, (numbers,))
        with pytest.raises(StopIteration):
            coordinator.join()
        assert not value.is_at_end
        with pytest.raises(TypeError, match="only an iterator has an end: `iter` of a dataset"):
            assert dataset.is_at_end

    on_chief(communicator, program)
