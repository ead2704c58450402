"""True and false positives above many thresholds, counted at once; the base of Precision, Recall and AUC."""

from __future__ import annotations

import numpy as np

from mpidist import arrays
from mpidist.arrays import AnyArray


def positives_above(
    labels: AnyArray, predictions: AnyArray, weights: AnyArray, thresholds: tuple[float, ...]
) -> AnyArray:
    """Local. The weights of true and of false positives, where `predictions > threshold`, for each threshold.

    Args:
        labels: Positive where not 0.
        predictions: An array of the same shape.
        weights: An array of the same shape.
        thresholds: In any order; compared in the predictions' dtype where that is a floating dtype.

    Returns:
        float64 of shape (2, thresholds), in host memory: true positives, false positives.
    """
    scores = predictions.reshape(-1)
    if scores.dtype.kind != "f":
        scores = scores.astype(np.float64)
    # In the predictions' dtype, as `predictions > 0.3` compares: 0.3 rounded to float32 is more than in float64, and a
    # prediction of float32(0.3) must not be above the threshold.
    limits = np.array(thresholds, scores.dtype)
    order = np.argsort(limits, kind="stable")
    # The number of thresholds that a score is above, by one search instead of a comparison with each threshold.
    above = np.searchsorted(arrays.move(limits[order], arrays.namespace(scores)), scores, side="left")
    is_positive = labels.reshape(-1) != 0
    result = np.empty((2, limits.size))
    for row, chosen in enumerate((is_positive, ~is_positive)):
        by_count = arrays.to_host(np.bincount(above[chosen], weights.reshape(-1)[chosen], limits.size + 1))
        result[row, order] = np.cumsum(by_count[::-1])[::-1][1:]
    return result


def require_probabilities(predictions: AnyArray, way_out: str) -> None:
    """Local. Check that all predictions are in [0, 1].

    Raises:
        ValueError: A prediction is outside, or not a number.
    """
    inside = (predictions >= 0) & (predictions <= 1)
    if not inside.all():
        raise ValueError(f"`y_pred` must be probabilities in [0, 1], got {predictions[~inside][0]!s}. {way_out}")
