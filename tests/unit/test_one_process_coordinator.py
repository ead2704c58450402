"""A process without a launcher that is coordinator, worker and server at once, as in a notebook."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist.coordinator.coordinator import ClusterCoordinator
from mpidist.strategy.parameter_server import ParameterServerStrategy, ServerOptions


@pytest.fixture
def strategy(monkeypatch: pytest.MonkeyPatch) -> Iterator[ParameterServerStrategy]:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    with ParameterServerStrategy(options=ServerOptions(heap_bytes=1 << 22)) as strategy:
        yield strategy


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
