"""Steps under parameter servers: the chief schedules them on workers, and takes their values in order."""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from mpidist.arguments import described
from mpidist.coordinator.coordinator import ClusterCoordinator
from mpidist.coordinator.remote_value import PerWorkerValues, RemoteValue
from mpidist.data.dataset import Dataset
from mpidist.data.input_context import InputContext
from mpidist.errors import EndOfDataError
from mpidist.metrics.metric import Metric
from mpidist.strategy.parameter_server.strategy import ParameterServerStrategy
from mpidist.training.position import Totals
from mpidist.training.results import StepOutcome, arguments_of, measured
from mpidist.training.served_metrics import ServedMetric, ServedMetrics
from mpidist.training.way import StepSource, StepTask

# Steps that wait, or run, for each worker: a worker has its next one while the chief takes a value.
_STEPS_PER_WORKER = 3


def share(dataset: Dataset, context: InputContext) -> Dataset:
    """Local. The batches of one worker; each example belongs to one of them."""
    return dataset.shard(context.num_input_pipelines, context.input_pipeline_id)


def run_step(strategy: ParameterServerStrategy, fn: Any, function: str, batches: Any) -> tuple[Any, Any]:
    """Local, on a worker. Make a step; returns the sums of its arrays, and its metrics.

    Args:
        strategy: The strategy.
        fn: The program's function.
        function: The name of the argument that gave it.
        batches: The worker's iterator.
    """
    batch = next(batches)
    result = strategy.run(fn, args=arguments_of(batch))
    arrays, metrics = result, {}
    if isinstance(result, dict):
        metrics = {name: ServedMetric(one.measure, one.sums) for name, one in result.items() if isinstance(one, Metric)}
        arrays = {name: one for name, one in result.items() if name not in metrics}
    return measured(arrays, batch, function=function).sums, metrics


class WorkerSource:
    """A dataset of each worker's own.

    Args:
        data: The datasets of all workers.
    """

    def __init__(self, data: PerWorkerValues) -> None:
        self._data = data
        self.begin_pass()

    @property
    def batches(self) -> Any:
        """Local. See `StepSource.batches`."""
        return self._batches

    @property
    def pass_steps(self) -> float:
        """Local. Infinity: the number of steps is not known."""
        return math.inf

    def begin_pass(self) -> None:
        """Local. See `StepSource.begin_pass`."""
        self._batches: Any = iter(self._data)


class ScheduledSteps:
    """Steps that workers make.

    Args:
        coordinator: Schedules them.
        source: The batches.
        task: See `StepTask`.
        note_metrics: A function that takes the metrics that a step has returned.
        read: Reads the metrics on the servers.
        function: A function that makes a step on a worker.
    """

    def __init__(
        self, coordinator: ClusterCoordinator, source: StepSource, task: StepTask,
        note_metrics: Callable[[Mapping[str, ServedMetric]], None], read: Callable[[], None], function: Any,
    ) -> None:
        self._coordinator, self._source, self._task = coordinator, source, task
        self._note_metrics, self._read, self._function = note_metrics, read, function
        # Values of steps, some of which may have been counted before their turn.
        self._waiting: deque[RemoteValue | StepOutcome] = deque()
        self._window = _STEPS_PER_WORKER * len(coordinator.strategy.roles.workers)

    def advance(self) -> StepOutcome | None:
        """Local. See `Steps.advance`."""
        outcome: StepOutcome | None = self._task.around(self._advance)
        return outcome

    def _advance(self) -> StepOutcome | None:
        while True:
            self._schedule()
            if not self._waiting:
                return None
            self._take(0)
            if (outcome := self._waiting.popleft()) is not None and isinstance(outcome, StepOutcome):
                self._task.before()
                return StepOutcome(outcome.sums, self._task.wish())

    def _schedule(self) -> None:
        """Schedule as many steps as may be made, and workers have use for."""
        under_way = sum(isinstance(one, RemoteValue) for one in self._waiting)
        while (
            under_way < self._task.left() and len(self._waiting) < self._window and not self._source.batches.is_at_end
        ):
            self._waiting.append(self._coordinator.schedule(self._function, args=(self._source.batches,)))
            under_way += 1

    def _take(self, place: int) -> None:
        """Wait for a step, and count it; one that found no data is not counted."""
        value = self._waiting[place]
        if isinstance(value, StepOutcome):
            return
        try:
            sums, metrics = value.fetch()
        except EndOfDataError:
            return
        self._waiting[place] = StepOutcome(sums, 0)
        self._task.add(sums)
        self._note_metrics(metrics)

    def settle(self) -> None:
        """Local. See `Steps.settle`."""
        for place in range(len(self._waiting)):
            self._take(place)

    def catch_up(self) -> None:
        """Local. See `Steps.catch_up`."""
        for place, value in enumerate(self._waiting):
            if isinstance(value, RemoteValue) and value.is_done:
                self._take(place)
        self._read()


