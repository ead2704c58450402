"""Crossentropies: the mean of the negative logarithm of the probability that is predicted for what is true."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt

from mpidist import arrays
from mpidist.arguments import described, flag, number, whole
from mpidist.arrays import AnyArray
from mpidist.metrics.argument import as_classes, as_floats, as_numbers, as_pair, highest
from mpidist.metrics.mean import ratio, weighted_sums
from mpidist.metrics.metric import Metric

# Probabilities are cut to [_EPSILON, 1 - _EPSILON], as in tf.keras.
_EPSILON = 1e-7


@dataclass(frozen=True)
class CrossentropyMeasure:
    """The sum of the weighted crossentropies, and the sum of the weights.

    Attributes:
        labels: The kind of `y_true`. "binary": 0 or 1 for each prediction. "one-hot": the probability of each class.
            "sparse": class numbers.
        from_logits: Whether predictions are logits, and not probabilities.
        label_smoothing: The part s of labels that is spread over all classes: `(1 - s) * y_true + s / classes`.
        ignore_class: Examples of this class do not count.
        axis: The dimension of the classes.
    """

    labels: Literal["binary", "one-hot", "sparse"]
    from_logits: bool = False
    label_smoothing: float = 0.0
    ignore_class: int | None = None
    axis: int = -1

    arguments: ClassVar[tuple[str, ...]] = ("y_true", "y_pred")
    shape: ClassVar[tuple[int, ...]] = (2,)

    def contribution(self, *values: npt.ArrayLike, sample_weight: npt.ArrayLike | None) -> AnyArray:
        """Local. See `Measure.contribution`."""
        if self.labels == "binary":
            return weighted_sums(self._of_pairs(values[0], values[1]), sample_weight)
        if self.labels == "one-hot":
            return weighted_sums(self._of_distributions(values[0], values[1]), sample_weight)
        losses, counts = self._of_classes(values[0], values[1])
        if counts is None:
            return weighted_sums(losses, sample_weight)
        # Weights of examples that do not count are left out of both sums.
        return np.array([
            weighted_sums(losses, sample_weight)[0], weighted_sums(counts.astype(np.float64), sample_weight)[0]
        ])

    def _of_pairs(self, y_true: npt.ArrayLike, y_pred: npt.ArrayLike) -> AnyArray:
        labels, predictions = (as_floats(name, given) for name, given in zip(
            self.arguments, as_pair(y_true, y_pred), strict=True
        ))
        labels = labels * (1 - self.label_smoothing) + 0.5 * self.label_smoothing
        if self.from_logits:
            # log(1 + exp(-x)) of either sign, without overflow.
            hit, missed = np.logaddexp(0, -predictions), np.logaddexp(0, predictions)
        else:
            chances = predictions.clip(_EPSILON, 1 - _EPSILON)
            hit, missed = -np.log(chances), -np.log(1 - chances)
        found: AnyArray = labels * hit + (1 - labels) * missed
        return found

    def _of_distributions(self, y_true: npt.ArrayLike, y_pred: npt.ArrayLike) -> AnyArray:
        labels, predictions = as_floats("y_true", y_true), as_floats("y_pred", y_pred)
        if labels.shape != predictions.shape or labels.ndim == 0:
            raise ValueError(
                "`y_true` must have the shape of `y_pred`, with a probability for each class, got y_true "
                f"{labels.shape} and y_pred {predictions.shape}. Use SparseCategoricalCrossentropy for class numbers"
            )
        labels, logarithms = self._classes_last("y_true", labels), self._logarithms(predictions)
        smoothed = labels * (1 - self.label_smoothing) + self.label_smoothing / max(1, labels.shape[-1])
        found: AnyArray = -(smoothed * logarithms).sum(-1)
        return found

    def _of_classes(self, y_true: npt.ArrayLike, y_pred: npt.ArrayLike) -> tuple[AnyArray, AnyArray | None]:
        """One loss for each example, and with `ignore_class` which of them count."""
        labels, predictions = as_numbers("y_true", y_true), as_floats("y_pred", y_pred)
        if labels.ndim == predictions.ndim and labels.ndim > 0:
            labels = self._classes_last("y_true", labels)
        logarithms = self._logarithms(predictions)
        labels, _ = as_classes(labels, logarithms)
        counts = None if self.ignore_class is None else labels != self.ignore_class
        if counts is not None:
            labels = np.where(counts, labels, 0)
        classes = logarithms.shape[-1]
        is_class = (labels >= 0) & (labels < classes) & (labels == np.floor(labels.astype(np.float64)))
        if not is_class.all():
            raise ValueError(
                f"`y_true` must hold class numbers from 0 to {classes - 1}, got {labels[~is_class][0]!s}. Classes that "
                "are not to count are named by `ignore_class`"
            )
        xp = arrays.namespace(logarithms)
        losses: AnyArray = -xp.take_along_axis(logarithms, labels.astype(np.int64)[..., None], -1)[..., 0]
        return (losses, None) if counts is None else (np.where(counts, losses, 0.0), counts)

    def _logarithms(self, predictions: AnyArray) -> AnyArray:
        """The logarithms of the probabilities, with the classes in the last dimension."""
        scores = self._classes_last("y_pred", predictions)
        if self.from_logits:
            shifted = scores - highest(scores)
            found: AnyArray = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
        else:
            found = np.log((scores / scores.sum(-1, keepdims=True)).clip(_EPSILON, 1 - _EPSILON))
        return found

    def _classes_last(self, name: str, array: AnyArray) -> AnyArray:
        if not -array.ndim <= self.axis < array.ndim:
            raise ValueError(f"`{name}` must have a dimension {self.axis} of classes, got shape {array.shape}")
        return arrays.namespace(array).moveaxis(array, self.axis, -1)  # type: ignore[no-any-return]  # CuPy's, too

    def compute(self, sums: AnyArray) -> float:
        """Local. The mean crossentropy; 0 before any value."""
        return ratio(sums)


def _smoothing(value: float) -> float:
    return number("label_smoothing", value, least=0, most=1)


def BinaryCrossentropy(
    name: str = "binary_crossentropy", dtype: npt.DTypeLike | None = None, from_logits: bool = False,
    label_smoothing: float = 0,
) -> Metric:
    """Collective. Make a metric of the mean crossentropy of `y_true`, 0 or 1, and the probability `y_pred` of 1.

    `update_state(y_true, y_pred)` takes arrays of one shape. It computes in float64: a probability of exactly 0 or 1
    counts as 1e-7 or 1 - 1e-7, where tf.keras rounds these to float32.

    Args:
        name: A name for display and errors.
        dtype: The dtype of the result; see `Metric`.
        from_logits: Whether `y_pred` holds logits.
        label_smoothing: A number s from 0 to 1: labels become `(1 - s) * y_true + s / 2`.

    Returns:
        The metric.

    Raises:
        ValueError: `label_smoothing` is out of range.
        TypeError: An argument has another type.
    """
    measure = CrossentropyMeasure("binary", flag("from_logits", from_logits), _smoothing(label_smoothing))
    return Metric(measure, name=name, dtype=dtype)


def CategoricalCrossentropy(
    name: str = "categorical_crossentropy", dtype: npt.DTypeLike | None = None, from_logits: bool = False,
    label_smoothing: float = 0, axis: int = -1,
) -> Metric:
    """Collective. Make a metric of the mean crossentropy of one-hot `y_true` and the probabilities `y_pred`.

    `update_state(y_true, y_pred)` takes arrays of one shape, (batch, classes) for instance. Probabilities are divided
    by their sum; see `BinaryCrossentropy` for those of 0.

    Args:
        name: A name for display and errors.
        dtype: The dtype of the result; see `Metric`.
        from_logits: Whether `y_pred` holds logits.
        label_smoothing: A number s from 0 to 1: labels become `(1 - s) * y_true + s / classes`.
        axis: The dimension of the classes.

    Returns:
        The metric.

    Raises:
        ValueError: `label_smoothing` is out of range.
        TypeError: An argument has another type.
    """
    measure = CrossentropyMeasure(
        "one-hot", flag("from_logits", from_logits), _smoothing(label_smoothing), axis=whole("axis", axis)
    )
    return Metric(measure, name=name, dtype=dtype)


def SparseCategoricalCrossentropy(
    name: str = "sparse_categorical_crossentropy", dtype: npt.DTypeLike | None = None, from_logits: bool = False,
    ignore_class: int | None = None, axis: int = -1,
) -> Metric:
    """Collective. Make a metric of the mean crossentropy of class numbers `y_true` and the probabilities `y_pred`.

    `update_state(y_true, y_pred)` takes class numbers of shape (batch,) or (batch, 1), and `y_pred` of shape
    (batch, classes), or more dimensions. Probabilities are divided by their sum; see `BinaryCrossentropy` for those
    of 0.

    Args:
        name: A name for display and errors.
        dtype: The dtype of the result; see `Metric`.
        from_logits: Whether `y_pred` holds logits.
        ignore_class: Examples of this class number, which need not be one of `y_pred`, do not count, as in tf.keras;
            Keras 3 without weights divides by their number, too.
        axis: The dimension of the classes in `y_pred`.

    Returns:
        The metric.

    Raises:
        TypeError: An argument has another type.
    """
    measure = CrossentropyMeasure(
        "sparse", flag("from_logits", from_logits), ignore_class=_class("ignore_class", ignore_class),
        axis=whole("axis", axis),
    )
    return Metric(measure, name=name, dtype=dtype)


def _class(name: str, value: int | None) -> int | None:
    try:
        return None if value is None else operator.index(value)
    except TypeError:
        raise TypeError(f"`{name}` must be a class number or None, got {described(value)}") from None
