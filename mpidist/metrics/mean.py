"""The weighted mean of values."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mpidist.metrics.metric import Metric
from mpidist.variables.variable import AnyArray


@dataclass(frozen=True)
class MeanMeasure:
    """Sum of the weighted values, and sum of the weights."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Local. Two sums."""
        return (2,)

    def contribution(self, *values: npt.ArrayLike, sample_weight: npt.ArrayLike | None) -> AnyArray:
        """Local. See `Measure.contribution`."""
        if len(values) != 1:
            raise TypeError(f"a mean takes one array of values, got {len(values)} arguments")
        array = np.asarray(values[0], np.float64)
        return weighted_sums(array, sample_weight)

    def compute(self, sums: AnyArray) -> float:
        """Local. The mean; 0 before any value, as in tf.keras."""
        return float(sums[0] / sums[1]) if sums[1] else 0.0


def weighted_sums(array: AnyArray, sample_weight: npt.ArrayLike | None) -> AnyArray:
    """Local. Sum of `array` times its weights, and sum of the weights.

    Args:
        array: One value per example, or more dimensions.
        sample_weight: A number, or an array whose shape is that of `array` or of its leading dimensions.

    Returns:
        Two numbers.

    Raises:
        ValueError: The weights' shape does not fit.
    """
    if sample_weight is None:
        return np.array([array.sum(), array.size], np.float64)
    weight = np.asarray(sample_weight, np.float64)
    if weight.ndim > array.ndim or weight.shape != array.shape[: weight.ndim]:
        raise ValueError(
            f"`sample_weight` must have the shape of the values or of their leading dimensions, expected a prefix of "
            f"{array.shape}, got {weight.shape}"
        )
    full = np.broadcast_to(weight.reshape(weight.shape + (1,) * (array.ndim - weight.ndim)), array.shape)
    return np.array([(array * full).sum(), full.sum()], np.float64)


def Mean(name: str = "mean") -> Metric:
    """Collective. The mean of all values given to `update_state(values)`, over batches and replicas.

    Args:
        name: For people.

    Returns:
        The metric.
    """
    return Metric(MeanMeasure(), name=name)
