"""Top-k accuracies: the fraction of examples whose true class is among the k highest scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from mpidist import arrays
from mpidist.arrays import AnyArray
from mpidist.metrics.argument import as_classes, as_one_hot, positive
from mpidist.metrics.mean import ratio, weighted_sums
from mpidist.metrics.metric import Metric


@dataclass(frozen=True)
class TopKMeasure:
    """The weighted number of examples whose class is among the `k` highest scores, and the sum of the weights.

    Attributes:
        k: Number of scores that count.
        sparse: Whether labels are class numbers; else they are one-hot.
    """

    k: int
    sparse: bool

    arguments: ClassVar[tuple[str, ...]] = ("y_true", "y_pred")
    shape: ClassVar[tuple[int, ...]] = (2,)

    def contribution(self, *values: npt.ArrayLike, sample_weight: npt.ArrayLike | None) -> AnyArray:
        """Local. See `Measure.contribution`."""
        labels, scores = (as_classes if self.sparse else as_one_hot)(values[0], values[1])
        return weighted_sums(in_top_k(labels, scores, self.k).astype(np.float64), sample_weight)

    def compute(self, sums: AnyArray) -> float:
        """Local. The fraction; 0 before any value."""
        return ratio(sums)


def in_top_k(labels: AnyArray, scores: AnyArray, k: int) -> AnyArray:
    """Local. Whether fewer than `k` classes score higher than the true class, as in tf.math.in_top_k.

    Args:
        labels: Class numbers. A number that is not a class is never right.
        scores: An array with one more dimension, of classes. Examples with a score that is not finite are never right.
        k: At least 1.

    Returns:
        Booleans of the shape of `labels`.
    """
    classes = scores.shape[-1]
    if classes == 0 or labels.size == 0:
        return np.zeros_like(labels, dtype=bool)
    known = (labels >= 0) & (labels < classes)
    places = np.where(known, labels, 0).astype(np.int64)
    own = np.take_along_axis(scores, places[..., None], -1)
    finite = np.isfinite(scores).all(-1)
    return arrays.as_array(known & finite & ((scores > own).sum(-1) < k))


def TopKCategoricalAccuracy(
    k: int = 5, name: str = "top_k_categorical_accuracy", dtype: npt.DTypeLike | None = None
) -> Metric:
    """Collective. Make a metric of the fraction of examples whose one-hot class is among the `k` highest scores.

    Args:
        k: At least 1.
        name: A name for display and errors.
        dtype: The dtype of the result; see `Metric`.

    Returns:
        The metric.

    Raises:
        ValueError: `k` is not a positive integer.
    """
    return Metric(TopKMeasure(positive("k", k), sparse=False), name=name, dtype=dtype)


def SparseTopKCategoricalAccuracy(
    k: int = 5, name: str = "sparse_top_k_categorical_accuracy", dtype: npt.DTypeLike | None = None
) -> Metric:
    """Collective. Make a metric of the fraction of examples whose class number is among the `k` highest scores.

    Args:
        k: At least 1.
        name: A name for display and errors.
        dtype: The dtype of the result; see `Metric`.

    Returns:
        The metric.

    Raises:
        ValueError: `k` is not a positive integer.
    """
    return Metric(TopKMeasure(positive("k", k), sparse=True), name=name, dtype=dtype)
