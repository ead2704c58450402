"""How often predictions are right."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from mpidist.arrays import AnyArray
from mpidist.metrics.argument import as_classes, as_floats, as_one_hot, as_pair
from mpidist.metrics.mean import ratio, weighted_sums
from mpidist.metrics.metric import Metric


@dataclass(frozen=True)
class AccuracyMeasure:
    """Weighted number of right predictions, and sum of the weights.

    Attributes:
        labels: What `y_true` and `y_pred` are: values to be equal, 0 or 1 with a probability, one-hot or class
            numbers with scores.
        threshold: Of a probability, above which it predicts 1.
    """

    labels: Literal["equal", "binary", "one-hot", "sparse"]
    threshold: float = 0.5

    @property
    def arguments(self) -> tuple[str, ...]:
        """Local. Labels and predictions."""
        return ("y_true", "y_pred")

    @property
    def shape(self) -> tuple[int, ...]:
        """Local. Two sums."""
        return (2,)

    def contribution(self, *values: npt.ArrayLike, sample_weight: npt.ArrayLike | None) -> AnyArray:
        """Local. See `Measure.contribution`."""
        if self.labels == "equal":
            labels, predicted = as_pair(values[0], values[1])
        elif self.labels == "binary":
            labels, predicted = as_pair(values[0], values[1])
            predicted = predicted > self.threshold
        else:
            read = as_one_hot if self.labels == "one-hot" else as_classes
            labels, scores = read(values[0], values[1])
            predicted = scores.argmax(-1) if scores.size else np.full_like(labels, -1, dtype=np.int64)
        return weighted_sums(as_floats("y_pred", predicted == labels), sample_weight)

    def compute(self, sums: AnyArray) -> float:
        """Local. The fraction; 0 before any value."""
        return ratio(sums)


def Accuracy(name: str = "accuracy", dtype: npt.DTypeLike | None = None) -> Metric:
    """Collective. The fraction of values of `y_pred` that equal those of `y_true`.

    Args:
        name: For people.
        dtype: Of the result; see `Metric`.

    Returns:
        The metric.
    """
    return Metric(AccuracyMeasure("equal"), name=name, dtype=dtype)


def BinaryAccuracy(name: str = "binary_accuracy", dtype: npt.DTypeLike | None = None, threshold: float = 0.5) -> Metric:
    """Collective. The fraction of values where `y_pred > threshold` says what `y_true`, 0 or 1, is.

    Args:
        name: For people.
        dtype: Of the result; see `Metric`.
        threshold: Between 0 and 1.

    Returns:
        The metric.

    Raises:
        ValueError: The threshold is not between 0 and 1.
    """
    if not 0 < threshold < 1:
        raise ValueError(f"`threshold` must be a number between 0 and 1, both excluded, got {threshold!r}")
    return Metric(AccuracyMeasure("binary", float(threshold)), name=name, dtype=dtype)


def CategoricalAccuracy(name: str = "categorical_accuracy", dtype: npt.DTypeLike | None = None) -> Metric:
    """Collective. The fraction of examples whose highest score in `y_pred` stands at the class of `y_true`, one-hot.

    Args:
        name: For people.
        dtype: Of the result; see `Metric`.

    Returns:
        The metric.
    """
    return Metric(AccuracyMeasure("one-hot"), name=name, dtype=dtype)


def SparseCategoricalAccuracy(name: str = "sparse_categorical_accuracy", dtype: npt.DTypeLike | None = None) -> Metric:
    """Collective. The fraction of examples whose highest score in `y_pred` stands at the class `y_true`.

    `update_state(y_true, y_pred)` takes class numbers of shape (batch,) or (batch, 1) and scores of shape
    (batch, classes).

    Args:
        name: For people.
        dtype: Of the result; see `Metric`.

    Returns:
        The metric.
    """
    return Metric(AccuracyMeasure("sparse"), name=name, dtype=dtype)
