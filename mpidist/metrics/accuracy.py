"""How often predictions are right."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mpidist.metrics.mean import weighted_sums
from mpidist.metrics.metric import Metric
from mpidist.variables.variable import AnyArray


@dataclass(frozen=True)
class SparseCategoricalAccuracyMeasure:
    """Weighted number of right predictions, and sum of the weights."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Local. Two sums."""
        return (2,)

    def contribution(self, *values: npt.ArrayLike, sample_weight: npt.ArrayLike | None) -> AnyArray:
        """Local. See `Measure.contribution`."""
        if len(values) != 2:
            raise TypeError(f"an accuracy takes (y_true, y_pred), got {len(values)} arguments")
        labels, scores = np.asarray(values[0]), np.asarray(values[1])
        if labels.ndim == scores.ndim and labels.shape[-1:] == (1,):
            labels = labels[..., 0]
        if scores.ndim == 0 or scores.shape[:-1] != labels.shape:
            raise ValueError(
                f"`y_pred` must have the shape of `y_true` and a last dimension of classes, got y_true "
                f"{labels.shape} and y_pred {scores.shape}"
            )
        right = (scores.argmax(-1) == labels) if scores.size else np.zeros(labels.shape, bool)
        return weighted_sums(right.astype(np.float64), sample_weight)

    def compute(self, sums: AnyArray) -> float:
        """Local. The fraction; 0 before any value."""
        return float(sums[0] / sums[1]) if sums[1] else 0.0


def SparseCategoricalAccuracy(name: str = "sparse_categorical_accuracy") -> Metric:
    """Collective. The fraction of examples whose highest score in `y_pred` stands at the class `y_true`.

    `update_state(y_true, y_pred)` takes class numbers of shape (batch,) or (batch, 1) and scores of shape
    (batch, classes).

    Args:
        name: For people.

    Returns:
        The metric.
    """
    return Metric(SparseCategoricalAccuracyMeasure(), name=name)
