"""The loop of a training: epochs and steps, after each of which all ranks do the same."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from mpidist.training.callbacks.hooks import CallbackHooks
from mpidist.training.position import History, Totals, TrainingPosition
from mpidist.training.results import PAUSE, STOP
from mpidist.training.way import Steps, StepSource, StepTask, Way


class FitPlan(NamedTuple):
    """The arguments of `fit`.

    Attributes:
        epochs: The number of epochs.
        steps_per_epoch: The number of steps of one; None if it is a pass over the data.
    """

    epochs: int
    steps_per_epoch: int | None


class Driver(Protocol):
    """The trainer, as its loop sees it."""

    stop_training: bool

    @property
    def position(self) -> TrainingPosition:
        """Local. The position."""
        ...

    @property
    def wish(self) -> int:
        """Local. See `StepOutcome.wish`."""
        ...

    @property
    def step(self) -> Callable[..., Any]:
        """Local. The program's function of a step."""
        ...

    @property
    def evaluate_step(self) -> Callable[..., Any] | None:
        """Local. The program's function that evaluates."""
        ...

    def updates(self) -> object:
        """Local. The numbers of updates of the optimizers."""
        ...

    def make(self, function: Callable[[], Any]) -> Any:
        """Collective. Make a step."""
        ...


class TrainingLoop:
    """The loop of one `fit`.

    Args:
        driver: The trainer.
        way: How steps are made.
        hooks: The callbacks.
        plan: The arguments of `fit`.
    """

    def __init__(self, driver: Driver, way: Way, hooks: CallbackHooks, plan: FitPlan) -> None:
        self._driver, self._way, self._hooks, self._plan = driver, way, hooks, plan
        self._position = driver.position
        self._steps: Steps | None = None

    def run(self, source: StepSource, validation: StepSource | None, attach: Callable[[], None]) -> History:
        """Collective. Train; returns the history.

        Args:
            source: The data.
            validation: The data that are evaluated after each epoch.
            attach: A function that is called when another pass has begun: a checkpoint is to hold its iterator.
        """
        position, way, plan = self._position, self._way, self._plan
        if validation is not None:
            for _ in range(position.validations):
                # The order of a shuffle depends on the number of the pass.
                validation.begin_pass()
        logs: dict[str, float] = {}
        self._hooks.call("on_train_begin", {})
        wish = way.agree(self._driver.wish)
        while position.epoch < plan.epochs and not wish:
            if position.epoch != position.begun and plan.steps_per_epoch is None:
                source.begin_pass()
                attach()
                # A handler may save, and end the program, before the first step of this pass.
                position.begun = position.epoch
            if position.step == 0:
                way.begin_run("step")
            self._hooks.call("on_epoch_begin", position.epoch, {})
            wish = self._train(source, attach)
            if wish == PAUSE:
                logs = position.totals.values()
                break
            logs = self._end_epoch(way.end_run("step", position.totals), validation)
            # By the values that an epoch has a callback may wish the end.
            wish = way.agree(max(wish, self._driver.wish))
        if wish == STOP:
            position.is_ended = True
            self._driver.stop_training = True
        self._hooks.call("on_train_end", logs)
        way.finish()
        return position.histories[position.fit].copy()

    def settle(self) -> None:
        """Collective. Count the steps that are under way."""
        if self._steps is not None:
            self._steps.settle()

    def _train(self, source: StepSource, attach: Callable[[], None]) -> int:
        """Collective. The steps of an epoch; returns the wish with which it has ended."""
        position, plan = self._position, self._plan
        limit = source.pass_steps if plan.steps_per_epoch is None else plan.steps_per_epoch
        batch, wish, is_empty = position.step, 0, False

        def before() -> None:
            self._hooks.call("on_train_batch_begin", batch, {})

        task = StepTask(
            self._driver.step, "step", position.totals, position.count, lambda: limit - position.step,
            lambda: self._driver.wish, before, self._driver.updates, self._driver.make,
        )
        self._steps = steps = self._way.steps(source, task)
        position.catch_up_by(steps.catch_up)
        while True:
            outcome = steps.advance()
            if outcome is None:
                if plan.steps_per_epoch is None or position.step >= limit:
                    break
                # The data end within the epoch; a pass may have ended with the epoch before.
                require_batches(not is_empty)
                is_empty = True
                source.begin_pass()
                attach()
                continue
            is_empty = False
            self._hooks.call("on_train_batch_end", batch, position.totals.means(outcome.sums))
            batch += 1
            wish = outcome.wish if self._way.leaves_epochs else 0
            if wish:
                steps.settle()
                break
        require_batches(batch)
        return wish

    def _end_epoch(self, logs: dict[str, float], validation: StepSource | None) -> dict[str, float]:
        """Collective. Evaluate, count the epoch, and call the callbacks; returns the values of the epoch."""
        position = self._position
        if validation is not None:
            found = evaluate(self._driver, self._way, self._hooks, validation, None)
            logs = {**logs, **{f"val_{name}": value for name, value in found.items()}}
            validation.begin_pass()
            position.validations += 1
        position.end_epoch(logs)
        self._hooks.call("on_epoch_end", position.epoch - 1, logs)
        return logs


def evaluate(driver: Driver, way: Way, hooks: CallbackHooks, source: StepSource, limit: int | None) -> dict[str, float]:
    """Collective. Evaluate the pass of a source; returns the values by name.

    Args:
        driver: The trainer.
        way: How steps are made.
        hooks: The callbacks.
        source: The data.
        limit: The largest number of steps.

    Raises:
        ValueError: The data have no batch.
    """
    totals, batch = Totals(), 0
    hooks.call("on_test_begin", {})

    def before() -> None:
        hooks.call("on_test_batch_begin", batch, {})

    function: Any = driver.evaluate_step
    task = StepTask(
        function, "evaluate_step", totals, totals.add, lambda: (math.inf if limit is None else limit) - batch,
        lambda: 0, before, lambda: 0, driver.make,
    )
    way.begin_run("evaluate_step")
    steps = way.steps(source, task)
    while (outcome := steps.advance()) is not None:
        hooks.call("on_test_batch_end", batch, totals.means(outcome.sums))
        batch += 1
    require_batches(batch)
    logs = way.end_run("evaluate_step", totals)
    hooks.call("on_test_end", logs)
    return logs


def require_batches(there_are: object) -> None:
    """Local. Raise ValueError if there was no batch; the same on every rank."""
    if not there_are:
        raise ValueError(
            "the dataset gave no batch: expected at least one in each pass. Look at its length, and at "
            "`drop_remainder=True` of a batch that is larger than the dataset"
        )
