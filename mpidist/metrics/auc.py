"""The area under the ROC or the precision-recall curve, from counts above fixed thresholds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from mpidist import arrays
from mpidist.arguments import flag
from mpidist.arrays import AnyArray
from mpidist.metrics.above import positives_above, require_probabilities
from mpidist.metrics.argument import as_floats, as_numbers, as_pair, as_thresholds, positive, spread_weights
from mpidist.metrics.metric import Metric

CURVES = ("ROC", "PR")
METHODS = ("interpolation", "minoring", "majoring")
# The outer thresholds are this much outside [0, 1]: all predictions are above the first, and none is above the last.
_MARGIN = 1e-7


@dataclass(frozen=True)
class AucMeasure:
    """The weights of true and false positives above each threshold, for all predictions or for each label.

    Attributes:
        curve: "ROC" or "PR".
        method: The rule for the area between two points.
        thresholds: Ascending, from below 0 to above 1.
        num_labels: If given, there is one curve for each label, and the result is the mean of their areas.
        label_weights: Weights of the labels in that mean; without `num_labels`, weights along the last dimension.
        from_logits: Whether predictions are logits.
    """

    curve: str
    method: str
    thresholds: tuple[float, ...]
    num_labels: int | None
    label_weights: tuple[float, ...] | None
    from_logits: bool

    arguments: ClassVar[tuple[str, ...]] = ("y_true", "y_pred")

    @property
    def shape(self) -> tuple[int, ...]:
        """Local. Two sums per label and threshold."""
        return (self.num_labels or 1, 2, len(self.thresholds))

    def contribution(self, *values: npt.ArrayLike, sample_weight: npt.ArrayLike | None) -> AnyArray:
        """Local. See `Measure.contribution`."""
        labels, predictions = self._read(values[0], values[1])
        if self.from_logits:
            # sigmoid(x) in a form that cannot overflow.
            predictions = 0.5 + 0.5 * np.tanh(0.5 * predictions.astype(np.float64))
        require_probabilities(predictions, "Pass logits with from_logits=True")
        weights = spread_weights(sample_weight, predictions)
        if self.num_labels is None:
            if self.label_weights is not None:
                weights = weights * _spread_over_labels(self.label_weights, predictions)
            return positives_above(labels, predictions, weights, self.thresholds)[None]
        return np.stack([
            positives_above(labels[:, n], predictions[:, n], weights[:, n], self.thresholds)
            for n in range(self.num_labels)
        ])

    def compute(self, sums: AnyArray) -> float:
        """Local. The area, between 0 and 1; 0 before any value."""
        area = _area_under_pr if (self.curve, self.method) == CURVES[1:] + METHODS[:1] else self._area
        weights = None if self.num_labels is None else self.label_weights
        return float(np.average([area(*label) for label in sums], weights=weights))

    def _read(self, y_true: npt.ArrayLike, y_pred: npt.ArrayLike) -> tuple[AnyArray, AnyArray]:
        if self.num_labels is None:
            return as_pair(y_true, y_pred)
        labels, predictions = as_numbers("y_true", y_true), as_numbers("y_pred", y_pred)
        if labels.shape != predictions.shape or labels.ndim != 2 or labels.shape[1] != self.num_labels:
            raise ValueError(
                f"with multi_label `y_true` and `y_pred` must have shape (batch, {self.num_labels}), got "
                f"{labels.shape} and {predictions.shape}"
            )
        return labels, predictions

    def _area(self, true: AnyArray, false: AnyArray) -> float:
        # All predictions are above the first threshold, so its counts are the totals.
        recall = _divide(true, true[:1])
        x, y = (_divide(false, false[:1]), recall) if self.curve == "ROC" else (recall, _divide(true, true + false))
        if self.method == "interpolation":
            heights = (y[:-1] + y[1:]) / 2
        else:
            heights = (np.minimum if self.method == "minoring" else np.maximum)(y[:-1], y[1:])
        return float(np.sum((x[:-1] - x[1:]) * heights))


def _area_under_pr(true: AnyArray, false: AnyArray) -> float:
    # Between two thresholds the true positives, not the precision, are taken to grow linearly with the predicted
    # positives: Davis and Goadrich, The relationship between precision-recall and ROC curves (ICML 2006). Linear
    # precision would give too large an area. tf.keras computes it in this way, too.
    predicted = true + false
    gained, grown = true[:-1] - true[1:], predicted[:-1] - predicted[1:]
    slope = _divide(gained, np.maximum(grown, 0))
    intercept = true[1:] - slope * predicted[1:]
    both = (predicted[:-1] > 0) & (predicted[1:] > 0)
    growth = np.where(both, _divide(predicted[:-1], np.maximum(predicted[1:], 0)), 1)
    return float(np.sum(_divide(slope * (gained + intercept * np.log(growth)), np.maximum(true[:1], 0))))


def _divide(numerator: AnyArray, denominator: AnyArray) -> AnyArray:
    """The quotient; 0 where the denominator is 0."""
    numerator, denominator = np.broadcast_arrays(numerator, denominator)
    return np.divide(numerator, denominator, out=np.zeros(numerator.shape), where=denominator != 0)


def _spread_over_labels(label_weights: tuple[float, ...], like: AnyArray) -> AnyArray:
    if like.shape[-1:] != (len(label_weights),):
        raise ValueError(
            f"with `label_weights` `y_true` and `y_pred` must have a last dimension of {len(label_weights)} labels, "
            f"got {like.shape}"
        )
    return arrays.move(np.array(label_weights), arrays.namespace(like))


def _as_label_weights(label_weights: Sequence[float], num_labels: int | None) -> tuple[float, ...]:
    weights = as_floats("label_weights", label_weights)
    count = "" if num_labels is None else f"{num_labels} "
    fits = weights.ndim == 1 and num_labels in (None, weights.size) and (weights >= 0).all()
    if not fits or not 0 < weights.sum() < np.inf:
        raise ValueError(
            f"`label_weights` must be {count}numbers of at least 0, one for each label and not all 0, got "
            f"{label_weights!r}"
        )
    return tuple(weights.tolist())


def AUC(  # noqa: PLR0913  # tf.keras.metrics.AUC's arguments
    num_thresholds: int = 200,
    curve: str = "ROC",
    summation_method: str = "interpolation",
    name: str = "auc",
    dtype: npt.DTypeLike | None = None,
    thresholds: Sequence[float] | None = None,
    multi_label: bool = False,
    num_labels: int | None = None,
    label_weights: Sequence[float] | None = None,
    from_logits: bool = False,
) -> Metric:
    """Collective. Make a metric of the area under a curve, over thresholds that are fixed beforehand.

    More thresholds near the predictions give a result closer to the exact area.

    Args:
        num_thresholds: At least 2, spaced evenly over [0, 1].
        curve: "ROC" (true over false positive rate) or "PR" (precision over recall).
        summation_method: "interpolation", "minoring" (from below) or "majoring" (from above).
        name: A name for display and errors.
        dtype: The dtype of the result; see `Metric`.
        thresholds: Thresholds to use instead of evenly spaced ones; 0 and 1 are added.
        multi_label: Make one curve for each label, of arrays of shape (batch, `num_labels`); the result is the mean of
            their areas.
        num_labels: Number of labels. It is needed with `multi_label`, since the sums are made before any data is seen.
        label_weights: One weight for each label, at least 0 and not all 0. With `multi_label` they weight the mean.
            Without it each prediction counts with the weight of its place in the last dimension.
        from_logits: Whether `y_pred` holds logits instead of probabilities.

    Returns:
        The metric.

    Raises:
        ValueError: The curve or method is unknown, there are too few thresholds or some outside [0, 1], only one of
            `multi_label` and `num_labels` is given, or `label_weights` do not fit.
    """
    if not isinstance(curve, str) or curve.upper() not in CURVES:
        raise ValueError(f"`curve` must be one of {', '.join(CURVES)}, got {curve!r}")
    if not isinstance(summation_method, str) or summation_method.lower() not in METHODS:
        raise ValueError(f"`summation_method` must be one of {', '.join(METHODS)}, got {summation_method!r}")
    if flag("multi_label", multi_label) != (num_labels is not None):
        raise ValueError(
            f"`multi_label` and `num_labels` go together, got multi_label={multi_label!r}, num_labels={num_labels!r}"
        )
    if thresholds is None:
        count = positive("num_thresholds", num_thresholds, least=2)
        inner = [(n + 1) / (count - 1) for n in range(count - 2)]
    else:
        inner = sorted(as_thresholds(thresholds)) if np.size(thresholds) else []
    labels = None if num_labels is None else positive("num_labels", num_labels)
    return Metric(
        AucMeasure(
            curve.upper(), summation_method.lower(), (-_MARGIN, *inner, 1 + _MARGIN), labels,
            None if label_weights is None else _as_label_weights(label_weights, labels),
            flag("from_logits", from_logits),
        ),
        name=name, dtype=dtype,
    )
