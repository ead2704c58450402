"""What the program drops is given back: memory of variables on servers, and values on workers."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist.comm.group.communicator import Communicator
from mpidist.coordinator.coordinator import ClusterCoordinator
from mpidist.optimizers.optimizer import Optimizer
from mpidist.parameter_server.heap.layout import HeapFullError
from mpidist.parameter_server.options import ServerOptions
from mpidist.strategy.parameter_server.strategy import ParameterServerStrategy
from tests.parallel.serving.test_parameter_server import on_chief

pytestmark = pytest.mark.mpi(min_size=3)

# Of a variable.
BYTES = 1 << 14


def slots(communicator: Communicator) -> int:
    """The heap that holds the slots of these ranks, and ten variables."""
    return 2 * (communicator.size - 1) * (1 << 16) + 10 * (2 * BYTES + 64) + 4096


def test_a_thousand_variables_fit_one_after_the_other(communicator: Communicator) -> None:
    """With functions that have captured them, arguments that have named them, and optimizers."""
    def program(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        with strategy.scope():
            kept = mpidist.Variable(np.arange(4.0), name="kept")
            for number in range(1000):
                variable = mpidist.Variable(np.full(BYTES // 8, float(number)))
                if number % 50 == 0:
                    coordinator.schedule(lambda one=variable: one.assign_add(np.ones(one.shape)))
                    coordinator.join()
                    assert set(variable.numpy()) == {number + 1.0}
                elif number % 50 == 1:
                    # Dropped while the function is under way.
                    coordinator.schedule(add, (variable,))
                elif number % 50 == 2:
                    optimizer = mpidist.optimizers.SGD(1.0, momentum=0.5)
                    optimizer.build([variable])
                    coordinator.schedule(step_of(optimizer, variable))
                    coordinator.join()
                    assert set(variable.numpy()) == {number - 1.0}
                    del optimizer
                del variable
        assert kept.numpy().tolist() == [0, 1, 2, 3]

    on_chief(communicator, program, ServerOptions(heap_bytes=slots(communicator), slot_bytes=1 << 16))


def add(variable: Any) -> None:
    variable.assign_add(np.ones(variable.shape))


def step_of(optimizer: Optimizer, variable: Any) -> Callable[[], None]:
    return lambda: optimizer.apply_gradients([(np.ones(variable.shape), variable)])


def test_a_full_heap_says_what_is_free_and_loses_nothing(communicator: Communicator) -> None:
    def program(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        del coordinator
        with strategy.scope():
            kept = [mpidist.Variable(np.full(BYTES // 8, float(number))) for number in range(8)]
            optimizer = mpidist.optimizers.Adam(0.1)
            message = (
                r"variable 'Variable/gradient_sum' of shape \(2048,\) and dtype float64 takes 16448 bytes of a "
                r"server's heap \(1 buffer\), and the servers have free: ps 0 \d+\. A heap holds two buffers of each "
                rf"variable, one of each slot of an optimizer, and \d+ bytes of slots for pushes: "
                rf"2 x {communicator.size - 1} "
            )
            with pytest.raises(HeapFullError, match=message):
                optimizer.build(kept)
            # What the failed call has taken is free again.
            more = [mpidist.Variable(np.full(BYTES // 8, 9.0)) for _ in range(2)]
            with pytest.raises(HeapFullError, match=r"variable 'late' .* takes 32832 bytes .* or drop variables"):
                mpidist.Variable(np.zeros(BYTES // 8), name="late")
        assert [set(one.numpy()) for one in kept] == [{float(number)} for number in range(8)]
        assert [set(one.numpy()) for one in more] == [{9.0}, {9.0}]

    on_chief(communicator, program, ServerOptions(heap_bytes=slots(communicator), slot_bytes=1 << 16))


class Weight:
    """A megabyte that a worker can count."""

    def __init__(self) -> None:
        self.content = np.ones(1 << 17)


def count_alive() -> int:
    gc.collect()
    # `isinstance` asks objects for their class: those of other libraries may warn.
    return sum(type(one) is Weight for one in gc.get_objects())


def count_of_worker() -> tuple[int, int]:
    """How many objects it has under names, and of what the test makes."""
    home = mpidist.get_strategy().home
    return len(home._named) + len(home._reads.known) + len(home._codes), count_alive()  # type: ignore[attr-defined]


def test_values_of_workers_that_are_dropped_leave_the_workers(communicator: Communicator) -> None:
    def program(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        with strategy.scope():
            total = mpidist.Variable(0.0)
        for number in range(1000):
            value = coordinator.create_per_worker_value(Weight)
            if number % 20 == 0:
                coordinator.schedule(lambda one: total.assign_add(one.content[0]), (value,))
            if number % 20 == 1:
                # A function of its own for each.
                coordinator.schedule(lambda one=value: total.assign_add(one.content[0]))
            del value
        coordinator.join()
        assert float(total) == 100.0
        coordinator._functions.forget()
        # The last of them are let go of with the next function.
        coordinator.schedule(int).get()
        for worker in range(communicator.size - 2):
            known, alive = coordinator.schedule(count_of_worker, worker=worker).get()
            assert alive == 0
            assert known < 10

    on_chief(communicator, program)


def test_a_variable_in_a_result_is_kept_with_the_result(communicator: Communicator) -> None:
    def program(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        with strategy.scope():
            variable = mpidist.Variable(np.full(BYTES // 8, 7.0))
            result = coordinator.schedule(same, (variable,))
            coordinator.join()
            del variable
            gc.collect()
            others = [mpidist.Variable(np.full(BYTES // 8, float(number))) for number in range(3)]
        assert set(coordinator.schedule(value_of, (result,)).fetch()) == {7.0}
        assert set(result.fetch().numpy()) == {7.0}
        assert [set(other.numpy()) for other in others] == [{0.0}, {1.0}, {2.0}]

    on_chief(communicator, program, ServerOptions(heap_bytes=slots(communicator), slot_bytes=1 << 16))


def same(variable: Any) -> Any:
    return variable


def value_of(variable: Any) -> Any:
    return variable.value()


def test_results_that_nobody_keeps_leave_the_chief(communicator: Communicator) -> None:
    def program(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        value = coordinator.schedule(lambda: np.ones(1000))
        for _ in range(100):
            coordinator.schedule(lambda: np.ones(1000))
        coordinator.join()
        assert strategy.chief is not None
        assert not strategy.chief.values
        alive = weakref.ref(value)
        assert value.get().sum() == 1000
        del value
        assert alive() is None

    on_chief(communicator, program)
