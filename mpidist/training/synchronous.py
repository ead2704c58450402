"""Steps of synchronous strategies: every rank makes each step with its share of the batch."""

from __future__ import annotations

import math
from typing import Any, cast

from mpidist.arguments import described
from mpidist.data.dataset import Dataset
from mpidist.data.distribution.distributed_dataset import DistributedDataset
from mpidist.data.distribution.distributed_iterator import DistributedIterator
from mpidist.strategy.base import Strategy
from mpidist.strategy.hybrid.home import HybridArena
from mpidist.strategy.hybrid.strategy import HybridStrategy
from mpidist.training.logical import LogicalSteps
from mpidist.training.position import Totals
from mpidist.training.results import StepOutcome, add_up, arguments_of, measured
from mpidist.training.way import StepSource, StepTask

_NOTHING = object()


class DistributedSource:
    """A dataset that is distributed over ranks.

    Args:
        dataset: The dataset.
        pass_steps: See `StepSource.pass_steps`.
    """

    def __init__(self, dataset: DistributedDataset, pass_steps: float = math.inf) -> None:
        self._dataset = dataset
        steps = dataset.cardinality
        self._pass_steps = min(pass_steps, steps if steps >= 0 else math.inf)
        self._batches = iter(dataset)

    @property
    def batches(self) -> Any:
        """Local. See `StepSource.batches`."""
        return self._batches

    @property
    def pass_steps(self) -> float:
        """Local. See `StepSource.pass_steps`."""
        return self._pass_steps

    def begin_pass(self) -> None:
        """Local, on every rank. See `StepSource.begin_pass`."""
        # Known to be at its end, it may not have been asked for more.
        self._batches.close()
        self._batches = iter(self._dataset)


class DistributedSteps:
    """Steps that all ranks make together.

    Args:
        strategy: The strategy.
        source: The batches.
        task: See `StepTask`.
        logical: The steps by logical replicas; None: each rank computes with its share of the batch.
    """

    def __init__(self, strategy: Strategy, source: StepSource, task: StepTask, logical: LogicalSteps | None) -> None:
        self._strategy, self._source, self._task, self._logical = strategy, source, task, logical

    def advance(self) -> StepOutcome | None:
        """Collective. See `Steps.advance`."""
        if self._task.left() <= 0:
            return None
        outcome: StepOutcome | None = self._task.around(self._step)
        return outcome

    def _step(self) -> StepOutcome | None:
        task, batches = self._task, self._source.batches
        before, updates = batches.state(), task.updates()
        batch = next(batches, _NOTHING)
        if batch is _NOTHING:
            return None
        task.before()
        try:
            outcome = self._make(batch) if self._logical is None else self._logical.make(self._strategy, batch, task)
        except KeyboardInterrupt:
            # On all ranks, in one call. A program that saves now resumes with this batch, or after it if variables were
            # updated.
            if task.updates() == updates:
                batches.load_state(before)
            else:
                task.add({})
            for metric in task.totals.metrics.values():
                metric.reset_state()
            raise
        task.add(outcome.sums)
        return outcome

    def _make(self, batch: Any) -> StepOutcome:
        task = self._task
        mine = measured(self._strategy.run(task.fn, args=arguments_of(batch)), batch, function=task.function)
        task.totals.note(mine)
        return add_up(self._strategy, mine, task.wish())

    def settle(self) -> None:
        """Local. Nothing is under way."""

    def catch_up(self) -> None:
        """Local. Nothing is under way."""


def steps_behind(step: int, *batches: object) -> int:
    """Local. The number of steps that were made in an epoch that is a pass over the data.

    Args:
        step: Their number when the position was saved.
        batches: The iterators into which it may have been loaded, perhaps as one of other batches or of other groups.
    """
    found = [one.steps_behind for one in batches if isinstance(one, DistributedIterator)]
    return next((behind for behind in found if behind is not None), step)


class Synchronous:
    """The steps of a synchronous strategy.

    Args:
        strategy: The strategy.
        logical: See `DistributedSteps`.
    """

    def __init__(self, strategy: Strategy, logical: LogicalSteps | None = None) -> None:
        self._strategy, self._logical = strategy, logical
        self._groups = strategy if isinstance(strategy, HybridStrategy) and len(strategy.groups) > 1 else None

    def source(self, dataset: Any, argument: str, *, is_validation: bool) -> StepSource:
        """Collective. See `Way.source`."""
        strategy = self._strategy
        if isinstance(dataset, DistributedDataset):
            return DistributedSource(dataset)
        if callable(dataset) and not isinstance(dataset, Dataset):
            return DistributedSource(strategy.distribute_datasets_from_function(dataset))
        if not isinstance(dataset, Dataset):
            raise TypeError(
                f"`{argument}` must be a mpidist.data.Dataset of global batches, a DistributedDataset, or a function "
                f"of an InputContext that makes a dataset, got {described(dataset)}. For an iterable write "
                "mpidist.data.Dataset.from_iterable(...)"
            )
        if self._groups is None:
            return DistributedSource(strategy.experimental_distribute_dataset(dataset))
        if is_validation:
            # All of it in each group.
            return DistributedSource(Strategy.experimental_distribute_dataset(strategy, dataset))
        count = dataset.cardinality()
        # Groups that make their steps together must make equally many; so do saves after a number of steps.
        limit = count // len(self._groups.groups) if count >= 0 else math.inf
        return DistributedSource(strategy.experimental_distribute_dataset(dataset), limit)

    def steps(self, source: StepSource, task: StepTask) -> DistributedSteps:
        """Local. See `Way.steps`."""
        return DistributedSteps(self._strategy, source, task, self._logical)

    def agree(self, wish: int) -> int:
        """Collective, under `HybridStrategy` over all groups, of which the first decides. See `Way.agree`."""
        agreed = self._strategy.replicas.everyone.all_reduce_max(wish)
        if self._groups is None:
            return agreed
        home = cast(HybridArena, self._groups.home)
        return int(home.first_value_of_groups("whether the training ends", agreed))

    @property
    def leaves_epochs(self) -> bool:
        """Local. Whether a wish has effect in the middle of an epoch."""
        return self._groups is None

    def begin_run(self, function: str) -> None:
        """Local. Nothing: a step empties the metrics that it returns."""

    def end_run(self, function: str, totals: Totals) -> dict[str, float]:  # noqa: ARG002 - of served metrics
        """Local, on every rank. See `Way.end_run`."""
        return totals.values()

    def finish(self) -> None:
        """Collective, under `HybridStrategy` over all groups. See `Way.finish`."""
        if isinstance(self._strategy, HybridStrategy):
            self._strategy.finish()
