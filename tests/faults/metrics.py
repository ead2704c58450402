"""Deliberate faults of metrics."""

from __future__ import annotations

from tests.faults.fault import Fault

METRICS = "unit/metrics/test_metrics.py::test_"
POSITIVES = "unit/metrics/test_metrics_positives.py::test_"

FAULTS = (
    Fault(
        "a metric that is called forgets the batches before", "metrics/metric.py",
        "        self.update_state(*values, sample_weight=",
        "        self.reset_state()\n        self.update_state(*values, sample_weight=",
        METRICS + "a_metric_that_is_called_adds_the_batch_and_gives_the_result",
    ),
    Fault(
        "a metric merges itself while it changes", "metrics/metric.py",
        "in [other.sums.component.copy() for other in others]:", "in [other.sums.component for other in others]:",
        METRICS + "merging_and_resetting",
    ),
    Fault(
        "ties in any order", "metrics/precision_recall.py", ', axis=-1, kind="stable")', ", axis=-1)",
        POSITIVES + "of_equal_predictions_the_first_ones_are_higher",
    ),
    Fault(
        "k + 1 scores are the highest k", "metrics/top_k.py", ".sum(-1) < k)", ".sum(-1) <= k)",
        METRICS + "top_k_is_that_of_a_sorted_row",
    ),
    Fault(
        "area of rectangles", "metrics/auc.py", "heights = (y[:-1] + y[1:]) / 2", "heights = y[1:]",
        POSITIVES + "area_under_roc_is_that_of_scikit_learn",
    ),
    Fault(
        "precision grows linearly", "metrics/auc.py",
        "slope * (gained + intercept * np.log(growth))", "slope * gained", POSITIVES + "area_of_keras",
    ),
    Fault(
        "weights do not divide", "metrics/mean.py", "float(weight.sum())", "array.size", METRICS + "weighted_mean",
    ),
    Fault(
        "small integers wrap in errors", "metrics/regression.py",
        "predictions.astype(np.float64) - truth", "predictions - truth",
        METRICS + "values_of_keras",
    ),
    Fault(
        "a confusion matrix on its side", "metrics/confusion_matrix.py",
        "rows * count + columns", "columns * count + rows", METRICS + "confusion_matrix",
    ),
    Fault(
        "classes that are ignored count in the divisor", "metrics/crossentropy.py",
        "weighted_sums(counts.astype(np.float64), sample_weight)[0]",
        "weighted_sums(np.ones(losses.shape), sample_weight)[1]",
        "unit/metrics/test_metrics.py::test_crossentropies_by_hand_and_by_scikit_learn",
    ),
    Fault(
        "classes that never occur count in the mean", "metrics/mean_iou.py",
        "occurs = either > 0", "occurs = either >= 0",
        "unit/metrics/test_metrics.py::test_intersection_over_union_by_scikit_learn",
    ),
    Fault(
        "the F1 score is weighted by predictions", "metrics/f1_score.py",
        "positives = hits + missed", "positives = hits + wrong",
        "unit/metrics/test_metrics.py::test_f1_score_by_scikit_learn",
    ),
)
