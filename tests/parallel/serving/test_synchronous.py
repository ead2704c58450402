"""Synchronous updates: the mean of the workers' gradients is one step of the optimizer, as of one process."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist import optimizers
from mpidist.comm.group.communicator import Communicator
from mpidist.coordinator.coordinator import ClusterCoordinator
from mpidist.optimizers.optimizer import Optimizer
from mpidist.recorder.recorder import RECORDER
from mpidist.strategy.parameter_server.strategy import ParameterServerStrategy
from tests.optimizers import SETTINGS
from tests.parallel.serving.test_parameter_server import AVERAGED, WITH_OPTIONS, on_chief

pytestmark = pytest.mark.mpi(min_size=3)

ROUNDS = 3
Program = Callable[[ParameterServerStrategy, ClusterCoordinator], object]


def gradient(number: int) -> Any:
    return np.random.default_rng(number).standard_normal((3, 4))


def test_a_round_is_the_step_of_all_its_workers_together(communicator: Communicator) -> None:
    """As under a MultiWorkerMirroredStrategy, whose replicas divide by their number and whose optimizer adds up."""
    workers = communicator.size - 2
    # Those that clip by norm do so before the mean: see the guide.
    families: dict[str, Callable[[], Optimizer]] = {
        **SETTINGS, **WITH_OPTIONS, **AVERAGED,
        "clipped by value": lambda: optimizers.Adam(0.1, clipvalue=0.1),
    }
    mirrored = mpidist.MultiWorkerMirroredStrategy()
    wanted: dict[str, Any] = {}
    for name, make in families.items():
        with mirrored.scope():
            weight, optimizer = mpidist.Variable(np.ones((3, 4))), make()
            optimizer.build([weight])
        for step in range(ROUNDS):
            here = communicator.rank
            share = gradient(step * workers + here) / workers if here < workers else np.zeros((3, 4))
            mirrored.run(optimizer.apply_gradients, ([(share, weight)],))
        wanted[name] = weight.numpy()
    mirrored.close()

    def program(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        # Those of other tests.
        RECORDER.updates.clear()
        for name, make in families.items():
            with strategy.scope():
                weight, count = mpidist.Variable(np.ones((3, 4))), mpidist.Variable(0)
                optimizer = make()
            optimizer.build([weight])

            def step(number: int, weight: Any = weight, count: Any = count, optimizer: Any = optimizer) -> None:
                weight.value()
                count.assign_add(1)
                optimizer.apply_gradients([(gradient(number), weight)])

            for number in range(ROUNDS * workers):
                coordinator.schedule(step, (number,))
            coordinator.join()
            np.testing.assert_allclose(weight.numpy(), wanted[name], rtol=1e-12, atol=1e-12, err_msg=name)
            assert (optimizer.iterations, int(count)) == (ROUNDS, ROUNDS * workers)
        assert coordinator.late_updates == 0
        assert len(RECORDER.updates) == ROUNDS * workers * len(families)
        assert all(one.read == one.before and not one.is_late for one in RECORDER.updates)

    on_chief(communicator, program, synchronous=True)


def test_rows_half_precision_and_several_steps_in_a_function(communicator: Communicator) -> None:
    def program(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        workers = len(strategy.roles.workers)
        with strategy.scope():
            table = mpidist.Variable(np.zeros((6, 2)), sparse_gradient=True)
            half, single = (mpidist.Variable(np.zeros(4, kind)) for kind in ("float16", "float32"))
            # The gradient of one worker's function alone.
            seldom = mpidist.Variable(np.zeros(4))
            kinds: list[Optimizer] = [optimizers.SGD(1.0) for _ in range(3)]
        for optimizer, variables in zip(kinds, ([table], [half], [single, seldom]), strict=True):
            optimizer.build(variables)
        rows, of_half, of_single = kinds

        def step(number: int) -> None:
            two = mpidist.IndexedSlices(np.full((2, 2), 1.0 + number), np.array([0, 1 + number]))
            rows.apply_gradients([(two, table)])
            of_half.apply_gradients([(np.full(4, 40000, "float16"), half)])
            for factor in (1, 10):
                given = [(np.full(4, factor * (1.0 + number), "float32"), single)]
                of_single.apply_gradients(given if number else [*given, (np.full(4, -1.0), seldom)])

        for number in range(workers):
            coordinator.schedule(step, (number,))
        coordinator.join()
        mean = sum(1.0 + number for number in range(workers)) / workers
        wanted = np.zeros((6, 2))
        wanted[0] = -mean
        for number in range(workers):
            wanted[1 + number] = -(1.0 + number) / workers
        np.testing.assert_allclose(table.numpy(), wanted, rtol=1e-12)
        np.testing.assert_allclose(single.numpy(), np.full(4, -11 * mean), rtol=1e-6)
        np.testing.assert_allclose(seldom.numpy(), np.full(4, 2 / workers), rtol=1e-12)
        assert [one.iterations for one in kinds] == [1, 1, 2]
        # The sum is beyond float16, and the mean is not.
        assert half.numpy().tolist() == [-40000.0] * 4

    on_chief(communicator, program, synchronous=True)


def test_functions_that_cannot_fill_a_round_count_when_the_program_waits(communicator: Communicator) -> None:
    def program(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        with strategy.scope():
            weight, optimizer = mpidist.Variable(np.zeros(2)), optimizers.SGD(1.0)
        optimizer.build([weight])

        def step(target: float) -> float:
            optimizer.apply_gradients([(np.full(2, -target), weight)])
            return target

        assert coordinator.schedule(step, (1.0,)).fetch() == 1.0
        first = coordinator.schedule(step, (2.0,), worker=0)
        # It needs the other's value, and is for the same worker.
        second = coordinator.schedule(step, (first,), worker=0)
        coordinator.schedule(step, (4.0,), worker=0)
        while not coordinator.done():
            pass
        assert second.fetch() == 2.0
        assert weight.numpy().tolist() == [9.0, 9.0]
        assert optimizer.iterations == 4
        assert coordinator.late_updates == 0

    on_chief(communicator, program, synchronous=True)


def test_an_error_and_a_missing_learning_rate_leave_whole_rounds(
    communicator: Communicator, mpi_tmp_path: Path
) -> None:
    gate = mpi_tmp_path / "gate"

    def program(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        workers = len(strategy.roles.workers)
        with strategy.scope():
            weight, optimizer = mpidist.Variable(np.zeros(2)), optimizers.SGD(lambda step: [1.0, np.nan, 1.0][step])
        optimizer.build([weight])

        def step(is_right: bool = True) -> None:
            optimizer.apply_gradients([(-np.ones(2), weight)])
            if not is_right:
                # Else the error may come before all have a function.
                while not gate.exists():
                    time.sleep(0.001)
                raise LookupError("wrong")

        for _ in range(workers):
            coordinator.schedule(step)
        coordinator.join()
        for _ in range(workers):
            coordinator.schedule(step)
        with pytest.raises(RuntimeError, match="expected a number, got nan"):
            coordinator.join()
        assert (weight.numpy().tolist(), optimizer.iterations) == ([1.0, 1.0], 1)
        optimizer.learning_rate = 1.0
        for number in range(workers):
            coordinator.schedule(step, (number > 0,))
        gate.touch()
        with pytest.raises(LookupError, match="wrong"):
            coordinator.join()
        # The others had begun, if there are some.
        coordinator.join()
        assert optimizer.iterations == 1 + (workers > 1)
        assert weight.numpy().tolist() == [1.0 + (workers > 1)] * 2

    on_chief(communicator, program, synchronous=True)


def test_a_checkpoint_between_rounds_holds_whole_ones(communicator: Communicator, mpi_tmp_path: Any) -> None:
    def program(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        workers = len(strategy.roles.workers)
        with strategy.scope():
            weight, count = mpidist.Variable(np.zeros(1000)), mpidist.Variable(0)
            optimizer = optimizers.Adam(0.1)
        optimizer.build([weight])

        def step() -> None:
            count.assign_add(1)
            optimizer.apply_gradients([(weight.value() - 1, weight)])

        checkpoint = mpidist.Checkpoint(weight=weight, count=count, optimizer=optimizer)
        seen = {}
        for number in range(3):
            for _ in range(5 * workers):
                coordinator.schedule(step)
            checkpoint.save(mpi_tmp_path / f"{number}")
        coordinator.join()
        for number in range(3):
            checkpoint.restore(mpi_tmp_path / f"{number}-{number + 1}")
            assert int(count) == optimizer.iterations * workers
            assert len(set(weight.numpy().tolist())) == 1
            seen[optimizer.iterations] = weight.numpy()[0]
        checkpoint.restore(mpi_tmp_path / "0-1")
        while optimizer.iterations < 15:
            for _ in range(workers):
                coordinator.schedule(step)
            coordinator.join()
            assert seen.get(optimizer.iterations, weight.numpy()[0]) == weight.numpy()[0]

    on_chief(communicator, program, synchronous=True)
