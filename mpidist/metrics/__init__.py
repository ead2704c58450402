"""Metrics over all replicas. A new metric is one module with its measure, and one line here."""

from mpidist.metrics.accuracy import Accuracy, BinaryAccuracy, CategoricalAccuracy, SparseCategoricalAccuracy
from mpidist.metrics.auc import AUC
from mpidist.metrics.confusion_matrix import ConfusionMatrix
from mpidist.metrics.mean import Mean, Sum
from mpidist.metrics.metric import Measure, Metric
from mpidist.metrics.precision_recall import Precision, Recall
from mpidist.metrics.regression import MeanAbsoluteError, MeanSquaredError, RootMeanSquaredError
from mpidist.metrics.top_k import SparseTopKCategoricalAccuracy, TopKCategoricalAccuracy

__all__ = [
    "AUC",
    "Accuracy",
    "BinaryAccuracy",
    "CategoricalAccuracy",
    "ConfusionMatrix",
    "Mean",
    "MeanAbsoluteError",
    "MeanSquaredError",
    "Measure",
    "Metric",
    "Precision",
    "Recall",
    "RootMeanSquaredError",
    "SparseCategoricalAccuracy",
    "SparseTopKCategoricalAccuracy",
    "Sum",
    "TopKCategoricalAccuracy",
]
