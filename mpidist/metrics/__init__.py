"""Metrics over all replicas. To add a metric, write one module with its measure, and one line here."""

from typing import TYPE_CHECKING, NoReturn

from mpidist.metrics.accuracy import Accuracy, BinaryAccuracy, CategoricalAccuracy, SparseCategoricalAccuracy
from mpidist.metrics.auc import AUC
from mpidist.metrics.confusion_matrix import ConfusionMatrix
from mpidist.metrics.crossentropy import (
    BinaryCrossentropy,
    CategoricalCrossentropy,
    SparseCategoricalCrossentropy,
)
from mpidist.metrics.f1_score import F1Score
from mpidist.metrics.mean import Mean, Sum
from mpidist.metrics.mean_iou import MeanIoU
from mpidist.metrics.metric import Measure, Metric
from mpidist.metrics.precision_recall import Precision, Recall
from mpidist.metrics.regression import MeanAbsoluteError, MeanSquaredError, RootMeanSquaredError
from mpidist.metrics.top_k import SparseTopKCategoricalAccuracy, TopKCategoricalAccuracy
from mpidist.missing import no_attribute

__all__ = [
    "AUC",
    "Accuracy",
    "BinaryAccuracy",
    "BinaryCrossentropy",
    "CategoricalAccuracy",
    "CategoricalCrossentropy",
    "ConfusionMatrix",
    "F1Score",
    "Mean",
    "MeanAbsoluteError",
    "MeanIoU",
    "MeanSquaredError",
    "Measure",
    "Metric",
    "Precision",
    "Recall",
    "RootMeanSquaredError",
    "SparseCategoricalAccuracy",
    "SparseCategoricalCrossentropy",
    "SparseTopKCategoricalAccuracy",
    "Sum",
    "TopKCategoricalAccuracy",
]


# Hidden from type checkers, which would take any name for one of the module's.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> NoReturn:
        no_attribute(__name__, name)
