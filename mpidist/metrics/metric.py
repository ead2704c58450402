"""The metric: adds up a measure on every replica; the result is that of the whole data."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from mpidist.options import VariableAggregation
from mpidist.variables.creation import current_arena
from mpidist.variables.sync_on_read import SyncOnReadVariable
from mpidist.variables.variable import AnyArray, Variable


class Measure(Protocol):
    """The arithmetic of one metric: sums that can be added over batches and replicas; pure.

    Attributes:
        shape: Of the sums.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """Local. Shape of the sums."""
        ...

    def contribution(self, *values: npt.ArrayLike, sample_weight: npt.ArrayLike | None) -> AnyArray:
        """Local. What one batch adds to the sums, in float64."""
        ...

    def compute(self, sums: AnyArray) -> Any:
        """Local. The metric, from the sums over all batches and replicas."""
        ...


class Metric:
    """Sums of one measure, kept per replica.

    Collective. Make it in the strategy's scope. The sums are one ON_READ variable, which checkpoints save.

    Args:
        measure: The arithmetic.
        name: For people.
    """

    def __init__(self, measure: Measure, *, name: str) -> None:
        self.measure = measure
        self.name = name
        self.sums = SyncOnReadVariable(
            current_arena(), np.zeros(measure.shape), name=f"{name}/sums", aggregation=VariableAggregation.SUM
        )

    @property
    def variables(self) -> list[Variable]:
        """Local. The state."""
        return [self.sums]

    def update_state(self, *values: npt.ArrayLike, sample_weight: npt.ArrayLike | None = None) -> None:
        """Local. Add a batch of this replica; an empty one changes nothing.

        Args:
            values: What the metric takes: `(values)` of a mean, `(y_true, y_pred)` of an accuracy.
            sample_weight: One weight per example.

        Raises:
            ValueError: Shapes that do not fit.
        """
        self.sums.accumulate(self.measure.contribution(*values, sample_weight=sample_weight))

    def result(self) -> Any:
        """Collective. The metric of all data that all replicas have seen since `reset_state`."""
        return self.measure.compute(self.sums.aggregate())

    def reset_state(self) -> None:
        """Local. Forget this replica's data; call it on every rank."""
        self.sums.clear()

    def __repr__(self) -> str:
        return f"<mpidist.metrics.Metric {self.name!r} {self.measure!r}>"
