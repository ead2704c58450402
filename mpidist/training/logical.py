"""Steps of logical replicas: the same bits on any number of ranks, by `Strategy.gradients`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from mpidist.arguments import described, whole
from mpidist.comm.group.agreement import require_same
from mpidist.errors import mark_shared
from mpidist.strategy.base import Strategy
from mpidist.strategy.hybrid.strategy import HybridStrategy
from mpidist.strategy.parameter_server.strategy import ParameterServerStrategy
from mpidist.training.results import Measured, StepOutcome, arguments_of, measured
from mpidist.training.way import StepTask


class LogicalSteps(NamedTuple):
    """The arguments of a trainer whose steps are made by `Strategy.gradients`.

    Attributes:
        replica_count: The number of logical replicas.
        update: The function that gets, after each step, the sum of what it has returned beside its values.
    """

    replica_count: int
    update: Callable[[Any], object]

    def make(self, strategy: Strategy, batch: Any, task: StepTask) -> StepOutcome:
        """Collective. Make a step.

        Args:
            strategy: The strategy.
            batch: This rank's batch.
            task: What is made.

        Raises:
            TypeError: The step returns something else than values and gradients.
            ValueError: On every rank: the first batch leaves some without a row, and the step returns metrics.
            MismatchError: The names, or the kinds of values, differ between ranks.
        """
        is_training = task.function == "step"
        own: list[Measured] = []

        def of_rows(rows: Any) -> Any:
            result, gradients = task.fn(*arguments_of(rows)), ()
            if is_training:
                result, gradients = _pair(result)
            own.append(measured(result, rows, function=task.function))
            return own[-1].sums, gradients

        sums, gradients = strategy.gradients(of_rows, batch, self.replica_count)
        if own:
            task.totals.note(own[0])
        kinds = [(name, own[0].kind_of(name)) for name in sorted(own[0].sums)] if own else None
        everyone = strategy.communicator.all_gather_object((kinds, {*task.totals.metrics}, task.wish()))
        known = [its for its, *_ in everyone if its is not None]
        require_same(known, "what the step returns, names and kinds of values,", "Return the same on every rank.")
        metrics = {name for name, kind in known[0] if kind != "array"}
        unknown = {name for name in metrics if not all(name in has for _, has, _ in everyone)}
        if unknown:
            raise mark_shared(ValueError(
                f"the first batch has fewer rows than there are ranks, and ranks without one do not know the metrics "
                f"{sorted(unknown)}. Let batches have at least {len(everyone)} rows: `drop_remainder=True`"
            ))
        if is_training:
            self.update(gradients)
        return StepOutcome(sums, max(wish for *_, wish in everyone))


def logical_steps(
    strategy: Strategy, count: int | None, update: Callable[[Any], object] | None
) -> LogicalSteps | None:
    """Local. The steps by two arguments of a trainer, which belong together; None where neither is given.

    Raises:
        ValueError, TypeError: One of them is missing, or is none.
        NotImplementedError: The ranks of the strategy do not make each step together.
    """
    if count is None and update is None:
        return None
    if count is None or update is None:
        raise ValueError(
            f"`logical_replicas` and `update` must be given together, got logical_replicas={count!r} and "
            f"update={update!r}"
        )
    if isinstance(strategy, (HybridStrategy, ParameterServerStrategy)):
        raise NotImplementedError(
            f"`logical_replicas` is for strategies whose ranks make each step together, got {strategy!r}. Leave it out"
        )
    if not callable(update):
        raise TypeError(f"`update` must be a function of a sum of gradients, got {described(update)}")
    return LogicalSteps(whole("logical_replicas", count, least=1), update)


def _pair(result: Any) -> tuple[Any, Any]:
    if not isinstance(result, tuple) or len(result) != 2:
        raise TypeError(
            "with `logical_replicas` a step must return a pair: a dict of values by name, and gradients (any nest of "
            f"arrays and numbers, summed over the rows), got {described(result)}"
        )
    return result
