"""Optimizers that functions are the first to use: built once, with the bits of one that was built before."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist.comm.group.communicator import Communicator
from mpidist.coordinator.coordinator import ClusterCoordinator
from mpidist.parameter_server.chief.chief import Chief
from mpidist.parameter_server.options import ServerOptions
from mpidist.strategy.parameter_server.strategy import ParameterServerStrategy
from mpidist.variables.making.partitioners import FixedShardsPartitioner
from tests.parallel.serving.test_parameter_server import on_chief

pytestmark = pytest.mark.mpi(min_size=3)

STEPS = 6


def made(strategy: ParameterServerStrategy) -> tuple[list[Any], Any]:
    """Two variables, and an optimizer that is not built."""
    with strategy.scope():
        weights = [mpidist.Variable(np.zeros((6, 2)), name="table"), mpidist.Variable(np.ones(3), name="bias")]
        return weights, mpidist.optimizers.Adam(0.1, clipnorm=0.5)


def step_of(weights: list[Any], optimizer: Any) -> Any:
    def step(number: int) -> int:
        optimizer.apply_gradients([
            (np.full(one.shape, 0.5 + number + place), one) for place, one in enumerate(weights)
        ])
        return number

    return step


@pytest.mark.parametrize(("servers", "is_cut"), [
    (1, False), (1, True), pytest.param(2, True, marks=pytest.mark.mpi(min_size=4)),
])
def test_it_has_the_bits_of_one_that_was_built_before(
    communicator: Communicator, servers: int, is_cut: bool
) -> None:
    def program(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        found = []
        for is_built in (True, False):
            weights, optimizer = made(strategy)
            if is_built:
                optimizer.build(weights)
            step = step_of(weights, optimizer)
            for number in range(STEPS):
                # On one worker after the other: each of them asks.
                worker = number % len(strategy.roles.workers)
                assert coordinator.schedule(step, (number,), worker=worker).fetch() == number
            assert optimizer.iterations == STEPS
            assert [one.name for one in optimizer.plan.variables] == ["table", "bias"]
            assert (len(weights[0].parts) == 3) == is_cut
            found.append([one.numpy().tobytes() for one in weights])
        assert found[0] == found[1]

    on_chief(
        communicator, program, ServerOptions(heap_bytes=1 << 22), servers=servers,
        partitioner=FixedShardsPartitioner(3) if is_cut else None,
    )


def test_workers_that_ask_at_the_same_time_get_the_same_one(communicator: Communicator) -> None:
    def program(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        for _ in range(5):
            weights, optimizer = made(strategy)
            step = step_of(weights, optimizer)
            values = [coordinator.schedule(step, (number,)) for number in range(20)]
            coordinator.join()
            assert coordinator.fetch(values) == list(range(20))
            assert optimizer.iterations == 20

    on_chief(communicator, program, ServerOptions(heap_bytes=1 << 22), prefetch=True)


def test_errors_are_those_of_build_and_the_next_use_is_right(communicator: Communicator) -> None:
    def program(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        weights, optimizer = made(strategy)
        with strategy.scope():
            accumulating = mpidist.optimizers.SGD(0.1, gradient_accumulation_steps=2)
            other = mpidist.Variable(np.zeros(3), name="other")
        with pytest.raises(NotImplementedError, match="gradient_accumulation_steps is not supported"):
            coordinator.schedule(step_of([other], accumulating), (0,), on_error="keep").fetch()
        step = step_of(weights, optimizer)

        def use(which: str) -> None:
            if which == "own":
                mpidist.optimizers.SGD(0.1).apply_gradients([(np.ones(3), other)])
            elif which == "others":
                optimizer.apply_gradients([(np.ones(3), other)])
            else:
                step(0)

        coordinator.schedule(use, ("weights",), worker=0).fetch()
        # Also on a worker that has not used it.
        for worker in range(len(strategy.roles.workers)):
            for which, text in (("others", "Adam was not built on variable 'other'"), ("own", "cannot be made inside")):
                with pytest.raises(ValueError, match=text):
                    coordinator.schedule(use, (which,), worker=worker, on_error="keep").fetch()
        assert optimizer.iterations == 1
        assert not other.numpy().any()

    on_chief(communicator, program, ServerOptions(heap_bytes=1 << 22))


def test_its_state_comes_back_from_a_checkpoint(communicator: Communicator, mpi_tmp_path: Path) -> None:
    """Restored before any function has used it, and saved after."""
    path = mpi_tmp_path / "ckpt"

    def program(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        weights, optimizer = made(strategy)
        step = step_of(weights, optimizer)
        for number in range(STEPS):
            coordinator.schedule(step, (number,)).fetch()
            if number == 2:
                mpidist.Checkpoint(weights=weights, optimizer=optimizer).save(path)
        again, other = made(strategy)
        mpidist.Checkpoint(weights=again, optimizer=other).restore(f"{path}-1")
        step = step_of(again, other)
        for number in range(3, STEPS):
            coordinator.schedule(step, (number,)).fetch()
        assert other.iterations == STEPS
        assert [one.numpy().tobytes() for one in weights] == [one.numpy().tobytes() for one in again]

    on_chief(communicator, program, ServerOptions(heap_bytes=1 << 22))


def test_what_is_dropped_gives_its_memory_back(communicator: Communicator) -> None:
    def program(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        # Each takes half of what the slots leave, with its state.
        for _ in range(8):
            with strategy.scope():
                weight = mpidist.Variable(np.zeros(100_000))
                optimizer = mpidist.optimizers.Adam(0.1)
            step = step_of([weight], optimizer)
            coordinator.schedule(step, (1,)).fetch()
            del step, weight, optimizer
            gc.collect()

    on_chief(communicator, program, ServerOptions(heap_bytes=2 * communicator.size + 6 << 20, slot_bytes=1 << 20))


def test_the_program_builds_one_while_a_worker_asks_for_it(
    communicator: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one to have a plan takes the plan of the first."""
    plan = Chief.plan

    def program(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        weights, optimizer = made(strategy)
        step = step_of(weights, optimizer)

        def while_another_thread_builds(self: Chief, *arguments: Any) -> Any:
            monkeypatch.setattr(Chief, "plan", plan)
            assert coordinator.schedule(step, (1,)).fetch() == 1
            return plan(self, *arguments)

        monkeypatch.setattr(Chief, "plan", while_another_thread_builds)
        optimizer.build(weights)
        assert coordinator.schedule(step, (2,)).fetch() == 2
        assert optimizer.iterations == 2
        state: Any = optimizer.plan.slots
        assert all(np.abs(one.numpy()).min() > 0 for of_name in state.values() for one in of_name.values())

    on_chief(communicator, program, ServerOptions(heap_bytes=1 << 22))
