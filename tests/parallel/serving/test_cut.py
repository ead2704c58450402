"""Checkpoints of variables of servers: of one moment, while workers train."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist.checkpoint.file.positional import write_at
from mpidist.comm.group.communicator import Communicator
from mpidist.coordinator.coordinator import ClusterCoordinator
from mpidist.parameter_server.options import ServerOptions
from mpidist.strategy.parameter_server.strategy import ParameterServerStrategy
from tests.parallel.serving.test_parameter_server import on_chief

OPTIONS = ServerOptions(heap_bytes=1 << 26, slot_bytes=1 << 20)
# The second one takes two pieces of the file, and a part of a third one.
SIZES = (3, 300_001, 700, 20_000)


@pytest.fixture
def folder(communicator: Communicator, tmp_path: Path) -> Path:
    """One folder of all ranks."""
    return Path(communicator.broadcast_object(str(tmp_path)))


def saved_counts(path: str) -> tuple[int, set[float]]:
    """The number of steps in a checkpoint, and all values of its variables."""
    alone = {"weights": [mpidist.Variable(np.zeros(size, "float32")) for size in SIZES]}
    steps, squares = mpidist.optimizers.SGD(1.0), mpidist.optimizers.Adagrad(1.0, initial_accumulator_value=0)
    moving = mpidist.Variable(np.zeros(SIZES[3], "float32"))
    steps.build(alone["weights"])
    squares.build([moving])
    count = mpidist.Variable(0, dtype="int64")
    checkpoint = mpidist.Checkpoint(count=count, steps=steps, squares=squares, moving=moving, **alone)
    checkpoint.restore(path).assert_consumed()
    assert squares.iterations == steps.iterations
    # The sums of squares of gradients, each of which is 1.
    sums = squares.variables[-1]
    assert sums.shape == moving.shape
    values = {float(value) for weight in [*alone["weights"], sums] for value in np.unique(weight.numpy())}
    return steps.iterations, {*values, float(count)}


class Counting:
    """A program whose every variable is the number of its steps, but for one: of that the optimizer's state is."""

    def __init__(self, strategy: ParameterServerStrategy) -> None:
        with strategy.scope():
            self.weights = [mpidist.Variable(np.zeros(size, "float32")) for size in SIZES]
            self.count = mpidist.Variable(0, dtype="int64")
            self.moving = mpidist.Variable(np.zeros(SIZES[3], "float32"))
            self.steps = mpidist.optimizers.SGD(1.0)
            self.squares = mpidist.optimizers.Adagrad(1.0, initial_accumulator_value=0)
        self.steps.build(self.weights)
        self.squares.build([self.moving])
        self.checkpoint = mpidist.Checkpoint(
            weights=self.weights, count=self.count, steps=self.steps, squares=self.squares, moving=self.moving
        )

    def step(self) -> Callable[[], None]:
        """The function of a step."""
        weights, count, steps, squares, moving = self.weights, self.count, self.steps, self.squares, self.moving

        def step() -> None:
            count.assign_add(1)
            squares.apply_gradients([(np.ones(moving.shape, "float32"), moving)])
            steps.apply_gradients([(np.full(weight.shape, -1, "float32"), weight) for weight in weights])

        return step

    def values(self) -> set[float]:
        """All values."""
        return {float(value) for one in (*self.weights, self.count) for value in np.unique(one.numpy())}


def wait_for(path: Path) -> None:
    """Wait until a file is there."""
    while not path.exists():
        time.sleep(0.001)


def slow_disk(monkeypatch: pytest.MonkeyPatch, communicator: Communicator, change: Callable[[], None]) -> None:
    """Call something before each write of a server; the chief, which is rank 0, writes as it does."""
    def changed(*arguments: Any) -> None:
        change()
        write_at(*arguments)

    if communicator.rank:
        monkeypatch.setattr("mpidist.checkpoint.transfer.write_at", changed)


