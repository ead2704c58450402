"""Steps on workers: the chief schedules them, and adds up what they add to the states of metrics."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, cast

import keras
import numpy as np

from mpidist.coordinator.coordinator import ClusterCoordinator
from mpidist.errors import EndOfDataError
from mpidist.keras.binding import ModelBinding
from mpidist.keras.input.creator import DatasetCreator
from mpidist.keras.private import build_with
from mpidist.keras.served.sending import describe
from mpidist.keras.served.state import ServedState
from mpidist.keras.served.tables import building, chief_tables
from mpidist.keras.served.worker import make_here, shapes, test, train

if TYPE_CHECKING:
    from mpidist.strategy.parameter_server.strategy import ParameterServerStrategy

# Steps that wait, or run, for each worker: a worker has its next one while the chief takes a value.
_STEPS_PER_WORKER = 3


class WorkerSteps:
    """The copies of a model on the workers, and their steps.

    Args:
        model: The chief's model, compiled.
        binding: The binding of the model.
        state: The served variables of the model.
        data: The input, by which the model is built if it is not.
    """

    def __init__(self, model: Any, binding: ModelBinding, state: ServedState, data: DatasetCreator) -> None:
        self._coordinator = ClusterCoordinator(cast("ParameterServerStrategy", binding.strategy))
        self._model, self._state = model, state
        self._build(data)
        description = describe(model, binding, chief_tables(model))
        self._copies: Any = self._coordinator.create_per_worker_value(make_here, args=(description,))
        self._window = _STEPS_PER_WORKER * len(binding.strategy.roles.workers)  # type: ignore[attr-defined]
        self._totals: list[Any] = []

    def _build(self, data: DatasetCreator) -> None:
        """Build the model, its metrics and losses from the shapes of a batch, which a worker tells."""
        self._state.place()
        batches = iter(self._coordinator.create_per_worker_dataset(data.dataset_fn))
        try:
            batch = self._coordinator.schedule(shapes, args=(batches,)).fetch()
        except EndOfDataError:
            raise ValueError("the dataset of `dataset_fn` has no batch on any worker") from None
        with building():
            build_with(self._model, batch)
        self._state.place()

    def iterator(self, data: DatasetCreator) -> Any:
        """Local. The batches of the workers."""
        return iter(self._coordinator.create_per_worker_dataset(data.dataset_fn))

    def train(self) -> Callable[..., Any]:
        """Local. The function that makes a step of training."""
        state = self._state
        return functools.partial(train, self._copies, state.dense, state.tables, state.build_optimizer())

    def test(self) -> Callable[..., Any]:
        """Local. The function that makes a step of `evaluate`."""
        return functools.partial(test, self._copies, self._state.dense, self._state.tables)

    def run(self, function: Any, batches: Any, steps: int, name: str) -> Iterator[int]:
        """Local. Make steps on the workers, and yield their numbers as they have counted, in order.

        Args:
            function: A function that makes a step.
            batches: The batches of the workers.
            steps: The number of steps.
            name: The name of the argument with the number of steps, for the error.

        Raises:
            ValueError: The data of all workers have ended.
        """
        self._totals = []
        waiting: deque[Any] = deque()
        scheduled = 0
        for number in range(steps):
            while scheduled < steps and len(waiting) < self._window:
                waiting.append(self._coordinator.schedule(function, args=(batches,)))
                scheduled += 1
            try:
                added = waiting.popleft().fetch()
            except EndOfDataError:
                raise ValueError(
                    f"the data of all workers ended after {number} steps, expected {name}={steps}. Let `dataset_fn` "
                    "return a dataset with `.repeat()`"
                ) from None
            totals = self._totals or [0] * len(added)
            self._totals = [np.add(*pair) for pair in zip(totals, added, strict=True)]
            yield number

    def results(self) -> dict[str, float]:
        """Local. The metrics over the steps of the last `run` so far."""
        for variable, total in zip(self._model.metrics_variables, self._totals, strict=True):
            variable.assign(total)
        found = self._model.get_metrics_result()
        return {name: float(keras.ops.convert_to_numpy(value)) for name, value in found.items()}
