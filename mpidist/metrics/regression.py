"""Errors of regression: the distance of predictions from the true values."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt

from mpidist.arrays import AnyArray
from mpidist.metrics.argument import as_floats, as_pair
from mpidist.metrics.mean import ratio, weighted_sums
from mpidist.metrics.metric import Metric


@dataclass(frozen=True)
class ErrorMeasure:
    """The sum of the weighted errors, and the sum of the weights.

    Attributes:
        kind: "square" for the mean of squares, "root" for its square root, "absolute" for the mean of absolute values.
    """

    kind: Literal["square", "root", "absolute"]

    arguments: ClassVar[tuple[str, ...]] = ("y_true", "y_pred")
    shape: ClassVar[tuple[int, ...]] = (2,)

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
    """Collective. Make a metric of the mean of `(y_pred - y_true) ** 2`.

    Args:
        name: A name for display and errors.
        dtype: The dtype of the result; see `Metric`.

    Returns:
        The metric.
    """
    return Metric(ErrorMeasure("square"), name=name, dtype=dtype)


def RootMeanSquaredError(name: str = "root_mean_squared_error", dtype: npt.DTypeLike | None = None) -> Metric:
    """Collective. Make a metric of the square root of the mean of `(y_pred - y_true) ** 2`.

    Args:
        name: A name for display and errors.
        dtype: The dtype of the result; see `Metric`.

    Returns:
        The metric.
    """
    return Metric(ErrorMeasure("root"), name=name, dtype=dtype)


def MeanAbsoluteError(name: str = "mean_absolute_error", dtype: npt.DTypeLike | None = None) -> Metric:
    """Collective. Make a metric of the mean of `|y_pred - y_true|`.

    Args:
        name: A name for display and errors.
        dtype: The dtype of the result; see `Metric`.

    Returns:
        The metric.
    """
    return Metric(ErrorMeasure("absolute"), name=name, dtype=dtype)