@pytest.mark.parametrize("servers", [
    pytest.param(1, marks=pytest.mark.mpi(min_size=3)), pytest.param(2, marks=pytest.mark.mpi(min_size=4)),
    pytest.param(3, marks=pytest.mark.mpi(min_size=5)),
])
@pytest.mark.parametrize("copy_bytes", [0, 1 << 26])
def test_a_checkpoint_holds_one_moment(
    communicator: Communicator, folder: Path, servers: int, copy_bytes: int
) -> None:
    def program(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        counting = Counting(strategy)
        step, paths = counting.step(), []
        for _ in range(4):
            for _ in range(12):
                coordinator.schedule(step)
            paths.append(counting.checkpoint.save(folder / "c"))
        coordinator.join()
        assert counting.values() == {48.0}
        counts = [saved_counts(path) for path in paths]
        for steps, values in counts:
            assert values == {steps}
        assert [steps for steps, _ in counts] == sorted(steps for steps, _ in counts)
        assert sorted(os.listdir(folder)) == ["c-1.h5", "c-2.h5", "c-3.h5", "c-4.h5", "checkpoint"]
        # Back onto the servers, while closures run.
        for _ in range(12):
            coordinator.schedule(step)
        counting.checkpoint.restore(paths[1]).assert_consumed()
        coordinator.join()
        begun = counts[1][0]
        assert counting.values() == {counting.steps.iterations}
        assert begun <= counting.steps.iterations <= begun + 12

    options = ServerOptions(heap_bytes=1 << 26, slot_bytes=1 << 21, copy_bytes=copy_bytes)
    on_chief(communicator, program, options, servers=servers)


@pytest.mark.mpi(min_size=3)
@pytest.mark.parametrize(
    ("copy_bytes", "behind"), [(0, False), (1 << 20, False), (1 << 26, False), (1 << 26, True)]
)
def test_updates_between_cut_and_end(
    communicator: Communicator, folder: Path, monkeypatch: pytest.MonkeyPatch, copy_bytes: int, behind: bool
) -> None:
    """A server's disk waits for a later update: with room for copies until it is applied, else until it is pushed."""
    writing, later = folder / "writing", folder / "later"

    def wait() -> None:
        writing.touch()
        wait_for(later)

    slow_disk(monkeypatch, communicator, wait)

    def program(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        counting = Counting(strategy)
        step, count, has_room = counting.step(), counting.count, copy_bytes == 1 << 26

        def step_later() -> None:
            wait_for(writing)
            step()
            if not has_room or int(count) >= 8:
                later.touch()

        for _ in range(3):
            coordinator.schedule(step)
        # Else they might be those that wait, and a worker has no more than two.
        coordinator.join()
        for _ in range(12):
            coordinator.schedule(step_later)
        path = counting.checkpoint.save(folder / "c", background=behind)
        assert os.path.exists(path) != behind
        coordinator.join()
        counting.checkpoint.sync()
        assert counting.values() == {15.0}
        assert saved_counts(path) == (3, {3.0})

    options = ServerOptions(heap_bytes=1 << 26, slot_bytes=1 << 21, copy_bytes=copy_bytes)
    on_chief(communicator, program, options)


@pytest.mark.mpi(min_size=3)
def test_the_state_of_an_optimizer_is_of_the_cut(communicator: Communicator, folder: Path) -> None:
    """It has one buffer only, which updates change in place."""

    def program(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        with strategy.scope():
            weight = mpidist.Variable(np.zeros(200_000, "float32"))
            adam = mpidist.optimizers.Adam(lambda step: 0.1 / (1 + step))
        adam.build([weight])

        def step() -> None:
            adam.apply_gradients([(np.ones(200_000, "float32"), weight)])

        checkpoint = mpidist.Checkpoint(weight=weight, adam=adam)
        for _ in range(40):
            coordinator.schedule(step)
        path = checkpoint.save(folder / "c")
        coordinator.join()
        alone, restored = (mpidist.Variable(np.zeros(200_000, "float32")) for _ in range(2))
        same, other = (mpidist.optimizers.Adam(lambda step: 0.1 / (1 + step)) for _ in range(2))
        other.build([restored])
        mpidist.Checkpoint(weight=restored, adam=other).restore(path).assert_consumed()
        same.build([alone])
        for _ in range(other.iterations):
            same.apply_gradients([(np.ones(200_000, "float32"), alone)])
        for got, expected in zip((restored, *other.variables), (alone, *same.variables), strict=True):
            assert got.numpy().tobytes() == expected.numpy().tobytes(), got.name

    on_chief(communicator, program, OPTIONS)


@pytest.mark.mpi(min_size=3)
def test_a_server_that_cannot_write(
    communicator: Communicator, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = folder / "broken"

    def fail() -> None:
        if broken.exists():
            raise OSError(28, "No space left on device")

    slow_disk(monkeypatch, communicator, fail)

    def program(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        counting = Counting(strategy)
        step, there = counting.step(), folder / "there"
        first = counting.checkpoint.save(there / "c")
        broken.touch()
        for _ in range(6):
            coordinator.schedule(step)
        with pytest.raises(OSError, match="No space left on device"):
            counting.checkpoint.save(there / "c")
        assert sorted(os.listdir(there)) == ["c-1.h5", "checkpoint"]
        coordinator.join()
        broken.unlink()
        second = counting.checkpoint.save(there / "c")
        assert [saved_counts(path) for path in (first, second)] == [(0, {0.0}), (6, {6.0})]

    on_chief(communicator, program, ServerOptions(heap_bytes=1 << 26, slot_bytes=1 << 21))


@pytest.mark.mpi(min_size=4)
def test_a_server_may_have_nothing_to_save(communicator: Communicator, folder: Path) -> None:
    def program(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        del coordinator
        with strategy.scope():
            one = mpidist.Variable(np.arange(3.0))
        path = mpidist.Checkpoint(one=one).save(folder / "c")
        one.assign(np.zeros(3))
        mpidist.Checkpoint(one=one).restore(path).assert_consumed()
        assert one.numpy().tolist() == [0, 1, 2]

    on_chief(communicator, program, OPTIONS, servers=2)


@pytest.mark.mpi(min_size=3)
def test_what_is_larger_than_a_slot_is_restored(communicator: Communicator, folder: Path) -> None:
    content = np.arange(100_000, dtype="float64")

    def program(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        del coordinator
        path = mpidist.Checkpoint(large=mpidist.Variable(content)).write(folder / "c")
        with strategy.scope():
            large = mpidist.Variable(np.zeros(100_000))
        mpidist.Checkpoint(large=large).read(path).assert_consumed()
        assert large.numpy().tobytes() == content.tobytes()

    on_chief(communicator, program, ServerOptions(heap_bytes=1 << 22, slot_bytes=1 << 16))


class Trainer:
    """An object of a program that has the coordinator, too."""

    def __init__(self, coordinator: ClusterCoordinator, steps: Any, weight: Any) -> None:
        self.coordinator = coordinator
        self.steps = steps
        self.weight = weight


@pytest.mark.mpi(min_size=3)
def test_a_coordinator_is_nothing_to_save(communicator: Communicator) -> None:
    def program(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        with strategy.scope():
            weight, steps = mpidist.Variable(np.zeros(3)), mpidist.optimizers.SGD(1.0)
        steps.build([weight])
        coordinator.schedule(lambda: steps.apply_gradients([(np.ones(3), weight)]))
        coordinator.join()
        checkpoint = mpidist.Checkpoint(Trainer(coordinator, steps, weight))
        assert sorted(checkpoint.find_objects().leaves) == ["steps/iterations", "steps/learning_rate", "weight"]
        with pytest.raises(ValueError, match="expecting coordinator to be a variable or an object that holds"):
            mpidist.Checkpoint(coordinator=coordinator)

    on_chief(communicator, program, OPTIONS)
