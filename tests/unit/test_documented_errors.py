"""The errors of tf.distribute's coordinator, row by row (reference of `tf.distribute.coordinator`, TensorFlow 2.20)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

import mpidist
from mpidist.coordinator import ClusterCoordinator, PerWorkerValues
from mpidist.parameter_server.options import ServerOptions
from mpidist.strategy.parameter_server.strategy import ParameterServerStrategy


@pytest.fixture(scope="module")
def strategy() -> Iterator[ParameterServerStrategy]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TF_CONFIG", raising=False)
        with ParameterServerStrategy(options=ServerOptions(heap_bytes=1 << 22)) as strategy:
            yield strategy


@pytest.fixture
def coordinator(strategy: ParameterServerStrategy) -> Iterator[ClusterCoordinator]:
    one = ClusterCoordinator(strategy)
    yield one
    # No test leaves an error to the next one.
    one.join()


def _make_with_variable() -> mpidist.data.Dataset:
    mpidist.Variable(1.0)
    return mpidist.data.Dataset.range(3)


# What is called, the error, its text.
OF_ARGUMENTS: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "a coordinator of another strategy": (
        lambda _: ClusterCoordinator(cast("Any", mpidist.OneDeviceStrategy("CPU:0"))),
        ValueError, "`strategy` must be a ParameterServerStrategy",
    ),
    "schedule what is no function": (lambda it: it.schedule(3), TypeError, "`fn` must be a function, got 3"),
    "a data set of another type": (
        lambda it: it.create_per_worker_dataset(5), ValueError, "Unexpected dataset type!",
    ),
    "iterate over what is no data set": (
        lambda it: iter(it.create_per_worker_value(int)), TypeError, "are not a dataset: pass them to `schedule`",
    ),
    "an element on the coordinator": (
        lambda it: next(iter(it.create_per_worker_dataset(mpidist.data.Dataset.range(3)))),
        NotImplementedError, "pass the iterator to `schedule`, and call `next` in the function",
    ),
    "run outside a function": (
        lambda it: it.strategy.run(abs, (1,)), RuntimeError, r"ClusterCoordinator\(strategy\).schedule\(function\)",
    ),
    "a resolver of another type": (
        lambda _: ParameterServerStrategy(cast("Any", 5)),
        ValueError, "`cluster_resolver` must be a ClusterResolver, got 5",
    ),
    "a partitioner of another type": (
        lambda _: ParameterServerStrategy(variable_partitioner=cast("Any", 3)),
        ValueError, "`variable_partitioner` must be a func",
    ),
}


@pytest.mark.parametrize("name", OF_ARGUMENTS)
def test_wrong_arguments_of_a_coordinator(coordinator: ClusterCoordinator, name: str) -> None:
    call, error, text = OF_ARGUMENTS[name]
    with pytest.raises(error, match=text):
        call(coordinator)


@pytest.mark.parametrize(
    ("dataset_fn", "error", "text"),
    [
        (_make_with_variable, ValueError, "a variable cannot be made inside a function that runs on a worker"),
        (lambda: 7, TypeError, "create_per_worker_dataset must return a dataset, .*returned 7"),
        (lambda: [][1], IndexError, "list index out of range"),
    ],
    ids=["makes a variable", "makes no data set", "raises"],
)
def test_a_data_set_that_cannot_be_made_is_an_error_of_the_functions_that_use_it(
    coordinator: ClusterCoordinator, dataset_fn: Callable[[], Any], error: type[Exception], text: str
) -> None:
    iterator = iter(coordinator.create_per_worker_dataset(dataset_fn))
    value = coordinator.schedule(next, (iterator,))
    with pytest.raises(error, match=text):
        value.fetch()
    # It was raised, and others do not mind.
    coordinator.join()
    assert coordinator.schedule(abs, (-3,)).fetch() == 3


def test_get_and_fetch_raise_the_error_of_the_function_and_join_does_not_again(
    coordinator: ClusterCoordinator,
) -> None:
    value = coordinator.schedule(int, ("x",))
    for wait in (value.get, value.fetch):
        with pytest.raises(ValueError, match="invalid literal"):
            wait()
    assert coordinator.schedule(abs, (-1,)).fetch() == 1
    coordinator.join()


@pytest.mark.parametrize("fetched", [5, "text", None, {"a": [1, (2,)]}])
def test_fetch_leaves_what_is_no_remote_value(coordinator: ClusterCoordinator, fetched: Any) -> None:
    assert coordinator.fetch(fetched) == fetched


def test_values_of_workers_are_numbers_of_resources(coordinator: ClusterCoordinator) -> None:
    assert isinstance(coordinator.create_per_worker_value(int), PerWorkerValues)
