"""Accuracies: the fraction of predictions that are right."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt

from mpidist.arguments import number
from mpidist.arrays import AnyArray
from mpidist.metrics.argument import as_classes, as_floats, as_one_hot, as_pair
from mpidist.metrics.mean import ratio, weighted_sums
from mpidist.metrics.metric import Metric


@dataclass(frozen=True)
class AccuracyMeasure:
    """The weighted number of right predictions, and the sum of the weights.

    Attributes:
        labels: The kind of `y_true` and `y_pred`. "equal": values to compare. "binary": 0 or 1, and a probability.
            "one-hot" and "sparse": one-hot labels or class numbers, and scores.
        threshold: A probability above it predicts 1.
    """

    labels: Literal["equal", "binary", "one-hot", "sparse"]
    threshold: float = 0.5

    arguments: ClassVar[tuple[str, ...]] = ("y_true", "y_pred")
    shape: ClassVar[tuple[int, ...]] = (2,)

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
    """Collective. Make a metric of the fraction of values in `y_pred` that equal those in `y_true`.

    Args:
        name: A name for display and errors.
        dtype: The dtype of the result; see `Metric`.

    Returns:
        The metric.
    """
    return Metric(AccuracyMeasure("equal"), name=name, dtype=dtype)


def BinaryAccuracy(name: str = "binary_accuracy", dtype: npt.DTypeLike | None = None, threshold: float = 0.5) -> Metric:
    """Collective. Make a metric of the fraction of values where `y_pred > threshold` agrees with `y_true`, 0 or 1.

    Args:
        name: A name for display and errors.
        dtype: The dtype of the result; see `Metric`.
        threshold: Between 0 and 1.

    Returns:
        The metric.

    Raises:
        ValueError: The threshold is not between 0 and 1.
    """
    if not 0 < number("threshold", threshold) < 1:
        raise ValueError(f"`threshold` must be a number between 0 and 1, both excluded, got {threshold!r}")
    return Metric(AccuracyMeasure("binary", float(threshold)), name=name, dtype=dtype)


def CategoricalAccuracy(name: str = "categorical_accuracy", dtype: npt.DTypeLike | None = None) -> Metric:
    """Collective. Make a metric of the fraction of examples whose highest score is at the class of one-hot `y_true`.

    Args:
        name: A name for display and errors.
        dtype: The dtype of the result; see `Metric`.

    Returns:
        The metric.
    """
    return Metric(AccuracyMeasure("one-hot"), name=name, dtype=dtype)


def SparseCategoricalAccuracy(name: str = "sparse_categorical_accuracy", dtype: npt.DTypeLike | None = None) -> Metric:
    """Collective. Make a metric of the fraction of examples whose highest score is at the class number `y_true`.

    `update_state(y_true, y_pred)` takes class numbers of shape (batch,) or (batch, 1) and scores of shape
    (batch, classes).

    Args:
        name: A name for display and errors.
        dtype: The dtype of the result; see `Metric`.

    Returns:
        The metric.
    """
    return Metric(AccuracyMeasure("sparse"), name=name, dtype=dtype)
