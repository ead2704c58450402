"""Results of a step: what it returns, as sums over examples, which ranks can add up and divide at the end."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from mpidist import tree
from mpidist.arguments import described
from mpidist.arrays import AnyArray, as_array, to_host
from mpidist.comm.group.agreement import require_same
from mpidist.metrics.metric import Metric
from mpidist.strategy.base import Strategy

# The wishes of a rank that travel with a step, in this order: leave the loop for now; end the training.
PAUSE, STOP = 1, 2
_FLAGS = (PAUSE, STOP)
# A checksum of what a step has returned: so few bits that the sums of all ranks' squares are exact.
_MARK_BITS = 20
_WAY_OUT = (
    "Return an array with a row per example, or a metric of mpidist.metrics that the step has updated: {'loss': losses}"
)


class Measured(NamedTuple):
    """The values of one step on one rank.

    Attributes:
        sums: By name: the sum of an array and its number of elements, or the sums of a metric.
        metrics: The metrics among them.
    """

    sums: dict[str, AnyArray]
    metrics: dict[str, Metric]

    def kind_of(self, name: str) -> str:
        """Local. A name for the kind of a value: sums of different kinds do not add up."""
        metric = self.metrics.get(name)
        return "array" if metric is None else f"{type(metric.measure).__name__}{self.sums[name].shape}"


class StepOutcome(NamedTuple):
    """The values of one step on all ranks, the same on each.

    Attributes:
        sums: See `Measured`.
        wish: The largest of `PAUSE` and `STOP` that any rank had; 0 if there was none.
    """

    sums: dict[str, AnyArray]
    wish: int


def arguments_of(batch: Any) -> tuple[Any, ...]:
    """Local. The arguments of a step: the parts of a batch that is a tuple or a list, else the batch itself."""
    return tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)


def measured(result: Any, batch: Any, *, function: str = "step") -> Measured:
    """Local. The sums of what a step has returned; of metrics, which are cleared.

    Args:
        result: The value of the step.
        batch: This rank's batch, whose rows an array must have.
        function: The name of the argument that gave the step, for errors.

    Raises:
        TypeError: The result is no dictionary of arrays and metrics by name.
        ValueError: An array has another number of rows than the batch.
    """
    rows = _rows_of(batch)
    sums: dict[str, AnyArray] = {}
    metrics: dict[str, Metric] = {}
    for name, value in _items(result, function):
        if isinstance(value, Metric):
            metrics[name] = value
            sums[name] = np.array(value.sums.component, np.float64)
            value.reset_state()
        else:
            sums[name] = _sum_of(name, value, rows, function)
    return Measured(sums, metrics)


def _items(result: Any, function: str) -> list[tuple[str, Any]]:
    if not isinstance(result, Mapping):
        raise TypeError(f"`{function}` must return a dict of values by name, got {described(result)}. {_WAY_OUT}")
    for name in result:
        if not isinstance(name, str) or not name or name.startswith("val_"):
            raise TypeError(
                f"`{function}` must return values by names, which are not empty and do not begin with 'val_', got the "
                f"name {name!r}"
            )
    return sorted(result.items())


def _sum_of(name: str, value: Any, rows: int | None, function: str) -> AnyArray:
    try:
        array = as_array(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"`{function}` returned {described(value)} as {name!r}: {error}. {_WAY_OUT}") from error
    if array.dtype.kind not in "fiub" and array.dtype.name != "bfloat16":
        raise TypeError(f"`{function}` returned an array of {array.dtype} as {name!r}, expected numbers. {_WAY_OUT}")
    if array.ndim == 0:
        raise TypeError(
            f"`{function}` returned {described(value)} as {name!r}, one number for the batch: the mean over all ranks "
            f"would depend on how examples are shared. {_WAY_OUT}"
        )
    if rows is not None and len(array) != rows:
        raise ValueError(
            f"`{function}` returned an array of shape {array.shape} as {name!r}, expected one row for each of the "
            f"{rows} examples of this rank's batch. {_WAY_OUT}"
        )
    return np.array([float(to_host(array.sum(dtype=np.float64))), array.size], np.float64)


def _rows_of(batch: Any) -> int | None:
    """The number of examples, None where the arrays of a batch have no common first dimension."""
    leaves, _ = tree.flatten(batch)
    lengths = {leaf.shape[0] if getattr(leaf, "shape", ()) else None for leaf in leaves}
    return lengths.pop() if len(lengths) == 1 else None


def add_up(strategy: Strategy, measured: Measured, wish: int) -> StepOutcome:
    """Collective. Add up the values of all replicas, in one call that also transmits the ranks' wishes.

    Args:
        strategy: The strategy.
        measured: The values of this rank.
        wish: `PAUSE`, `STOP` or 0.

    Raises:
        MismatchError: The names, or the kinds of values, differ between ranks.
    """
    mine = measured.sums
    kinds = [(name, measured.kind_of(name)) for name in sorted(mine)]
    mark = zlib.crc32(repr(kinds).encode()) >> (32 - _MARK_BITS)
    head = [float(mark), float(mark**2), *(float(wish == flag) for flag in _FLAGS)]
    parts = [np.array(head), *(mine[name].reshape(-1) for name, _ in kinds)]
    total = strategy.reduce("SUM", np.concatenate(parts), axis=None)
    count = strategy.num_replicas_in_sync
    # All values are equal just if the sum of their squares is that of equal ones: all ranks find the same.
    if count * int(total[1]) != int(total[0]) ** 2:
        require_same(
            strategy.gather_object(kinds), "what the step returns, names and kinds of values,",
            "Return the same on every rank.",
        )
    asked = max((flag for flag, said in zip(_FLAGS, total[2 : len(head)], strict=True) if said), default=0)
    everyone = strategy.replicas.everyone
    if everyone is not strategy.replicas.communicator:
        # Of a replica of several ranks only the first one's values are in the sum.
        asked = everyone.all_reduce_max(max(asked, wish))
    sums, start = {}, len(head)
    for name, _ in kinds:
        size = mine[name].size
        sums[name] = total[start : start + size].reshape(mine[name].shape)
        start += size
    return StepOutcome(sums, asked)


def mean_of(sums: AnyArray) -> float:
    """Local. The mean of an array's elements, from their sum and number; NaN if there are none."""
    return float(sums[0] / sums[1]) if sums[1] else float("nan")
