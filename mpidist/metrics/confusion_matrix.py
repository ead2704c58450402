"""The confusion matrix: counts of true and predicted classes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from mpidist import arrays
from mpidist.arrays import AnyArray
from mpidist.metrics.argument import as_classes, as_numbers, as_pair, positive, spread_weights
from mpidist.metrics.metric import Metric


@dataclass(frozen=True)
class ConfusionMatrixMeasure:
    """The sum of the weights for each pair of a true and a predicted class.

    Attributes:
        num_classes: Number of classes.
    """

    num_classes: int

    arguments: ClassVar[tuple[str, ...]] = ("y_true", "y_pred")

    @property
    def shape(self) -> tuple[int, ...]:
        """Local. A row per class of the labels, a column per predicted class."""
        return (self.num_classes, self.num_classes)

    def contribution(self, *values: npt.ArrayLike, sample_weight: npt.ArrayLike | None) -> AnyArray:
        """Local. See `Measure.contribution`."""
        labels, predicted = as_numbers("y_true", values[0]), as_numbers("y_pred", values[1])
        examples = (labels.shape, labels.shape[:-1]) if labels.shape[-1:] == (1,) else (labels.shape,)
        if predicted.shape[-1:] == (self.num_classes,) and predicted.shape[:-1] in examples:
            labels, scores = as_classes(labels, predicted)
            predicted = scores.argmax(-1)
        else:
            labels, predicted = as_pair(labels, predicted)
        return count_pairs(labels, predicted, spread_weights(sample_weight, labels), self.num_classes)

    def compute(self, sums: AnyArray) -> AnyArray:
        """Local. The matrix."""
        return np.array(sums)


def count_pairs(labels: AnyArray, predicted: AnyArray, weights: AnyArray, count: int) -> AnyArray:
    """Local. The sum of the weights for each pair of a true class, a row, and a predicted one, a column.

    Args:
        labels: Class numbers.
        predicted: Class numbers, in the same shape.
        weights: The weight of each example, in the same shape.
        count: Number of classes.

    Returns:
        Shape (count, count), in host memory.

    Raises:
        ValueError: A number is not that of a class.
    """
    rows, columns = _classes("y_true", labels, count), _classes("y_pred", predicted, count)
    found = np.bincount(rows * count + columns, weights.reshape(-1), count * count)
    return arrays.to_host(found).reshape(count, count)


def _classes(name: str, array: AnyArray, count: int) -> AnyArray:
    numbers = array.reshape(-1)
    is_class = (numbers >= 0) & (numbers < count) & (numbers == np.floor(numbers))
    if not is_class.all():
        raise ValueError(f"`{name}` must hold class numbers from 0 to {count - 1}, got {numbers[~is_class][0]!s}")
    return numbers.astype(np.int64)


def ConfusionMatrix(num_classes: int, name: str = "confusion_matrix", dtype: npt.DTypeLike | None = None) -> Metric:
    """Collective. Make a metric that counts how often each class of `y_true` (row) is predicted as each class (column).

    `update_state(y_true, y_pred)` takes class numbers; `y_pred` may also be scores of shape (batch, `num_classes`).
    With `sample_weight` each example counts with its weight.

    Args:
        num_classes: At least 1.
        name: A name for display and errors.
        dtype: The dtype of the result; see `Metric`.

    Returns:
        The metric; its result is a float64 array of shape (`num_classes`, `num_classes`).

    Raises:
        ValueError: `num_classes` is not a positive integer.
    """
    return Metric(ConfusionMatrixMeasure(positive("num_classes", num_classes)), name=name, dtype=dtype)
