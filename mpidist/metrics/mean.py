"""The weighted mean of values, and their weighted sum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from mpidist.arrays import AnyArray
from mpidist.metrics.argument import as_floats, spread_weights
from mpidist.metrics.metric import Metric


@dataclass(frozen=True)
class MeanMeasure:
    """The sum of the weighted values, and the sum of the weights."""

    arguments: ClassVar[tuple[str, ...]] = ("values",)
    shape: ClassVar[tuple[int, ...]] = (2,)

    def contribution(self, *values: npt.ArrayLike, sample_weight: npt.ArrayLike | None) -> AnyArray:
        """Local. See `Measure.contribution`."""
        return weighted_sums(as_floats("values", values[0]), sample_weight)

    def compute(self, sums: AnyArray) -> float:
        """Local. The mean; 0 before any value, as in tf.keras."""
        return ratio(sums)


@dataclass(frozen=True)
class SumMeasure:
    """The sum of the weighted values."""

    arguments: ClassVar[tuple[str, ...]] = ("values",)
    shape: ClassVar[tuple[int, ...]] = ()

    def contribution(self, *values: npt.ArrayLike, sample_weight: npt.ArrayLike | None) -> AnyArray:
        """Local. See `Measure.contribution`."""
        return np.asarray(weighted_sums(as_floats("values", values[0]), sample_weight)[0])

    def compute(self, sums: AnyArray) -> float:
        """Local. The sum."""
        return float(sums)


def ratio(sums: AnyArray) -> float:
    """Local. The first of two sums divided by the second; 0 where the second is 0."""
    return float(sums[0] / sums[1]) if sums[1] else 0.0


def weighted_sums(array: AnyArray, sample_weight: npt.ArrayLike | None) -> AnyArray:
    """Local. The sum of `array` times its weights, and the sum of the weights.

    Args:
        array: One value per example, or more dimensions. The sums of a CuPy array are computed on the GPU.
        sample_weight: A number, or an array whose shape is that of `array` or of its leading dimensions.

    Returns:
        Two numbers, in host memory.

    Raises:
        ValueError: The weights' shape does not fit.
    """
    if sample_weight is None:
        return np.array([float(array.sum()), array.size])
    weight = spread_weights(sample_weight, array)
    return np.array([float((array * weight).sum()), float(weight.sum())])


def Mean(name: str = "mean", dtype: npt.DTypeLike | None = None) -> Metric:
    """Collective. Make a metric of the mean of all values given to `update_state(values)`.

    Args:
        name: A name for display and errors.
        dtype: The dtype of the result; see `Metric`.

    Returns:
        The metric.
    """
    return Metric(MeanMeasure(), name=name, dtype=dtype)


def Sum(name: str = "sum", dtype: npt.DTypeLike | None = None) -> Metric:
    """Collective. Make a metric of the sum of all values given to `update_state(values)`, each times its weight.

    Args:
        name: A name for display and errors.
        dtype: The dtype of the result; see `Metric`.

    Returns:
        The metric.
    """
    return Metric(SumMeasure(), name=name, dtype=dtype)
