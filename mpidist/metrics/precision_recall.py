"""Precision and recall: the fraction of predicted positives that are right, and of positives that are found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from mpidist import arrays
from mpidist.arrays import AnyArray
from mpidist.metrics.above import positives_above, require_probabilities
from mpidist.metrics.argument import as_pair, as_thresholds, positive, spread_weights
from mpidist.metrics.metric import Metric


@dataclass(frozen=True)
class PositivesMeasure:
    """The weights of true positives, and of the whole that they are a fraction of, for each threshold.

    Attributes:
        of: The whole: "predicted" for the predicted positives (precision), "positive" for the positives (recall).
        thresholds: A prediction above a threshold is positive. Empty where being among the top k is enough.
        top_k: If given, only the k highest predictions of an example can be positive.
        class_id: If given, only this class counts.
        is_list: Whether the result is an array with one number per threshold.
    """

    of: Literal["predicted", "positive"]
    thresholds: tuple[float, ...]
    top_k: int | None
    class_id: int | None
    is_list: bool

    arguments: ClassVar[tuple[str, ...]] = ("y_true", "y_pred")

    @property
    def shape(self) -> tuple[int, ...]:
        """Local. Two sums per threshold."""
        return (2, max(1, len(self.thresholds)))

    def contribution(self, *values: npt.ArrayLike, sample_weight: npt.ArrayLike | None) -> AnyArray:
        """Local. See `Measure.contribution`."""
        labels, predictions = as_pair(values[0], values[1])
        if self.thresholds:
            require_probabilities(predictions, "Pass scores with `top_k` and without `thresholds`")
            thresholds = self.thresholds
        else:
            thresholds = (0.5,)
        if self.top_k is not None:
            chosen = among_top_k(predictions, self.top_k)
            # Without thresholds only the choice counts. With them, -1 puts all predictions that are not chosen below
            # every threshold.
            predictions = np.where(chosen, predictions, -1) if self.thresholds else chosen.astype(np.float64)
        if self.class_id is not None:
            labels, predictions = _of_class(labels, self.class_id), _of_class(predictions, self.class_id)
        weights = spread_weights(sample_weight, predictions)
        found = positives_above(labels, predictions, weights, thresholds)
        positive = None if self.of == "predicted" else float(weights[labels != 0].sum())
        whole = found.sum(0) if positive is None else np.full(len(thresholds), positive)
        return np.stack([found[0], whole])

    def compute(self, sums: AnyArray) -> Any:
        """Local. The fraction, 0 where the whole is 0; a float, or an array with a number per threshold."""
        fractions = np.divide(sums[0], sums[1], out=np.zeros(sums.shape[1]), where=sums[1] != 0)
        return fractions if self.is_list else float(fractions[0])


def among_top_k(predictions: AnyArray, k: int) -> AnyArray:
    """Local. Mark the k highest predictions of each example; of equal predictions the first ones count as higher.

    Args:
        predictions: An array whose last dimension holds the classes.
        k: At most the number of classes.

    Returns:
        Booleans of the same shape.

    Raises:
        ValueError: There are fewer classes than k.
    """
    if predictions.ndim == 0 or predictions.shape[-1] < k:
        raise ValueError(f"`y_pred` must have a last dimension of at least top_k={k} classes, got {predictions.shape}")
    # Equal numbers stay equal when negated (0.0 and -0.0 are equal, too), so a stable sort keeps the first ones first.
    highest = np.argsort(-predictions.astype(np.float64), axis=-1, kind="stable")[..., :k]
    xp = arrays.namespace(predictions)
    chosen: AnyArray = xp.zeros(predictions.shape, bool)
    rows = chosen.reshape(-1, predictions.shape[-1])
    rows[xp.arange(len(rows))[:, None], highest.reshape(len(rows), k)] = True
    return chosen


def _of_class(array: AnyArray, class_id: int) -> AnyArray:
    if array.ndim == 0 or array.shape[-1] <= class_id:
        raise ValueError(
            f"with class_id={class_id} `y_true` and `y_pred` must have a last dimension of more than {class_id} "
            f"classes, got {array.shape}"
        )
    return array[..., class_id]


def _measure(
    of: Literal["predicted", "positive"],
    thresholds: float | Sequence[float] | None,
    top_k: int | None,
    class_id: int | None,
) -> PositivesMeasure:
    limits: tuple[float, ...] = ()
    if thresholds is not None:
        limits = as_thresholds(thresholds)
    elif top_k is None:
        limits = (0.5,)
    return PositivesMeasure(
        of, limits,
        None if top_k is None else positive("top_k", top_k),
        None if class_id is None else positive("class_id", class_id, least=0),
        thresholds is not None and np.ndim(thresholds) > 0,
    )


def Precision(
    thresholds: float | Sequence[float] | None = None,
    top_k: int | None = None,
    class_id: int | None = None,
    name: str = "precision",
    dtype: npt.DTypeLike | None = None,
) -> Metric:
    """Collective. Make a metric of the fraction of predicted positives that are positive in `y_true`.

    Args:
        thresholds: A prediction above the threshold is positive; default 0.5. With a list the result has one number
            per threshold.
        top_k: Only the `top_k` highest predictions of an example can be positive. Without `thresholds` all of these
            are positive, and `y_pred` may hold any scores.
        class_id: Count only this class, an index of the last dimension.
        name: A name for display and errors.
        dtype: The dtype of the result; see `Metric`.

    Returns:
        The metric.

    Raises:
        ValueError: A threshold is outside [0, 1], or `top_k` or `class_id` is not such an integer.
    """
    return Metric(_measure("predicted", thresholds, top_k, class_id), name=name, dtype=dtype)


def Recall(
    thresholds: float | Sequence[float] | None = None,
    top_k: int | None = None,
    class_id: int | None = None,
    name: str = "recall",
    dtype: npt.DTypeLike | None = None,
) -> Metric:
    """Collective. Make a metric of the fraction of positives in `y_true` that are predicted.

    Args:
        thresholds: See `Precision`.
        top_k: See `Precision`.
        class_id: See `Precision`.
        name: A name for display and errors.
        dtype: The dtype of the result; see `Metric`.

    Returns:
        The metric.

    Raises:
        ValueError: A threshold is outside [0, 1], or `top_k` or `class_id` is not such an integer.
    """
    return Metric(_measure("positive", thresholds, top_k, class_id), name=name, dtype=dtype)
