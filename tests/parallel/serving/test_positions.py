"""Positions of workers in their data: a checkpoint holds them as of the functions that count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist.comm.group.communicator import Communicator
from mpidist.coordinator.coordinator import ClusterCoordinator
from mpidist.errors import CheckpointError
from mpidist.strategy.parameter_server.strategy import ParameterServerStrategy
from tests.parallel.serving.test_cut import folder  # noqa: F401 - a fixture
from tests.parallel.serving.test_parameter_server import SMALL, on_chief

pytestmark = pytest.mark.mpi(min_size=3)

COUNT = 60


def numbers_of(context: mpidist.InputContext) -> mpidist.data.Dataset:
    """The numbers below COUNT, in an order of its own for each worker and pass."""
    dataset = mpidist.data.Dataset.range(COUNT)
    dataset = dataset.shard(context.num_input_pipelines, context.input_pipeline_id)
    return dataset.shuffle(COUNT).batch(2, drop_remainder=False)


class Tally:
    """A program that counts on the servers how often each number was read."""

    def __init__(
        self, strategy: ParameterServerStrategy, coordinator: ClusterCoordinator,
        data: Callable[[mpidist.InputContext], mpidist.data.Dataset] | mpidist.data.Dataset = numbers_of,
    ) -> None:
        with strategy.scope():
            self.seen = mpidist.Variable(np.zeros(COUNT))
            self.steps = mpidist.optimizers.SGD(lambda step: 1.0 + 0 * step)
        self.steps.build([self.seen])
        self.coordinator = coordinator
        self.dataset = coordinator.create_per_worker_dataset(data)
        self.batches = iter(self.dataset)
        self.checkpoint = mpidist.Checkpoint(seen=self.seen, steps=self.steps, batches=self.batches)

    def step(self) -> Callable[[Any], list[int]]:
        """The function of a step."""
        seen, steps = self.seen, self.steps

        def step(batches: Any) -> list[int]:
            numbers = next(batches)
            gradient = np.zeros(COUNT)
            gradient[numbers] = -1
            steps.apply_gradients([(gradient, seen)])
            return [int(number) for number in numbers]

        return step

    def schedule(self, count: int, **options: Any) -> list[Any]:
        step = self.step()
        return [self.coordinator.schedule(step, (self.batches,), **options) for _ in range(count)]

    def read_all(self) -> list[int]:
        """Read the rest of the pass; returns what came, in the order of the functions."""
        values = []
        while not self.batches.is_at_end:
            values += self.schedule(8)
            self.coordinator.join()
        return [number for value in values if not value.is_at_end for number in value.fetch()]


@pytest.mark.parametrize("prefetch", [False, True])
def test_each_example_counts_once_relative_to_the_cut(
    communicator: Communicator, folder: Path, prefetch: bool  # noqa: F811
) -> None:
    def program(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        tally = Tally(strategy, coordinator)
        paths = []
        for _ in range(3):
            # Functions are under way while it saves.
            tally.schedule(7)
            paths.append(tally.checkpoint.save(folder / "c"))
        tally.read_all()
        assert tally.seen.numpy().tolist() == [1.0] * COUNT
        for path in paths:
            tally.checkpoint.restore(path).assert_consumed()
            begun = tally.seen.numpy()
            assert begun.sum() >= tally.steps.iterations > 0 or path == paths[0]
            assert set(begun) <= {0.0, 1.0}
            rest = tally.read_all()
            assert Counter(rest) == Counter(np.flatnonzero(begun == 0).tolist())
            assert tally.seen.numpy().tolist() == [1.0] * COUNT
        # The next pass is whole.
        tally.batches = iter(tally.dataset)
        assert sorted(tally.read_all()) == list(range(COUNT))

    on_chief(communicator, program, prefetch=prefetch)


@pytest.mark.mpi(min_size=4)
@pytest.mark.parametrize(("data", "servers"), [
    (numbers_of, (2, 1, 2)), (mpidist.data.Dataset.range(COUNT).shuffle(9).batch(2), (1, 2, 1)),
])
def test_other_numbers_of_workers_and_servers_go_on(
    communicator: Communicator, folder: Path, data: Any, servers: tuple[int, ...]  # noqa: F811
) -> None:
    """Fewer workers read several parts; more share them. So do those of a checkpoint of such a pass."""
    path = folder / "c"
    # Each worker reads all of a plain data set.
    whole = not callable(data)
    passes = communicator.size - 1 - servers[0] if whole else 1

    def begin(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        tally = Tally(strategy, coordinator, data)
        tally.schedule(9)
        tally.checkpoint.write(path)
        coordinator.join()

    def go_on(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        tally = Tally(strategy, coordinator, data)
        tally.checkpoint.read(path).assert_consumed()
        before = tally.seen.numpy().sum()
        tally.schedule(5)
        tally.checkpoint.write(path)
        coordinator.join()
        assert tally.seen.numpy().sum() > before

    def end(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        tally = Tally(strategy, coordinator, data)
        tally.checkpoint.read(path).assert_consumed()
        tally.read_all()
        assert tally.seen.numpy().tolist() == [passes] * COUNT
        tally.batches = iter(tally.dataset)
        assert len(tally.read_all()) == COUNT * (len(strategy.roles.workers) if whole else 1)

    for program, count in zip((begin, go_on, end), servers, strict=True):
        on_chief(communicator, program, SMALL, count)


def test_a_pass_goes_on_in_its_order(communicator: Communicator, folder: Path) -> None:  # noqa: F811
    """With one worker all is as if nothing had happened, also the order of the passes after it."""

    def program(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        tally = Tally(strategy, coordinator, mpidist.data.Dataset.range(COUNT).shuffle(COUNT).repeat(2).batch(4))

        def read(count: int) -> list[int]:
            return [number for value in tally.schedule(count, worker=0) for number in value.fetch()]

        tally.batches = tally.checkpoint.batches = iter(tally.dataset)
        read(11)
        path = tally.checkpoint.save(folder / "c")
        expected = read(14)
        tally.batches = iter(tally.dataset)
        following = read(5)
        tally.batches = tally.checkpoint.batches
        tally.checkpoint.restore(path).assert_consumed()
        assert read(14) == expected
        tally.batches = iter(tally.dataset)
        assert read(5) == following

    on_chief(communicator, program)


def test_functions_that_have_captured_the_iterator_go_on_there(
    communicator: Communicator, folder: Path  # noqa: F811
) -> None:
    def program(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        tally = Tally(strategy, coordinator, mpidist.data.Dataset.range(COUNT).batch(2))
        batches: Any = tally.batches
        step = lambda: int(next(batches)[0])  # noqa: E731
        assert [coordinator.schedule(step, worker=0).fetch() for _ in range(3)] == [0, 2, 4]
        path = tally.checkpoint.save(folder / "c")
        assert coordinator.schedule(step, worker=0).fetch() == 6
        tally.checkpoint.restore(path).assert_consumed()
        assert coordinator.schedule(step, worker=0).fetch() == 6
        # A function may move it itself.
        back = lambda: batches.load_state({**batches.state(), "batch": 1})  # noqa: E731
        coordinator.schedule(back, worker=0).fetch()
        path = tally.checkpoint.save(folder / "c")
        assert coordinator.schedule(step, worker=0).fetch() == 2
        tally.checkpoint.restore(path).assert_consumed()
        assert coordinator.schedule(step, worker=0).fetch() == 2

    on_chief(communicator, program)


def test_a_function_that_fails_has_read_its_elements(communicator: Communicator, folder: Path) -> None:  # noqa: F811
    def program(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        tally = Tally(strategy, coordinator, mpidist.data.Dataset.range(COUNT).batch(2))

        def fail(batches: Any) -> None:
            raise LookupError(str(next(batches)))

        tally.schedule(2, worker=0)
        coordinator.schedule(fail, (tally.batches,), worker=0, on_error="keep")
        coordinator.join()
        first = tally.checkpoint.save(folder / "c")
        assert [value.fetch() for value in tally.schedule(1, worker=0)] == [[6, 7]]
        second = tally.checkpoint.save(folder / "c")
        # Nothing that counts was behind it.
        tally.checkpoint.restore(first)
        assert [value.fetch() for value in tally.schedule(1, worker=0)] == [[4, 5]]
        coordinator.join()
        tally.checkpoint.restore(second)
        assert [value.fetch() for value in tally.schedule(1, worker=0)] == [[8, 9]]

    on_chief(communicator, program)


def test_what_cannot_be_saved_or_restored_says_why(
    communicator: Communicator, folder: Path, mpi_tmp_path: Path  # noqa: F811
) -> None:
    def program(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        tally = Tally(strategy, coordinator)
        path = tally.checkpoint.save(folder / "c")
        gate = mpi_tmp_path / "gate"

        def wait(batches: Any) -> None:
            while not gate.exists():
                pass

        coordinator.schedule(wait, (tally.batches,))
        with pytest.raises(RuntimeError, match=r"functions that read these datasets are running: .*join\(\) before"):
            tally.checkpoint.restore(path)
        gate.touch()
        coordinator.join()
        tally.checkpoint.restore(path).assert_consumed()
        assert sorted(tally.read_all()) == list(range(COUNT))
        # A list has no position.
        listed = iter(coordinator.create_per_worker_dataset(lambda: [1, 2]))  # type: ignore[arg-type, return-value]
        assert coordinator.schedule(next, (listed,)).fetch() == 1
        with pytest.raises(CheckpointError, match=r"list_iterator\. Let the function .*from_iterable"):
            mpidist.Checkpoint(seen=tally.seen, listed=listed).save(folder / "d")

        def broken() -> mpidist.data.Dataset:
            raise LookupError("no such file")

        never = iter(coordinator.create_per_worker_dataset(broken))
        with pytest.raises(CheckpointError, match="LookupError: no such file"):
            mpidist.Checkpoint(seen=tally.seen, never=never).save(folder / "d")
        # Another pipeline: who reads fails, also a function that has captured the iterator.
        other = iter(coordinator.create_per_worker_dataset(mpidist.data.Dataset.range(9)))
        step = lambda: int(next(other))  # noqa: E731
        assert coordinator.schedule(step).fetch() == 0
        mpidist.Checkpoint(seen=tally.seen, steps=tally.steps, batches=other).restore(path)
        for function, args in ((step, ()), (next, (other,))):
            failed = coordinator.schedule(function, args, on_error="keep")
            coordinator.join()
            with pytest.raises(ValueError, match="the saved position of a dataset does not fit this dataset"):
                failed.fetch()
        with pytest.raises(CheckpointError, match=r"are `columns` and `parts`, the checkpoint has \['iterations'"):
            mpidist.Checkpoint(seen=tally.seen, steps=tally.batches).restore(path)
        with pytest.raises(ValueError, match="expecting dataset to be a variable or an object that holds"):
            mpidist.Checkpoint(dataset=tally.dataset)

    on_chief(communicator, program)