class Scheduled:
    """The steps of a strategy with parameter servers, on its chief.

    Args:
        strategy: The strategy.
        served: The metrics on the servers.
        totals: The sums of the training, to which a checkpoint adds the values of metrics.
        held: A function that returns the identities of the variables that the program's checkpoint holds.
    """

    leaves_epochs = True

    def __init__(
        self, strategy: ParameterServerStrategy, served: ServedMetrics, totals: Totals,
        held: Callable[[], set[int]],
    ) -> None:
        self._strategy = strategy
        self._coordinator = ClusterCoordinator(strategy)
        self._served, self._totals, self._held = served, totals, held
        self._saved: set[int] = set()
        self._functions: dict[str, Any] = {}

    def source(self, dataset: Any, argument: str, *, is_validation: bool) -> WorkerSource:  # noqa: ARG002 - of others
        """Local. See `Way.source`; a dataset's batches are dealt to the workers."""
        # Not while steps are under way: a walk over the checkpoint counts those that have ended.
        self._saved = self._held()
        if isinstance(dataset, PerWorkerValues) and not dataset.is_iterator:
            return WorkerSource(dataset)
        if isinstance(dataset, Dataset):
            made = self._coordinator.create_per_worker_dataset(functools.partial(share, dataset))
        elif callable(dataset):
            made = self._coordinator.create_per_worker_dataset(dataset)
        else:
            raise TypeError(
                f"`{argument}` must be a mpidist.data.Dataset, a function of an InputContext that makes a worker's "
                f"dataset, or what ClusterCoordinator.create_per_worker_dataset returns, got {described(dataset)}"
            )
        return WorkerSource(made)

    def steps(self, source: StepSource, task: StepTask) -> ScheduledSteps:
        """Local. See `Way.steps`."""
        # One function for all epochs: it is sent to each worker once.
        if task.function not in self._functions:
            self._functions[task.function] = functools.partial(run_step, self._strategy, task.fn, task.function)

        def note(metrics: Mapping[str, ServedMetric]) -> None:
            self._served.note(task.function, metrics, self._saved)

        return ScheduledSteps(self._coordinator, source, task, note, self._read, self._functions[task.function])

    def _read(self) -> None:
        """Read the metrics of the training for a checkpoint: the next program may find no step of the epoch left."""
        self._served.read()
        self._totals.served_values = self._served.values("step")

    def agree(self, wish: int) -> int:
        """Local. The chief decides alone."""
        return wish

    def begin_run(self, function: str) -> None:
        """Local. See `Way.begin_run`."""
        self._served.begin(function)

    def end_run(self, function: str, totals: Totals) -> dict[str, float]:
        """Local. See `Way.end_run`."""
        self._coordinator.join()
        self._served.read()
        values = self._served.values(function)
        if values:
            totals.served_values = values
        return totals.values()

    def finish(self) -> None:
        """Local. Wait for what is still under way."""
        self._coordinator.join()
