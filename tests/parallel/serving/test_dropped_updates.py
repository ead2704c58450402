"""Updates that are given up, by the worker or for want of a learning rate, leave nothing behind."""

from __future__ import annotations

import numpy as np
import pytest

import mpidist
from mpidist.comm.group.communicator import Communicator
from mpidist.coordinator.coordinator import ClusterCoordinator
from mpidist.parameter_server.options import ServerOptions
from mpidist.parameter_server.queue.commits import RateError
from mpidist.strategy.parameter_server.strategy import ParameterServerStrategy
from tests.parallel.serving.test_parameter_server import on_chief


@pytest.mark.mpi(min_size=3)
def test_update_without_a_learning_rate_counts_no_step(communicator: Communicator) -> None:
    """A closure steps two optimizers, and the schedule of the second raises."""

    def program(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        with strategy.scope():
            first, second = mpidist.Variable(np.ones(3)), mpidist.Variable(np.ones(3))
        rates = {0: 0.5}
        sound = mpidist.optimizers.SGD(lambda step: 1.0 / (1 + step))
        other = mpidist.optimizers.SGD(lambda step: rates[step])
        sound.build([first])
        other.build([second])

        def both() -> None:
            sound.apply_gradients([(np.ones(3), first)])
            other.apply_gradients([(np.ones(3), second)])

        coordinator.schedule(both)
        coordinator.join()
        coordinator.schedule(both)
        with pytest.raises(RateError, match=r"learning rate of SGD at its step 1: the schedule raises KeyError\(1\)"):
            coordinator.join()
        assert (sound.iterations, other.iterations) == (1, 1)
        np.testing.assert_array_equal([first.numpy(), second.numpy()], [[0, 0, 0], [0.5, 0.5, 0.5]])
        # The first one goes on with its second step.
        coordinator.schedule(lambda: sound.apply_gradients([(np.ones(3), first)]))
        coordinator.join()
        np.testing.assert_array_equal(first.numpy(), [-0.5, -0.5, -0.5])

    on_chief(communicator, program)


@pytest.mark.mpi(min_size=4)
def test_update_that_fits_one_server_only_is_not_waited_for(communicator: Communicator) -> None:
    """It lies in a slot of the first server when the second has no room for it; the next closure reads the first."""
    slot_bytes = 1 << 16

    def program(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        with strategy.scope():
            small = mpidist.Variable(np.zeros(8))
            # As an update it just fits into a slot, but for the table of changes.
            large = mpidist.Variable(np.zeros((slot_bytes - 64) // 8))
        assert small.device != large.device

        def grow() -> None:
            small.assign_add(np.ones(8))

        def grow_both() -> None:
            small.assign_add(np.ones(8))
            large.assign_add(np.ones(large.shape))

        def read() -> object:
            return small.numpy()

        # All on one worker.
        coordinator.schedule(grow, worker=0)
        coordinator.join()
        # The error has the size, the limit and the option.
        too_large = rf"pushes \d+ bytes or more to one server, .* {slot_bytes}: give ServerOptions\(slot_bytes=\d+"
        with pytest.raises(MemoryError, match=too_large):
            coordinator.schedule(grow_both, worker=0, on_error="keep").get()
        seen = coordinator.schedule(read, worker=0)
        np.testing.assert_array_equal(seen.fetch(), np.ones(8))
        assert not large.numpy().any()
        # The coordinator has slots of the same size.
        with pytest.raises(MemoryError, match=too_large):
            large.assign(np.ones(large.shape))
        assert not large.numpy().any()
        small.assign(np.zeros(8))
        coordinator.schedule(grow, worker=0)
        coordinator.join()
        np.testing.assert_array_equal(small.numpy(), np.ones(8))

    on_chief(communicator, program, ServerOptions(heap_bytes=1 << 22, slot_bytes=slot_bytes), servers=2)


@pytest.mark.mpi(min_size=3)
def test_part_of_a_step_does_not_count_alone(communicator: Communicator) -> None:
    """The gradient of the first variable lies in the slot when there is no room for that of the second."""

    def program(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        with strategy.scope():
            small, large = mpidist.Variable(np.zeros(8)), mpidist.Variable(np.zeros(10_000))
        optimizer = mpidist.optimizers.SGD(1.0)
        optimizer.build([small, large])

        def step() -> str:
            try:
                optimizer.apply_gradients([(np.ones(8), small), (np.ones(10_000), large)])
            except MemoryError:
                return "handled"
            return "applied"

        with pytest.raises(MemoryError, match=r"give ServerOptions\(slot_bytes="):
            coordinator.schedule(step, on_error="keep").get()
        coordinator.schedule(lambda: small.assign_add(np.ones(8)))
        coordinator.join()
        assert small.numpy().tolist() == [1] * 8
        assert optimizer.iterations == 0

    on_chief(communicator, program, ServerOptions(heap_bytes=1 << 22, slot_bytes=1 << 16))
