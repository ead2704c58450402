"""Precision, Recall and AUC on one rank: values of scikit-learn and tf.keras, and inputs that do not fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import sklearn.metrics as sklearn_metrics
from hypothesis import given
from hypothesis import strategies as st

from mpidist.metrics import AUC, Metric, Precision, Recall
from mpidist.metrics.above import positives_above


def result_of(metric: Metric, *values: Any) -> Any:
    metric.update_state(*values)
    return metric.result()


def examples(count: int) -> tuple[Any, Any, Any]:
    generator = np.random.default_rng(count)
    labels = generator.integers(0, 2, count)
    # Multiples of 0.01: with 101 thresholds the curve has all its points.
    scores = np.clip(np.round(0.3 * labels + 0.7 * generator.random(count), 2), 0.01, 0.99)
    return labels, scores, generator.random(count)


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 1), st.floats(0, 9)), max_size=20), st.lists(st.floats(0, 1)))
def test_positives_above_each_threshold(rows: Any, thresholds: list[float]) -> None:
    labels, scores, weights = (np.array([row[n] for row in rows]) for n in range(3))
    true, false = positives_above(labels, scores, weights, tuple(thresholds))
    for n, threshold in enumerate(thresholds):
        chosen = scores > threshold
        assert true[n] == pytest.approx(weights[chosen & (labels != 0)].sum())
        assert false[n] == pytest.approx(weights[chosen & (labels == 0)].sum())


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_thresholds_compare_in_the_dtype_of_the_predictions(dtype: str) -> None:
    scores = np.array([0.1, 0.3, 0.7], dtype)
    found = positives_above(np.ones(3), scores, np.ones(3), (0.3,))
    assert found[0] == (scores > 0.3).sum() == 1


def test_precision_and_recall_of_scikit_learn() -> None:
    labels, scores, weights = examples(80)
    for threshold in (None, 0.2, 0.7):
        predicted = scores > (threshold or 0.5)
        expected = sklearn_metrics.precision_score(labels, predicted, sample_weight=weights)
        assert result_of(Precision(threshold), labels, scores, weights) == pytest.approx(expected)
        expected = sklearn_metrics.recall_score(labels, predicted, sample_weight=weights)
        assert result_of(Recall(threshold), labels, scores, weights) == pytest.approx(expected)
    found = result_of(Recall([0.7, 0.2]), labels[:, None], scores[:, None], weights)
    assert found == pytest.approx([result_of(Recall(t), labels, scores, weights) for t in (0.7, 0.2)])
    assert found.shape == (2,)
    assert result_of(Precision([0.5]), labels, scores).shape == (1,)


def test_precision_and_recall_of_keras() -> None:
    labels, scores = [0, 1, 1, 1], [1, 0, 1, 1]
    assert result_of(Precision(), labels, scores) == pytest.approx(2 / 3)
    assert result_of(Precision(), labels, scores, [0, 0, 1, 0]) == 1
    assert result_of(Recall(), labels, scores) == pytest.approx(2 / 3)
    assert result_of(Recall(), labels, scores, [0, 0, 1, 0]) == 1
    # "With top_k=2 it will calculate precision over y_true[:2] and y_pred[:2]", whatever the scores.
    assert result_of(Precision(top_k=2), [0, 0, 1, 1], [1, 1, 1, 1]) == 0
    assert result_of(Precision(top_k=4), [0, 0, 1, 1], [1, 1, 1, 1]) == 0.5
    assert Precision().result() == 0
    assert Recall([0.1, 0.2]).result().tolist() == [0, 0]


@pytest.mark.parametrize("count", [4, 1000])
@pytest.mark.parametrize("dtype", ["float32", "float64", "int32"])
def test_of_equal_predictions_the_first_ones_are_higher(count: int, dtype: str) -> None:
    """Of many classes, too: sorting keeps the order of a few equal numbers by chance."""
    scores = np.zeros((2, count), dtype)
    scores[1, count // 2 :] = 1
    labels = np.zeros((2, count))
    labels[0, :2] = labels[1, count // 2 : count // 2 + 2] = 1
    assert result_of(Precision(top_k=2), labels, scores) == 1
    assert result_of(Recall(top_k=2), labels, scores) == 1
    if dtype != "int32":
        scores[0, ::2] = -0.0
        assert result_of(Precision(top_k=2), labels, scores) == 1


def test_top_k_and_class_id() -> None:
    labels = np.array([[1, 0, 1], [0, 1, 0]])
    scores = np.array([[-5.0, 9.0, 3.0], [2.0, 1.0, 0.5]])
    assert result_of(Precision(top_k=1), labels, scores) == 0
    assert result_of(Precision(top_k=2), labels, scores) == 0.5
    assert result_of(Recall(top_k=2), labels, scores, [1.0, 3.0]) == pytest.approx(4 / 5)
    assert result_of(Precision(top_k=2, class_id=1), labels, scores) == 0.5
    assert result_of(Recall(top_k=2, class_id=0), labels, scores) == 0
    # With thresholds both conditions hold.
    assert result_of(Precision([0.0, 0.6], top_k=1), [[1, 0], [0, 1]], [[0.7, 0.6], [0.5, 0.4]]).tolist() == [0.5, 1]
    assert result_of(Recall(class_id=1), [[0, 1], [1, 1]], [[0.9, 0.4], [0.1, 0.8]]) == 0.5


def test_area_under_roc_is_that_of_scikit_learn() -> None:
    labels, scores, weights = examples(200)
    for given_weights in (None, weights):
        expected = sklearn_metrics.roc_auc_score(labels, scores, sample_weight=given_weights)
        assert result_of(AUC(101), labels, scores, given_weights) == pytest.approx(expected)
    precision, recall, _ = sklearn_metrics.precision_recall_curve(labels, scores)
    steps = -np.diff(recall)
    low, high = np.minimum(precision[:-1], precision[1:]), np.maximum(precision[:-1], precision[1:])
    majoring = result_of(AUC(101, curve="PR", summation_method="majoring"), labels, scores)
    assert majoring == pytest.approx(steps @ high, abs=0.01)
    interpolated = result_of(AUC(101, "pr"), labels, scores)
    assert steps @ low - 0.01 < interpolated < majoring
    # Davis and Goadrich's interpolation stays below the straight lines between the points.
    assert interpolated < sklearn_metrics.auc(recall, precision)
    logits = np.log(scores / (1 - scores))
    assert result_of(AUC(77, from_logits=True), labels, logits) == pytest.approx(result_of(AUC(77), labels, scores))


def test_area_of_keras() -> None:
    # tp = [2, 1, 0], fp = [2, 0, 0] at thresholds below 0, at 0.5, above 1: the docstring of tf.keras.metrics.AUC.
    labels, scores = [0, 0, 1, 1], [0, 0.5, 0.3, 0.9]
    assert result_of(AUC(num_thresholds=3), labels, scores) == pytest.approx(0.75)
    assert result_of(AUC(3), labels, scores, [1, 0, 0, 1]) == pytest.approx(1.0)
    assert result_of(AUC(thresholds=[0.5]), labels, scores) == pytest.approx(0.75)
    assert result_of(AUC(3, summation_method="minoring"), labels, scores) == pytest.approx(0.5)
    assert result_of(AUC(3, summation_method="majoring"), labels, scores) == pytest.approx(1.0)
    # By hand: from (tp 2 of 4) to (1 of 1) slope 1/3, intercept 2/3, area (1 + 2/3 ln 4) / 3 / 2; then 1/2.
    expected = (1 + 2 / 3 * np.log(4)) / 3 / 2 + 0.5
    assert result_of(AUC(3, curve="PR"), labels, scores) == pytest.approx(expected)
    assert AUC().result() == 0
    assert AUC(curve="PR").result() == 0


def test_area_of_several_labels_is_the_mean() -> None:
    labels, scores = examples(60)[0].reshape(20, 3), examples(60)[1].reshape(20, 3)
    expected = sklearn_metrics.roc_auc_score(labels, scores, average="macro")
    assert result_of(AUC(101, multi_label=True, num_labels=3), labels, scores) == pytest.approx(expected)
    with pytest.raises(ValueError, match=r"must have shape \(batch, 3\), got \(20, 2\)"):
        AUC(multi_label=True, num_labels=3).update_state(labels[:, :2], scores[:, :2])


def test_weights_of_labels() -> None:
    labels, scores = examples(60)[0].reshape(20, 3), examples(60)[1].reshape(20, 3)
    areas = [sklearn_metrics.roc_auc_score(labels[:, n], scores[:, n]) for n in range(3)]
    found = result_of(AUC(101, multi_label=True, num_labels=3, label_weights=[3, 0, 1]), labels, scores)
    assert found == pytest.approx((3 * areas[0] + areas[2]) / 4)
    weights = np.tile([3.0, 0.0, 1.0], 20)
    expected = sklearn_metrics.roc_auc_score(labels.ravel(), scores.ravel(), sample_weight=weights)
    assert result_of(AUC(101, label_weights=[3, 0, 1]), labels, scores) == pytest.approx(expected)
    metric = AUC(label_weights=[1.0, 2.0])
    with pytest.raises(ValueError, match=r"must have a last dimension of 2 labels, got \(20, 3\)"):
        metric.update_state(labels, scores)
    with pytest.raises(ValueError, match="merge_state takes metrics of the same kind with the same arguments"):
        metric.merge_state([AUC(label_weights=[1.0, 3.0])])
    assert metric.result() == 0


@pytest.mark.parametrize("make", [Precision, Recall, AUC])
@pytest.mark.parametrize("scores", [[1.5], [-0.1], [np.nan]])
def test_predictions_that_are_no_probabilities(make: Any, scores: Any) -> None:
    metric = make()
    with pytest.raises(ValueError, match=r"`y_pred` must be probabilities in \[0, 1\], got .*\. Pass .* with"):
        metric.update_state([1], scores)
    assert metric.result() == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"thresholds": 1.5}, r"`thresholds` must be a number or a list of numbers in \[0, 1\], got 1.5"),
        ({"thresholds": []}, "`thresholds` must be"),
        ({"thresholds": [0.5, float("nan")]}, "`thresholds` must be"),
        ({"top_k": 0}, "`top_k` must be an integer of at least 1, got 0"),
        ({"class_id": -1}, "`class_id` must be an integer of at least 0, got -1"),
    ],
)
def test_arguments_that_do_not_fit(arguments: dict[str, Any], message: str) -> None:
    for make in (Precision, Recall):
        with pytest.raises(ValueError, match=message):
            make(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_thresholds": 1}, "`num_thresholds` must be an integer of at least 2, got 1"),
        ({"curve": "DET"}, "`curve` must be one of ROC, PR, got 'DET'"),
        ({"summation_method": "exact"}, "`summation_method` must be one of interpolation, minoring, majoring"),
        ({"thresholds": [2.0]}, r"`thresholds` must be .* in \[0, 1\]"),
        ({"multi_label": True}, "`multi_label` and `num_labels` go together"),
        ({"label_weights": [1, -1]}, "`label_weights` must be numbers of at least 0, one for each label and not all 0"),
        ({"label_weights": [0, 0]}, r"not all 0, got \[0, 0\]"),
        ({"label_weights": [1, float("nan")]}, "`label_weights` must be numbers"),
        ({"label_weights": 1.0}, "`label_weights` must be numbers"),
        ({"label_weights": [1], "multi_label": True, "num_labels": 2}, "`label_weights` must be 2 numbers"),
        ({"num_labels": 2}, "`multi_label` and `num_labels` go together"),
    ],
)
def test_arguments_of_auc_that_do_not_fit(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AUC(**arguments)


def test_shapes_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="a last dimension of at least top_k=3 classes"):
        Precision(top_k=3).update_state([[0, 1]], [[0.1, 0.2]])
    with pytest.raises(ValueError, match="with class_id=2"):
        Recall(class_id=2).update_state([[0, 1]], [[0.1, 0.2]])
