"""Metrics over all replicas. A new metric is one module with its measure, and one line here."""

from mpidist.metrics.accuracy import SparseCategoricalAccuracy
from mpidist.metrics.mean import Mean
from mpidist.metrics.metric import Measure, Metric

__all__ = ["Mean", "Measure", "Metric", "SparseCategoricalAccuracy"]
