"""Functions and data sets as users of tf.distribute write them: they work, or the error tells the way out."""

from __future__ import annotations

import dataclasses
import functools
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import pytest

import mpidist
from mpidist.comm.group.communicator import Communicator
from mpidist.coordinator.coordinator import ClusterCoordinator
from mpidist.parameter_server.options import ServerOptions
from mpidist.strategy.parameter_server.strategy import ParameterServerStrategy
from tests.parallel.serving.test_parameter_server import on_chief

pytestmark = pytest.mark.mpi(min_size=3)


class Model(mpidist.Module):
    """A model as users write it, whose methods are scheduled."""

    def __init__(self) -> None:
        self.weight = mpidist.Variable(np.ones(3), name="weight")

    def __call__(self, x: float) -> float:
        return float(self.weight.value().sum() * x)

    def scaled(self, x: float, factor: float = 1.0) -> float:
        return self(x) * factor


def test_any_callable_and_any_argument(communicator: Communicator) -> None:
    def program(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        with strategy.scope():
            model = Model()

        def fetch(fn: Any, *args: Any, **kwargs: Any) -> Any:
            return coordinator.schedule(fn, args, kwargs).fetch()

        assert fetch(model, 2) == 6
        assert fetch(model.scaled, 2, factor=0.5) == 3
        assert fetch(functools.partial(model.scaled, factor=2.0), 1) == 6
        assert fetch(lambda given: given(3), model) == 9
        assert fetch(max, 4, 5) == 5
        nest = ("x", None, b"y", 3.5, {"a": [1]}, (1, 2), {3})
        assert fetch(lambda *args, **kwargs: (args, kwargs), *nest, none=None) == (nest, {"none": None})
        assert fetch(lambda: (lambda: 4))() == 4
        # Each call has the arguments and the captured values of its time.
        array, values = np.zeros(3), []
        for number in range(4):
            array[:] = number
            values.append(coordinator.schedule(lambda given: (given[0], number), (array,)))  # noqa: B023
        assert coordinator.fetch(values) == [(number, number) for number in range(4)]
        with pytest.raises(TypeError, match=r"value that cannot be sent to the coordinator: .*create_per_worker_value"):
            coordinator.schedule(lambda: (x for x in range(3)), on_error="keep").fetch()

    on_chief(communicator, program)


def test_objects_with_slots_come_and_go(communicator: Communicator) -> None:
    def program(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        # Classes of the program's own, which workers do not import.
        @dataclasses.dataclass(slots=True)
        class Losses:
            first: float
            second: float

        class Few:
            __slots__ = ("__own", "given")

            def __init__(self, given: int) -> None:
                self.__own, self.given = 1, given

            def total(self) -> int:
                return self.__own + self.given

        class More(Few):
            __slots__ = "more"

        class Pair(NamedTuple):
            first: int
            second: int

        for made in (lambda: Losses(1, 2), lambda: Few(3), lambda: More(3), lambda: Pair(1, 2)):
            found = coordinator.schedule(made).fetch()
            assert type(found) is type(made())
            if isinstance(found, Few):
                assert coordinator.schedule(lambda few: few.total(), (found,)).fetch() == found.total() == 4
            else:
                assert found == made()

    on_chief(communicator, program)


def test_threads_of_a_function_take_turns(communicator: Communicator) -> None:
    """Their changes would lie on top of each other on the server, and be numbers that nobody has given."""

    def program(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        with strategy.scope():
            small, table = mpidist.Variable(np.zeros(1000)), mpidist.Variable(np.zeros((50, 4)))
            optimized = mpidist.Variable(np.zeros(7))
        optimizer = mpidist.optimizers.SGD(1.0)
        optimizer.build([optimized])

        def change(number: int) -> None:
            if number == 3:
                optimizer.apply_gradients([(-np.ones(7), optimized)])
            for _ in range(20):
                small.assign_add(np.ones(1000))
                table.scatter_add(mpidist.IndexedSlices(np.ones((2, 4)), np.array([1, 7]), (50, 4)))
                small.value()

        def step() -> tuple[set[float], set[float]]:
            interval = sys.getswitchinterval()
            sys.setswitchinterval(1e-6)
            with ThreadPoolExecutor(4) as pool:
                list(pool.map(change, range(4)))
            sys.setswitchinterval(interval)
            return set(small.numpy().tolist()), set(table.numpy()[1].tolist())

        for number in range(1, 6):
            assert coordinator.schedule(step, worker=0).fetch() == ({80.0 * number}, {80.0 * number})
            assert set(small.numpy().tolist()) == {80.0 * number}
            assert set(optimized.numpy().tolist()) == {number}

    on_chief(communicator, program, ServerOptions(heap_bytes=1 << 23, slot_bytes=1 << 20))


class OddError(Exception):
    """One that does odd things: see the functions of its uses."""

    def __init__(self, text: Any = None, reduce: Any = None) -> None:
        super().__init__(text)
        self.text, self.reduce = text, reduce

    def __str__(self) -> str:
        return str(self.text())

    def __reduce__(self) -> Any:
        return self.reduce()


def fail(*_: object) -> Any:
    raise ZeroDivisionError


def throw(kind: Any = SystemExit, *given: Any) -> None:
    raise kind(*given)


@pytest.mark.parametrize(("function", "text"), [
    (lambda: sys.exit(0), r"has called sys.exit\(0\), which ends no worker"),
    (throw, r"has called sys.exit\(None\), which ends no worker"),
    (functools.partial(throw, OddError, fail, fail), "OddError: it has no text"),
    (functools.partial(throw, OddError, int, lambda: (sys.exit, (0,))), "OddError: 0"),
    (functools.partial(throw, OddError, int, lambda: (int, (3,))), "OddError: 0"),
], ids=["exits", "raises SystemExit", "without text", "exits where it is read", "becomes a number"])
def test_whatever_a_function_raises_is_an_error_of_the_coordinator(
    communicator: Communicator, function: Any, text: str
) -> None:
    """No worker ends by it, and no program comes to a good end."""

    def program(_: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        value = coordinator.schedule(function, on_error="keep")
        with pytest.raises(RuntimeError, match=text):
            value.fetch()
        assert len(coordinator.fetch([coordinator.schedule(lambda: 1, worker=0), 2])) == 2

    on_chief(communicator, program)


def test_functions_of_data_sets(communicator: Communicator) -> None:
    workers = communicator.size - 2

    class Make:
        def __call__(self, context: mpidist.InputContext) -> mpidist.data.Dataset:
            return mpidist.data.Dataset.range(context.num_input_pipelines)

        def without(self) -> mpidist.data.Dataset:
            return mpidist.data.Dataset.range(4)

    def with_default(size: int = 5) -> mpidist.data.Dataset:
        return mpidist.data.Dataset.range(size)

    def sized(context: mpidist.InputContext, size: int) -> mpidist.data.Dataset:
        assert context.num_input_pipelines == workers
        return mpidist.data.Dataset.range(size)

    def program(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        del strategy
        functions: tuple[Any, ...] = (Make(), Make().without, with_default, functools.partial(sized, size=6))
        for dataset_fn, size in zip(functions, (workers, 4, 5, 6), strict=True):
            dataset = coordinator.create_per_worker_dataset(dataset_fn)
            assert coordinator.schedule(lambda given: len(list(given)), (dataset,)).fetch() == size

        def fail() -> mpidist.data.Dataset:
            raise LookupError("no files there")

        # Who uses a data set that could not be made fails as the making did; others do not notice.
        iterator = iter(coordinator.create_per_worker_dataset(fail))
        assert coordinator.schedule(lambda: 3).fetch() == 3
        with pytest.raises(LookupError, match="no files there"):
            coordinator.schedule(next, (iterator,), on_error="keep").fetch()

    on_chief(communicator, program)


def test_step_and_learning_rate_are_the_coordinators(communicator: Communicator) -> None:
    def program(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        with strategy.scope():
            weight, other = mpidist.Variable(0.0), mpidist.Variable(0.0)
            optimizer, second = mpidist.optimizers.SGD(1.0), mpidist.optimizers.SGD(lambda step: 10.0 ** -step)
        optimizer.build([weight])
        second.build([other])

        def step() -> None:
            optimizer.apply_gradients([(1.0, weight)])
            second.apply_gradients([(1.0, other)])
            optimizer.apply_gradients([(1.0, weight)])

        coordinator.schedule(step)
        coordinator.join()
        optimizer.learning_rate = 0.5
        coordinator.schedule(step)
        coordinator.join()
        assert (float(weight), optimizer.iterations) == (-3.0, 4)
        np.testing.assert_allclose(float(other), -1.1)
        assert second.iterations == 2

        def set_rate() -> None:
            optimizer.learning_rate = 0.1

        for function in (lambda: optimizer.iterations, lambda: optimizer.learning_rate, set_rate):
            with pytest.raises(RuntimeError, match=r"SGD\.(iterations|learning_rate) is not known on a worker: "):
                coordinator.schedule(function, on_error="keep").fetch()
        assert "on a worker" in coordinator.schedule(lambda: repr(optimizer)).fetch()

    on_chief(communicator, program)
