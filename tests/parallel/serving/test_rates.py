"""Learning rates are asked for when an update is decided: schedules may read variables, kernels may refuse rates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist.comm.group.communicator import Communicator
from mpidist.coordinator.coordinator import ClusterCoordinator
from mpidist.optimizers import SGD, Adam, Ftrl
from mpidist.parameter_server.queue.commits import RateError
from mpidist.strategy.parameter_server.strategy import ParameterServerStrategy
from tests.parallel.serving.test_parameter_server import on_chief

pytestmark = pytest.mark.mpi(min_size=3)


@pytest.mark.parametrize("synchronous", [False, True])
def test_a_rate_that_a_kernel_refuses_leaves_the_update_undone(communicator: Communicator, synchronous: bool) -> None:
    """A warm-up may begin at 0. The servers live on, and so does the program, with another rate."""

    def program(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        with strategy.scope():
            first, second = mpidist.Variable(np.ones(3)), mpidist.Variable(np.ones(3))
        sound, optimizer = SGD(1.0), Ftrl(0)
        sound.build([first])
        optimizer.build([second])

        def both() -> None:
            sound.apply_gradients([(np.ones(3), first)])
            optimizer.apply_gradients([(np.ones(3), second)])

        coordinator.schedule(both)
        refused = "the learning rate of Ftrl at its step 0: Ftrl needs a learning rate above 0, got 0.0. The update"
        with pytest.raises(RateError, match=refused):
            coordinator.join()
        assert (sound.iterations, optimizer.iterations) == (0, 0)
        optimizer.learning_rate = 0.1
        coordinator.schedule(both)
        coordinator.join()
        alone = mpidist.Variable(np.ones(3))
        Ftrl(0.1).apply_gradients([(np.ones(3), alone)])
        assert first.numpy().tolist() == [0, 0, 0]
        assert second.numpy().tobytes() == alone.numpy().tobytes()

    on_chief(communicator, program, synchronous=synchronous)


def test_a_rate_that_is_no_number_is_named(communicator: Communicator) -> None:
    def program(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        with strategy.scope():
            weight = mpidist.Variable(np.zeros(3))
        optimizer = SGD(1.0)
        optimizer.build([weight])
        rates: list[Any] = [None, [0.1], lambda _: None]
        for rate in rates:
            optimizer.learning_rate = rate
            coordinator.schedule(lambda: optimizer.apply_gradients([(np.ones(3), weight)]))
            # What is no schedule raises nothing.
            begin = "the schedule raises TypeError.*" if callable(rate) else ""
            with pytest.raises(RateError, match=f"at its step 0: {begin}SGD: the learning rate must be a number, got"):
                coordinator.join()

    on_chief(communicator, program)


def test_a_schedule_reads_variables_while_updates_come(communicator: Communicator) -> None:
    """It waits for a write of the program; what workers say meanwhile is decided after this update."""
    rounds = 100

    def program(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        with strategy.scope():
            weight, rate = mpidist.Variable(np.zeros(3)), mpidist.Variable(np.ones(10_000))
        steps: list[int] = []

        def schedule(step: int) -> float:
            steps.append(step)
            return float(rate.numpy()[0])

        optimizer = SGD(schedule)
        optimizer.build([weight])

        def step() -> None:
            optimizer.apply_gradients([(np.ones(3), weight)])

        for _ in range(rounds):
            coordinator.schedule(step)
            rate.assign(np.ones(10_000))
        coordinator.join()
        assert steps == list(range(rounds))
        assert optimizer.iterations == rounds
        assert weight.numpy().tolist() == [-rounds] * 3

    on_chief(communicator, program)


def test_a_schedule_that_waits_for_its_own_end_is_an_error(communicator: Communicator) -> None:
    def program(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        with strategy.scope():
            weight = mpidist.Variable(np.zeros(3))
        uses: list[Callable[[], object]] = [
            coordinator.join, lambda: coordinator.schedule(lambda: 1), lambda: weight.assign(np.ones(3)),
        ]
        for use in uses:
            def schedule(_: int, use: Callable[[], object] = use) -> float:
                use()
                return 1.0

            optimizer = Adam(schedule)
            optimizer.build([weight])
            coordinator.schedule(lambda optimizer=optimizer: optimizer.apply_gradients([(np.ones(3), weight)]))
            with pytest.raises(RateError, match="a learning rate schedule uses the ClusterCoordinator, or writes"):
                coordinator.join()
        assert weight.numpy().tolist() == [0, 0, 0]

    on_chief(communicator, program)
