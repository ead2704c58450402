"""Counting true and false positives above many thresholds at once; what Precision, Recall and AUC are made of."""

from __future__ import annotations

import numpy as np

from mpidist import arrays
from mpidist.arrays import AnyArray


def positives_above(
    labels: AnyArray, predictions: AnyArray, weights: AnyArray, thresholds: tuple[float, ...]
) -> AnyArray:
    """Local. Weights of true and of false positives where `predictions > threshold`, for each threshold.

    Args:
        labels: Positive where not 0.
        predictions: Of the same shape.
        weights: Of the same shape.
        thresholds: In any order; compared in the dtype of the predictions where that is a float.

    Returns:
        float64 of shape (2, thresholds), in host memory: true positives, false positives.
    """
    scores = predictions.reshape(-1)
    if scores.dtype.kind != "f":
        scores = scores.astype(np.float64)
    # In the predictions' dtype, as `predictions > 0.3` compares: float32's 0.3 is more than float64's.
    limits = np.array(thresholds, scores.dtype)
    order = np.argsort(limits, kind="stable")
    # Of how many thresholds a score is above; one look-up instead of a comparison with each.
    above = np.searchsorted(arrays.move(limits[order], arrays.namespace(scores)), scores, side="left")
    is_positive = labels.reshape(-1) != 0
    result = np.empty((2, limits.size))
    for row, chosen in enumerate((is_positive, ~is_positive)):
        by_count = arrays.to_host(np.bincount(above[chosen], weights.reshape(-1)[chosen], limits.size + 1))
        result[row, order] = np.cumsum(by_count[::-1])[::-1][1:]
    return result


def require_probabilities(predictions: AnyArray, way_out: str) -> None:
    """Local. Raise unless all predictions are in [0, 1].

    Raises:
        ValueError: One is outside or not a number.
    """
    inside = (predictions >= 0) & (predictions <= 1)
    if not inside.all():
        raise ValueError(f"`y_pred` must be probabilities in [0, 1], got {predictions[~inside][0]!s}. {way_out}")
