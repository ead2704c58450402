"""`Trainer`: trains and evaluates by a function that makes one step, under any strategy."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

from mpidist.arguments import described, flag, whole
from mpidist.attributes import FixedAttributes
from mpidist.checkpoint.checkpoint import Checkpoint
from mpidist.checkpoint.manager import CheckpointManager
from mpidist.first_rank import is_chief
from mpidist.optimizers.optimizer import Optimizer
from mpidist.strategy.base import Strategy
from mpidist.strategy.hybrid.strategy import HybridStrategy
from mpidist.strategy.parameter_server.strategy import ParameterServerStrategy
from mpidist.training.callbacks.callback import Logs
from mpidist.training.callbacks.hooks import CallbackHooks
from mpidist.training.callbacks.model_checkpoint import ModelCheckpoint
from mpidist.training.logical import logical_steps
from mpidist.training.loop import FitPlan, TrainingLoop, evaluate
from mpidist.training.position import History, TrainingPosition
from mpidist.training.results import PAUSE, STOP
from mpidist.training.scheduled import Scheduled
from mpidist.training.synchronous import Synchronous, steps_behind
from mpidist.training.way import StepSource, Way

# The trainer's objects in the checkpoint of the program.
POSITION, BATCHES = "trainer", "batches_of_fit"


class Trainer(FixedAttributes):
    """Local. Trains and evaluates by a function that makes one step, under any strategy.

    The same program trains under every strategy: `step` is called in `strategy.run` on every rank, with its share of
    the global batch; under `ParameterServerStrategy` it is scheduled on workers, each with a batch of its own.

        def step(x, y):
            losses, gradients = ...                            # a loss for each example
            optimizer.apply_gradients(zip(gradients, model.variables))
            accuracy.update_state(y, predictions)
            return {"loss": losses, "accuracy": accuracy}

        manager = mpidist.CheckpointManager(mpidist.Checkpoint(model=model, optimizer=optimizer), "run", max_to_keep=3)
        trainer = mpidist.Trainer(strategy, step, checkpoint=manager)
        history = trainer.fit(dataset, epochs=10)

    What a step returns is a dict by name: an array with a row for each example counts by its elements, so that its mean
    is over the global batch; a metric of `mpidist.metrics` is itself. After a step the trainer has the sums of a
    metric, and the metric itself is empty.

    With a `CheckpointManager` the first `fit` restores the latest checkpoint, and continues there, also in the middle
    of an epoch: on as many ranks as before to the same bits. It saves at the end of each epoch, unless a
    `ModelCheckpoint` among the callbacks does so otherwise. The trainer adds its own state to the checkpoint, under the
    names `trainer` and `batches_of_fit_0`, of which the latter is the iterator of the first `fit`.

    With `logical_replicas` the bits are the same on any number of ranks, so that a job may also continue on another
    number. The steps are then made by `Strategy.gradients`, which calls `step` for micro-batches. It returns its
    values, and gradients beside them; `update` gets the sum of these, once for each step:

        def step(x, y):
            losses, gradients = ...                            # gradients: sums over the rows
            return {"loss": losses}, (gradients, len(x))

        def update(sums):
            gradients, count = sums
            pairs = [(one / count, variable) for one, variable in zip(gradients, model.variables)]
            optimizer.apply_gradients(pairs, skip_gradients_aggregation=True)

        trainer = mpidist.Trainer(strategy, step, logical_replicas=8, update=update)

    Args:
        strategy: The strategy.
        step: A function that makes a step with a batch: `step(*batch)`.
        checkpoint: A `CheckpointManager`, or a `Checkpoint`, of what is trained; None: nothing is saved. With a
            `Checkpoint` the program itself saves and restores, before `fit` or between two of them.
        evaluate_step: A function that evaluates a batch; it returns values as `step` does.
        resume: False: `fit` does not restore the manager's latest checkpoint.
        logical_replicas: The number of micro-batches of each step; see `Strategy.gradients`, also for what `step` may
            do. None: each rank makes its own step, and sums depend on their number.
        update: Updates the variables by what the steps of all micro-batches have returned beside their values.

    Raises:
        TypeError: An argument has a wrong type.
        ValueError: The checkpoint has another object under the name `trainer`; or of `logical_replicas` and `update`
            only one is given.
        NotImplementedError: `logical_replicas` under `ParameterServerStrategy` or `HybridStrategy`.

    Attributes:
        stop_training: Set it to True, on any rank, and all ranks leave `fit` after the next step, with the values of
            the epoch so far; the training counts as complete.
    """

    _assignable = frozenset({"stop_training"})
    _fixed = frozenset({"checkpoint", "evaluate_step", "manager", "position", "step", "strategy"})

    def __init__(
        self,
        strategy: Strategy,
        step: Callable[..., Any],
        *,
        checkpoint: Checkpoint | CheckpointManager | None = None,
        evaluate_step: Callable[..., Any] | None = None,
        resume: bool = True,
        logical_replicas: int | None = None,
        update: Callable[[Any], object] | None = None,
    ) -> None:
        if not isinstance(strategy, Strategy):
            raise TypeError(f"`strategy` must be a strategy of mpidist, got {described(strategy)}")
        if not callable(step):
            raise TypeError(f"`step` must be a function of a batch, got {described(step)}")
        if evaluate_step is not None and not callable(evaluate_step):
            raise TypeError(f"`evaluate_step` must be a function of a batch, or None, got {described(evaluate_step)}")
        manager = checkpoint if isinstance(checkpoint, CheckpointManager) else None
        held = checkpoint if manager is None else manager.checkpoint
        if held is not None and not isinstance(held, Checkpoint):
            raise TypeError(
                f"`checkpoint` must be a mpidist.Checkpoint, a CheckpointManager or None, got {described(checkpoint)}"
            )
        self.strategy, self.step, self.evaluate_step = strategy, step, evaluate_step
        self.manager: CheckpointManager | None = manager
        self.checkpoint: Checkpoint | None = held
        self.position = TrainingPosition()
        self._resumes = flag("resume", resume)
        self.stop_training = False
        self._logical = logical_steps(strategy, logical_replicas, update)
        if self.checkpoint is not None:
            if POSITION in vars(self.checkpoint):
                raise ValueError(
                    f"the checkpoint has an object {POSITION!r} already, got {vars(self.checkpoint)[POSITION]!r}: a "
                    "Trainer keeps its position under this name. Rename it, or give each Trainer its own Checkpoint"
                )
            setattr(self.checkpoint, POSITION, self.position)
        self._is_paused = False
        self._around: Callable[[Callable[[], Any]], Any] = _plainly
        self._optimizers: list[Optimizer] = []
        self._loop: TrainingLoop | None = None
        self._own_way: Way | None = None
        self._settle(Trainer)

    def fit(
        self,
        dataset: Any,
        epochs: int = 1,
        steps_per_epoch: int | None = None,
        validation_data: Any = None,
        callbacks: Iterable[Any] = (),
    ) -> History:
        """Collective. Train, from the position that was restored, else from the beginning.

        Another `fit` in the same program trains for further epochs, numbered from 0. A program that was started again
        calls them all again: those that were complete return at once.

        Args:
            dataset: A `Dataset` whose batches are global, and are shared by the ranks; under parameter servers each
                worker takes whole batches. Or a `DistributedDataset`, or a function of an `InputContext`.
            epochs: The number of epochs, those before a restart included.
            steps_per_epoch: The number of steps of an epoch. Each epoch continues the data where the last one stopped,
                and at the end of the data another pass begins. Default: an epoch is a pass over the data.
            validation_data: A dataset that is evaluated after each epoch; its values have names with `val_` before
                them.
            callbacks: `Callback`s, or other objects with Keras's hooks.

        Returns:
            The values of each epoch, the same on every rank.

        Raises:
            TypeError, ValueError: An argument has a wrong type or is out of range; the step returns something else than
                values of examples; the data have no batch; or the position is in an epoch with another number of steps.
            RuntimeError: Inside `run`, on an evaluator's rank, after the strategy is closed, or inside another `fit`.
            MismatchError: The ranks' steps return other names.
        """
        plan = FitPlan(
            whole("epochs", epochs, least=0),
            None if steps_per_epoch is None else whole("steps_per_epoch", steps_per_epoch, least=1),
        )
        if validation_data is not None and self.evaluate_step is None:
            raise ValueError("`validation_data` needs an `evaluate_step` of the Trainer, got None")
        hooks = self._hooks([*callbacks] if isinstance(callbacks, Iterable) else callbacks, plan)
        self._require_usable("fit")
        with self.strategy.scope(), ExitStack() as stack:
            way = self._way()
            source = way.source(dataset, "dataset", is_validation=False)
            validation = None
            if validation_data is not None:
                validation = way.source(validation_data, "validation_data", is_validation=True)
            steps = source.pass_steps if plan.steps_per_epoch is None else plan.steps_per_epoch
            hooks.set_params({"epochs": plan.epochs, "steps": None if steps == math.inf else steps})
            hooks.enter(stack)
            number = self._begin(hooks, source, plan)
            if self.position.fit > number or self.position.is_ended:
                return self.position.histories[number].copy()
            loop = self._loop = TrainingLoop(self, way, hooks, plan)
            try:
                return loop.run(source, validation, lambda: self._attach(number, source))
            finally:
                self._loop, self._around = None, _plainly
                self.position.catch_up_by(None)

    def evaluate(self, dataset: Any, steps: int | None = None, callbacks: Iterable[Any] = ()) -> dict[str, float]:
        """Collective. Evaluate a dataset by `evaluate_step`.

        Args:
            dataset: The kind that `fit` takes. Under `HybridStrategy` each group evaluates all of it.
            steps: The largest number of steps; default: the whole dataset.
            callbacks: Callbacks, whose hooks `on_test_…` are called.

        Returns:
            The means over the examples, and the metrics, by name; the same on every rank.

        Raises:
            TypeError, ValueError, RuntimeError, MismatchError: As of `fit`; or there is no `evaluate_step`.
        """
        if self.evaluate_step is None:
            raise ValueError("`evaluate` needs an `evaluate_step` of the Trainer, got None")
        limit = None if steps is None else whole("steps", steps, least=1)
        hooks = self._hooks(callbacks, FitPlan(0, limit))
        self._require_open("evaluate")
        with self.strategy.scope(), ExitStack() as stack:
            hooks.enter(stack)
            way = self._way()
            source = way.source(dataset, "dataset", is_validation=True)
            return evaluate(self, way, hooks, source, limit)

    def save(self, metrics: Logs | None = None, *, check_interval: bool = True) -> str | None:
        """Collective. Save a checkpoint by the manager, with the position; None where it is too early to save.

        Args:
            metrics: The values of the checkpoint, for `keep_best` of the manager.
            check_interval: See `CheckpointManager.save`.

        Raises:
            ValueError: The trainer has no `CheckpointManager`.
            CheckpointError, OSError: See `CheckpointManager.save`.
        """
        if self.manager is None:
            raise ValueError(
                "saving needs a CheckpointManager: give the Trainer checkpoint=mpidist.CheckpointManager(...)"
            )
        if self._loop is not None:
            self._loop.settle()
        return self.manager.save(check_interval=check_interval, metrics=metrics)

    def pause(self) -> None:
        """Local. Let all ranks leave `fit` after the next step, called on any rank; the training is not complete.

        The epoch does not end: it is neither evaluated nor part of the history. The same program, started again,
        continues in it.
        """
        self._is_paused = True

    @property
    def wish(self) -> int:
        """Local. This rank's wish to leave `fit`; see `StepOutcome.wish`."""
        return max(STOP if self.stop_training else 0, PAUSE if self._is_paused else 0)

    @property
    def is_writer(self) -> bool:
        """Local. Whether this rank prints and writes for all: the chief, of the first group of a `HybridStrategy`."""
        is_first_group = not isinstance(self.strategy, HybridStrategy) or self.strategy.group_index == 0
        with self.strategy.scope():
            return is_chief() and is_first_group

    def step_by(self, around: Callable[[Callable[[], Any]], Any]) -> None:
        """Local. Let a function make each step of this `fit`: it gets the step as an argument, and calls it once."""
        self._around = around

    def updates(self) -> list[int]:
        """Local. The numbers of updates of the optimizers that the checkpoint holds."""
        return [one.iterations for one in self._optimizers]

    def make(self, function: Callable[[], Any]) -> Any:
        """Collective. Make a step, by what `step_by` was given."""
        return self._around(function)

    def _hooks(self, callbacks: Any, plan: FitPlan) -> CallbackHooks:
        params = {"epochs": plan.epochs, "steps": plan.steps_per_epoch}
        if plan.epochs and self.manager is not None and isinstance(callbacks, list):
            is_saved = any(isinstance(one, ModelCheckpoint) for one in callbacks)
            callbacks = callbacks if is_saved else [*callbacks, ModelCheckpoint()]
        return CallbackHooks(callbacks, self, params)

    def _begin(self, hooks: CallbackHooks, source: StepSource, plan: FitPlan) -> int:
        """Collective. Restore the latest checkpoint, and begin where it is; returns the number of this `fit`."""
        position = self.position
        number = position.call
        before = None if self.checkpoint is None else vars(self.checkpoint).get(f"{BATCHES}_{number}")
        if before is not None and position.is_loaded:
            # The program has restored a checkpoint since the last `fit`, into the iterator of that.
            source.batches.load_state(before.state())
        self._attach(number, source)
        self.stop_training = self._is_paused = False
        named = hooks.named()
        # All of them: each rank calls each.
        is_restored = max([one.restore() for one in named.values()], default=False)
        is_first = self._resumes and number == 0 and not position.is_loaded
        if is_first and not is_restored and self.manager is not None:
            self.manager.restore_or_initialize(fallback=True)
        found = {} if self.checkpoint is None else self.checkpoint.find_objects().states
        self._optimizers = [one for one in found.values() if isinstance(one, Optimizer)]
        position.call = number + 1
        if position.fit < number:
            position.begin(number)
        if position.fit == number:
            self._require_same_epoch(plan)
            position.epochs, position.steps_per_epoch = plan.epochs, plan.steps_per_epoch
            for name, one in named.items():
                if position.is_loaded and name in position.saved_callbacks:
                    one.load_state(position.saved_callbacks[name])
            position.callbacks = {name: one.state for name, one in named.items()}
            if position.is_loaded and position.step and plan.steps_per_epoch is None:
                position.step = steps_behind(position.step, before, source.batches)
            position.is_loaded = False
        return number

    def _require_same_epoch(self, plan: FitPlan) -> None:
        position = self.position
        if position.epochs != plan.epochs:
            # Ended early, and now wanted further.
            position.is_ended = False
        if position.step and position.is_loaded and position.steps_per_epoch != plan.steps_per_epoch:
            raise ValueError(
                f"the checkpoint is in step {position.step} of an epoch with steps_per_epoch="
                f"{position.steps_per_epoch}, got `steps_per_epoch={plan.steps_per_epoch}`. Pass the same number until "
                "the epoch is complete"
            )

    def _attach(self, number: int, source: StepSource) -> None:
        """Local. Let the checkpoint hold the iterator of a pass."""
        if self.checkpoint is None:
            return
        for name in [one for one in vars(self.checkpoint) if one.startswith(BATCHES)]:
            delattr(self.checkpoint, name)
        setattr(self.checkpoint, f"{BATCHES}_{number}", source.batches)

    def _way(self) -> Way:
        if self._own_way is None:
            if isinstance(self.strategy, ParameterServerStrategy) and self.strategy.chief is not None:
                position = self.position
                self._own_way = Scheduled(self.strategy, position.served, position.totals, self._held)
            else:
                # The evaluator of a job with parameter servers is alone.
                self._own_way = Synchronous(self.strategy, self._logical)
        return self._own_way

    def _held(self) -> set[int]:
        """Local. The identities of the variables that the checkpoint holds."""
        found = None if self.checkpoint is None else self.checkpoint.find_objects()
        return set() if found is None else {id(leaf.value) for leaf in found.leaves.values()}

    def _require_open(self, method: str) -> None:
        if self.strategy.is_closed:
            self.strategy.replicas.require_open()
        if self._loop is not None and method == "fit":
            raise RuntimeError(
                "`fit` was called inside another `fit` of the same Trainer, by one of its callbacks. Call it when the "
                "first one has returned"
            )

    def _require_usable(self, method: str) -> None:
        self._require_open(method)
        resolver = self.strategy.cluster_resolver
        if resolver is not None and resolver.task_type == "evaluator":
            raise RuntimeError(
                f"`{method}` was called on the rank of the evaluator, which does not train. Call "
                "mpidist.training.train_and_evaluate on all ranks, or SidecarEvaluator(...).start() on this one"
            )

    def __repr__(self) -> str:
        return f"<mpidist.Trainer of {self.strategy!r}>"


def _plainly(function: Callable[[], Any]) -> Any:
    return function()
