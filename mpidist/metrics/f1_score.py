"""The F1 score: the harmonic mean of precision and recall."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from mpidist import arrays
from mpidist.arguments import number
from mpidist.arrays import AnyArray
from mpidist.metrics.argument import as_floats, highest, positive, spread_weights
from mpidist.metrics.metric import Metric

Average = Literal["micro", "macro", "weighted"]
_AVERAGES = ("micro", "macro", "weighted")


@dataclass(frozen=True)
class F1Measure:
    """The weights of true positives, false positives and false negatives of each class, or of all together.

    Attributes:
        average: The average over classes: of their sums, of their scores, or of their scores weighted by the
            positives. None: one number for each class.
        threshold: Predictions above it are positive; None: those that are the highest of their example.
        num_classes: Number of classes; None under "micro", which needs none.
    """

    average: Average | None
    threshold: float | None
    num_classes: int | None

    arguments: ClassVar[tuple[str, ...]] = ("y_true", "y_pred")

    @property
    def shape(self) -> tuple[int, ...]:
        """Local. Three sums, for each class."""
        return (3, 1 if self.average == "micro" else self.num_classes or 1)

    def contribution(self, *values: npt.ArrayLike, sample_weight: npt.ArrayLike | None) -> AnyArray:
        """Local. See `Measure.contribution`."""
        labels, predictions = as_floats("y_true", values[0]), as_floats("y_pred", values[1])
        classes = self.num_classes or (predictions.shape[-1] if predictions.ndim else 0)
        if labels.shape != predictions.shape or labels.ndim != 2 or labels.shape[1] != classes:
            raise ValueError(
                f"`y_true` and `y_pred` must have the shape (batch, {self.num_classes or 'classes'}), got y_true "
                f"{labels.shape} and y_pred {predictions.shape}. Class numbers are made one-hot by np.eye(classes)[y]"
            )
        if self.threshold is None:
            # An example whose predictions are all 0 has no positive, as in tf.keras.
            chosen = (predictions >= highest(predictions)) & (np.abs(predictions) > 1e-9)
        else:
            chosen = predictions > self.threshold
        found = chosen.astype(np.float64)
        weights = spread_weights(sample_weight, labels)
        parts = [labels * found, (1 - labels) * found, labels * (1 - found)]
        sums = np.stack([arrays.to_host((part * weights).sum(0)) for part in parts])
        return sums.sum(1, keepdims=True) if self.average == "micro" else sums

    def compute(self, sums: AnyArray) -> Any:
        """Local. The score, 0 where there is neither a positive nor a prediction of one."""
        hits, wrong, missed = sums
        whole = 2 * hits + wrong + missed
        scores = np.divide(2 * hits, whole, out=np.zeros(whole.shape), where=whole != 0)
        if self.average is None:
            return scores
        if self.average == "weighted":
            positives = hits + missed
            return float((scores * positives).sum() / positives.sum()) if positives.sum() else 0.0
        return float(scores.mean())


def F1Score(
    average: Average | None = None, threshold: float | None = None, name: str = "f1_score",
    dtype: npt.DTypeLike | None = None, *, num_classes: int | None = None,
) -> Metric:
    """Collective. Make a metric of the F1 score, `2 * precision * recall / (precision + recall)`, of each class.

    `update_state(y_true, y_pred)` takes labels of 0 and 1, and predictions, both of shape (batch, classes).

    Args:
        average: None gives an array with the score of each class, "macro" the mean of these scores, "weighted" their
            mean weighted by the positives of each class, and "micro" the score of the sums over the classes.
        threshold: A number above 0 and up to 1; predictions above it are positive. None: in each example the highest
            prediction is positive.
        name: A name for display and errors.
        dtype: The dtype of the result; see `Metric`.
        num_classes: Number of classes; needed unless `average` is "micro". tf.keras takes it from the first batch; here
            all ranks make the sums together before the first batch.

    Returns:
        The metric.

    Raises:
        ValueError: The average is unknown, the threshold is out of range, or the number of classes is missing.
        TypeError: The threshold is no number.
    """
    if average is not None and average not in _AVERAGES:
        raise ValueError(f"`average` must be None or one of {', '.join(_AVERAGES)}, got {average!r}")
    if threshold is not None and not 0 < number("threshold", threshold) <= 1:
        raise ValueError(f"`threshold` must be above 0 and at most 1, or None, got {threshold!r}")
    if num_classes is None and average != "micro":
        raise ValueError(
            f"F1Score(average={average!r}) needs `num_classes`, got None: its sums are made before the first batch. "
            'Pass the last dimension of `y_pred`, or average="micro"'
        )
    measure = F1Measure(
        average, None if threshold is None else float(threshold),
        None if num_classes is None else positive("num_classes", num_classes),
    )
    return Metric(measure, name=name, dtype=dtype)
