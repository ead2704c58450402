"""A process without a launcher that is coordinator, worker and server at once, as in a notebook."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist.coordinator import experimental_get_current_worker_index
from mpidist.coordinator.coordinator import ClusterCoordinator
from mpidist.errors import CancelledError
from mpidist.strategy.parameter_server import ParameterServerStrategy, ServerOptions


@pytest.fixture
def strategy(monkeypatch: pytest.MonkeyPatch) -> Iterator[ParameterServerStrategy]:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    # Where another one stands, as in a shell's background, the library leaves it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with ParameterServerStrategy(options=ServerOptions(heap_bytes=1 << 22)) as strategy:
            yield strategy
    finally:
        signal.signal(signal.SIGINT, before)


def test_functions_run_while_the_program_is_in_the_scope(strategy: ParameterServerStrategy) -> None:
    coordinator = ClusterCoordinator(strategy)
    with strategy.scope():
        weight = mpidist.Variable(np.ones(3))
        optimizer, other = mpidist.optimizers.SGD(0.5), mpidist.optimizers.SGD(0.25)
        optimizer.build([weight])
        other.build([weight])
        # One optimizer is captured, the other one is an argument.
        coordinator.schedule(lambda: optimizer.apply_gradients([(np.ones(3), weight)]))
        coordinator.schedule(lambda given: given.apply_gradients([(np.ones(3), weight)]), (other,))
        coordinator.join()
    assert weight.numpy().tolist() == [0.25] * 3


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"args": 3}, r"`args` must be a tuple of the function's arguments, as args=\(value,\), got 3"),
        ({"args": "abc"}, r"`args` must be a tuple .* got 'abc'"),
        ({"args": np.ones(2)}, r"`args` must be a tuple .* got an? "),
        ({"kwargs": [1]}, r"`kwargs` must be a dictionary of the function's arguments, got \[1\]"),
    ],
    ids=["a number", "a text", "an array", "a list"],
)
def test_arguments_come_in_a_tuple_and_a_dictionary(
    strategy: ParameterServerStrategy, given: dict[str, Any], text: str
) -> None:
    coordinator = ClusterCoordinator(strategy)
    for call in (coordinator.schedule, coordinator.create_per_worker_value):
        with pytest.raises(TypeError, match=text):
            call(abs, **given)
    assert coordinator.schedule(max, (1, 2), {"key": abs}).fetch() == 2


def test_a_coordinator_is_not_sent(strategy: ParameterServerStrategy) -> None:
    coordinator = ClusterCoordinator(strategy)
    with pytest.raises(TypeError, match=r"captures 'coordinator', .* cannot be sent .*: it is of this process"):
        coordinator.schedule(lambda: coordinator.done() or 3)
    with pytest.raises(TypeError, match=r"is given argument 0, .* cannot be sent .*: it is of this process"):
        coordinator.schedule(repr, (coordinator,))


def test_schedule_waits_for_room_in_the_queue(strategy: ParameterServerStrategy) -> None:
    coordinator = ClusterCoordinator(strategy, queue_size=2)
    values = [coordinator.schedule(abs, (number,)) for number in range(3)]
    assert not any(value.is_done for value in values), "one is the worker's, and two wait"
    values.append(coordinator.schedule(abs, (3,)))
    assert [value.is_done for value in values] == [True, False, False, False]
    assert coordinator.fetch(values) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "wait",
    [
        lambda coordinator, values: coordinator.join(),
        lambda coordinator, values: coordinator.done(),
        lambda coordinator, values: coordinator.fetch(values),
        lambda coordinator, values: coordinator.schedule(abs, (7,)),
    ],
    ids=["join", "done", "fetch", "schedule"],
)
def test_an_interrupt_comes_between_functions(
    strategy: ParameterServerStrategy, wait: Callable[[ClusterCoordinator, list[Any]], object]
) -> None:
    coordinator = ClusterCoordinator(strategy, queue_size=2)
    with strategy.scope():
        counts = mpidist.Variable(np.zeros(3))

    def work(number: int) -> int:
        counts.assign_add(np.eye(3)[number])
        if number == 0:
            signal.raise_signal(signal.SIGINT)
        return number

    for times in (1, 2):
        values = [coordinator.schedule(work, (number,)) for number in range(3)]
        with pytest.raises(KeyboardInterrupt):
            wait(coordinator, values)
        assert not values[2].is_done
        coordinator.join()
        assert coordinator.fetch(values) == [0, 1, 2]
        assert counts.numpy().tolist() == [times] * 3, "nothing is lost, and nothing counts twice"


def test_an_interrupt_while_an_error_cancels_leaves_the_error(strategy: ParameterServerStrategy) -> None:
    coordinator = ClusterCoordinator(strategy)

    def fail() -> None:
        raise LookupError("of the function")

    failed = coordinator.schedule(fail)
    # This one runs when the first has failed, and is waited for.
    interrupting = coordinator.schedule(signal.raise_signal, (signal.SIGINT,))
    behind = coordinator.schedule(abs, (1,))
    with pytest.raises(KeyboardInterrupt):
        coordinator.join()
    with pytest.raises(LookupError, match="of the function"):
        coordinator.join()
    with pytest.raises(CancelledError):
        behind.fetch()
    with pytest.raises(LookupError, match="of the function"):
        failed.fetch()
    assert interrupting.fetch() is None
    assert coordinator.schedule(abs, (-2,)).fetch() == 2


def test_a_function_knows_the_index_of_its_worker(strategy: ParameterServerStrategy) -> None:
    coordinator, index = ClusterCoordinator(strategy), experimental_get_current_worker_index
    assert coordinator.schedule(index).fetch() == 0
    assert coordinator.schedule(lambda: strategy.run(index)).fetch() == 0
    made = coordinator.create_per_worker_value(index)
    assert coordinator.schedule(lambda value: value, (made,)).fetch() == 0
    with strategy.scope(), pytest.raises(RuntimeError, match=r"inside a function .* ClusterCoordinator\(strategy\)"):
        index()
    with pytest.raises(RuntimeError, match="inside a function that a worker runs"):
        index()


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"worker": 1}, "`worker` must be from 0 to 0, got 1"),
        ({"worker": True}, "`worker` must be an integer of at least 0, got True"),
        ({"retries": -1}, "`retries` must be an integer of at least 0, got -1"),
        ({"priority": "high"}, "`priority` must be a number, got 'high'"),
        ({"on_error": ["keep"]}, r"`on_error` must be 'cancel' or 'keep', got \['keep'\]"),
        ({"kwargs": {1: 2}}, "the names of the function's arguments as keys, got 1"),
        ({"queue_size": 0}, "`queue_size` must be an integer of at least 1, got 0"),
        ({"closure_timeout": 0}, "`closure_timeout` must be more than 0 seconds"),
        ({"prefetch": 1}, "`prefetch` must be True or False, got 1"),
    ],
)
def test_a_wrong_rule_is_named(strategy: ParameterServerStrategy, given: dict[str, Any], text: str) -> None:
    is_option = given.keys() <= {"queue_size", "closure_timeout", "prefetch"}
    with pytest.raises((TypeError, ValueError), match=text):
        ClusterCoordinator(strategy, **given) if is_option else ClusterCoordinator(strategy).schedule(abs, **given)
