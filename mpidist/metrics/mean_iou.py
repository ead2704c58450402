"""The mean over classes of intersection over union, for segmentation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from mpidist.arguments import flag, whole
from mpidist.arrays import AnyArray
from mpidist.metrics.argument import as_numbers, as_pair, positive, spread_weights
from mpidist.metrics.confusion_matrix import count_pairs
from mpidist.metrics.metric import Metric


@dataclass(frozen=True)
class MeanIoUMeasure:
    """The sum of the weights for each pair of a true and a predicted class.

    Attributes:
        num_classes: Number of classes.
        ignore_class: Values of this true class do not count.
        sparse_y_true: Whether labels are class numbers; else the highest of a dimension of classes counts.
        sparse_y_pred: Whether predictions are class numbers; else the highest of a dimension of classes counts.
        axis: The dimension of the classes.
    """

    num_classes: int
    ignore_class: int | None = None
    sparse_y_true: bool = True
    sparse_y_pred: bool = True
    axis: int = -1

    arguments: ClassVar[tuple[str, ...]] = ("y_true", "y_pred")

    @property
    def shape(self) -> tuple[int, ...]:
        """Local. A row per class of the labels, a column per predicted class."""
        return (self.num_classes, self.num_classes)

    def contribution(self, *values: npt.ArrayLike, sample_weight: npt.ArrayLike | None) -> AnyArray:
        """Local. See `Measure.contribution`."""
        labels, predicted = as_pair(
            self._numbers("y_true", values[0], is_sparse=self.sparse_y_true),
            self._numbers("y_pred", values[1], is_sparse=self.sparse_y_pred),
        )
        weights = spread_weights(sample_weight, labels)
        if self.ignore_class is not None:
            counts = labels != self.ignore_class
            labels, predicted, weights = labels[counts], predicted[counts], weights[counts]
        return count_pairs(labels, predicted, weights, self.num_classes)

    def compute(self, sums: AnyArray) -> float:
        """Local. The mean over the classes that occur, 0 if none does."""
        both = np.diag(sums)
        either = sums.sum(0) + sums.sum(1) - both
        occurs = either > 0
        return float((both[occurs] / either[occurs]).mean()) if occurs.any() else 0.0

    def _numbers(self, name: str, value: npt.ArrayLike, *, is_sparse: bool) -> AnyArray:
        array = as_numbers(name, value)
        if is_sparse:
            return array
        if not -array.ndim <= self.axis < array.ndim or array.shape[self.axis] == 0:
            raise ValueError(
                f"`{name}` must have a dimension {self.axis} of classes, got shape {array.shape}. Pass class numbers "
                f"with `sparse_{name}=True`"
            )
        found: AnyArray = array.argmax(self.axis)
        return found


def MeanIoU(
    num_classes: int, name: str = "mean_iou", dtype: npt.DTypeLike | None = None, ignore_class: int | None = None,
    sparse_y_true: bool = True, sparse_y_pred: bool = True, axis: int = -1,
) -> Metric:
    """Collective. Make a metric of the mean over classes of intersection over union.

    That is the weight of true positives, divided by the weight of true positives, false positives and false negatives.

    `update_state(y_true, y_pred)` takes class numbers of one shape. Classes that neither occur nor are predicted do not
    count. With `sample_weight`, one for each value or each example, values count with their weight; weights are not
    rounded to integers.

    Args:
        num_classes: At least 1.
        name: A name for display and errors.
        dtype: The dtype of the result; see `Metric`.
        ignore_class: Values whose `y_true` is this number, which need not be a class, do not count.
        sparse_y_true: If False, `y_true` has a dimension of classes, and the class with the highest value counts.
        sparse_y_pred: If False, `y_pred` has a dimension of classes, and the class with the highest value counts.
        axis: The dimension of the classes.

    Returns:
        The metric.

    Raises:
        ValueError: `num_classes` is not a positive integer.
        TypeError: An argument has another type.
    """
    measure = MeanIoUMeasure(
        positive("num_classes", num_classes), None if ignore_class is None else whole("ignore_class", ignore_class),
        flag("sparse_y_true", sparse_y_true), flag("sparse_y_pred", sparse_y_pred), whole("axis", axis),
    )
    return Metric(measure, name=name, dtype=dtype)
