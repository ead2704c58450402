"""Metrics over all replicas: their states are summed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from mpidist.keras.binding import ModelBinding
from mpidist.keras.derive import binding_of, derive
from mpidist.keras.private import StatelessScope
from mpidist.keras.step import current
from mpidist.options import ReduceOp

if TYPE_CHECKING:
    from keras.metrics import Metric as _Metric
else:
    _Metric = object


def summed_states(binding: ModelBinding, variables: list[Any]) -> Any:
    """Collective. A context in which the variables of metrics have their sums over the replicas."""
    own = [np.array(keras.ops.convert_to_numpy(variable)) for variable in variables]
    totals = binding.extended.all_reduce(ReduceOp.SUM, own, name="states of metrics") if own else []
    return StatelessScope(state_mapping=[
        (variable, keras.ops.convert_to_tensor(total, dtype=variable.dtype))
        for variable, total in zip(variables, totals, strict=True)
    ])


def require_sums(metrics: list[Any]) -> None:
    """Local. Raise ValueError where the state of a metric is not a sum, and name it."""
    for metric in metrics:
        for variable in metric.variables:
            if variable.aggregation != "sum":
                raise ValueError(
                    f"metric {metric.name!r}: its state {variable.path!r} has the aggregation "
                    f"{variable.aggregation!r}, expected 'sum': the states of the replicas are summed. Make it with "
                    "add_variable(..., aggregation='sum'), or take the metric from `compile`"
                )


class DistributedMetric(_Metric):  # type: ignore[misc]
    """A metric whose result outside of `strategy.run` is that over all replicas."""

    def result(self) -> Any:
        """Collective outside of `strategy.run`; Local inside, where it is this replica's."""
        binding = binding_of(self)
        if binding is None or binding.size == 1 or current() is not None or binding.is_running():
            return super().result()
        require_sums([self])
        with summed_states(binding, self.variables):
            return super().result()


def take_metric(metric: Any, binding: ModelBinding) -> None:
    """Local. Distribute a metric over the strategy's replicas.

    Raises:
        ValueError: It belongs to another strategy.
    """
    derive(metric, DistributedMetric, binding)
