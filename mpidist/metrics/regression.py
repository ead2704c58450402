"""How far predictions are from the truth."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from mpidist.arrays import AnyArray
from mpidist.metrics.argument import as_floats, as_pair
from mpidist.metrics.mean import ratio, weighted_sums
from mpidist.metrics.metric import Metric


@dataclass(frozen=True)
class ErrorMeasure:
    """Sum of the weighted errors, and sum of the weights.

    Attributes:
        kind: Squares, the root of their mean, or absolute values.
    """

    kind: Literal["square", "root", "absolute"]

    @property
    def arguments(self) -> tuple[str, ...]:
        """Local. Truth and predictions."""
        return ("y_true", "y_pred")

    @property
    def shape(self) -> tuple[int, ...]:
        """Local. Two sums."""
        return (2,)

    def contribution(self, *values: npt.ArrayLike, sample_weight: npt.ArrayLike | None) -> AnyArray:
        """Local. See `Measure.contribution`."""
        truth, predictions = as_pair(values[0], values[1])
        difference = predictions.astype(np.float64) - truth
        errors = np.abs(difference) if self.kind == "absolute" else np.square(difference)
        return weighted_sums(as_floats("y_pred", errors), sample_weight)

    def compute(self, sums: AnyArray) -> float:
        """Local. The mean error; 0 before any value."""
        return math.sqrt(ratio(sums)) if self.kind == "root" else ratio(sums)


def MeanSquaredError(name: str = "mean_squared_error", dtype: npt.DTypeLike | None = None) -> Metric:
    """Collective. The mean of `(y_pred - y_true) ** 2`.

    Args:
        name: For people.
        dtype: Of the result; see `Metric`.

    Returns:
        The metric.
    """
    return Metric(ErrorMeasure("square"), name=name, dtype=dtype)


def RootMeanSquaredError(name: str = "root_mean_squared_error", dtype: npt.DTypeLike | None = None) -> Metric:
    """Collective. The square root of the mean of `(y_pred - y_true) ** 2`.

    Args:
        name: For people.
        dtype: Of the result; see `Metric`.

    Returns:
        The metric.
    """
    return Metric(ErrorMeasure("root"), name=name, dtype=dtype)


def MeanAbsoluteError(name: str = "mean_absolute_error", dtype: npt.DTypeLike | None = None) -> Metric:
    """Collective. The mean of `|y_pred - y_true|`.

    Args:
        name: For people.
        dtype: Of the result; see `Metric`.

    Returns:
        The metric.
    """
    return Metric(ErrorMeasure("absolute"), name=name, dtype=dtype)
