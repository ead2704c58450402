"""Metrics on one rank: their arithmetic, and inputs that do not fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import sklearn.metrics as sklearn_metrics
from hypothesis import given
from hypothesis import strategies as st

from mpidist.metrics import (
    Accuracy,
    BinaryAccuracy,
    BinaryCrossentropy,
    CategoricalAccuracy,
    CategoricalCrossentropy,
    ConfusionMatrix,
    F1Score,
    Mean,
    MeanIoU,
    MeanSquaredError,
    Metric,
    Recall,
    SparseCategoricalAccuracy,
    SparseCategoricalCrossentropy,
    SparseTopKCategoricalAccuracy,
    Sum,
    TopKCategoricalAccuracy,
)
from mpidist.metrics.top_k import in_top_k
from tests.metrics import FAMILIES, Family


@given(st.lists(st.lists(st.floats(-1e3, 1e3), max_size=5), max_size=5))
def test_mean_of_batches_is_the_mean_of_all(batches: list[list[float]]) -> None:
    mean = Mean()
    for batch in batches:
        mean.update_state(batch)
    values = [value for batch in batches for value in batch]
    assert mean.result() == pytest.approx(np.mean(values) if values else 0, abs=1e-9)


@pytest.mark.parametrize(
    ("values", "weights", "expected"),
    [
        ([1.0, 3.0], [1.0, 3.0], 2.5), ([1.0, 3.0], 2.0, 2.0), ([[1.0, 2.0], [3.0, 4.0]], [1.0, 0.0], 1.5),
        (5.0, 3.0, 5.0), ([1.0, 3.0], [0.0, 0.0], 0.0), (np.full(2, 60000, "float16"), None, 60000.0),
    ],
)
def test_weighted_mean(values: Any, weights: Any, expected: float) -> None:
    mean = Mean(name="loss")
    mean.update_state(values, sample_weight=weights)
    result = mean.result()
    assert type(result) is float
    assert result == expected
    mean.reset_state()
    assert mean.result() == 0
    assert [v.name for v in mean.variables] == ["loss/sums"]


@pytest.mark.parametrize("weights", [[1.0], [1.0, 2.0, 3.0], [[1.0, 2.0]]])
def test_weights_that_do_not_fit(weights: Any) -> None:
    mean = Mean()
    with pytest.raises(ValueError, match=r"`sample_weight` must have the shape .* expected a prefix of \(2,\)"):
        mean.update_state([1.0, 2.0], sample_weight=weights)
    assert mean.result() == 0


def test_accuracy() -> None:
    scores = np.array([[0.1, 0.9, 0.0], [0.8, 0.1, 0.1], [0.0, 0.2, 0.8], [1.0, 0.0, 0.0]])
    for labels in ([1, 0, 1, 0], [[1], [0], [1], [0]]):
        accuracy = SparseCategoricalAccuracy()
        accuracy.update_state(labels, scores)
        accuracy.update_state(np.zeros(0, "int64"), np.zeros((0, 3)))
        assert accuracy.result() == 0.75
        accuracy.update_state([2], scores[:1], sample_weight=[4.0])
        assert accuracy.result() == 3 / 8


@pytest.mark.parametrize(
    ("labels", "scores"), [([1, 2], [[1.0, 0.0]]), (1, 0.5), ([[1, 2]], [[1.0, 0.0]]), ([], 0.5)]
)
def test_accuracy_of_shapes_that_do_not_fit(labels: Any, scores: Any) -> None:
    with pytest.raises(ValueError, match=r"`y_pred` must have the shape of `y_true`"):
        SparseCategoricalAccuracy().update_state(labels, scores)


def test_numbers_of_arguments() -> None:
    with pytest.raises(TypeError, match=r"'mean': update_state takes \(values, sample_weight=None\), got 3 arguments"):
        Mean().update_state([1.0], [2.0], [3.0])
    accuracy = SparseCategoricalAccuracy()
    with pytest.raises(TypeError, match=r"takes \(y_true, y_pred, sample_weight=None\), got 1 arguments"):
        accuracy.update_state([1])
    with pytest.raises(TypeError, match=r"got 2 arguments, of them by name \['y_true'\]"):
        accuracy.update_state([1], y_true=[1])
    assert "'mean'" in repr(Mean())


def test_weights_and_arguments_by_position_and_by_name() -> None:
    mean, accuracy = Mean(), Accuracy()
    mean.update_state([1.0, 3.0], [1.0, 3.0])
    assert mean.result() == 2.5
    accuracy.update_state([1, 2], [1, 3], [[1.0], [3.0]])
    accuracy.update_state(y_true=[1], y_pred=[1], sample_weight=4.0)
    assert accuracy.result() == 5 / 8


def test_merging_and_resetting() -> None:
    total, others = Sum(), [Sum(), Sum(name="other")]
    for n, metric in enumerate((total, *others)):
        metric.update_state([10.0**n, 10.0**n], sample_weight=[1.0, 2.0])
    total.merge_state(others)
    assert (total.result(), others[0].result()) == (333, 30)
    total.merge_state([total])
    assert total.result() == 666
    total.merge_state([others[0], total])
    assert total.result() == 2 * 666 + 30, "the metric's own sums are those before the call"
    total.merge_state([total, others[0], total])
    assert total.result() == 3 * 1362 + 30
    with pytest.raises(ValueError, match=r"'sum': merge_state takes metrics of the same kind .* got MeanMeasure"):
        total.merge_state([others[0], Mean()])
    with pytest.raises(ValueError, match="expected TopKMeasure\\(k=5, sparse=True\\), got TopKMeasure\\(k=4"):
        SparseTopKCategoricalAccuracy().merge_state([SparseTopKCategoricalAccuracy(k=4)])
    assert total.result() == 4116
    total.reset_states()
    assert total.result() == 0


EXAMPLES = [(family, *example) for family in FAMILIES for example in family.examples]


@pytest.mark.parametrize(("family", "arguments", "labels", "predictions", "weights", "expected"), EXAMPLES)
def test_values_of_keras(
    family: Family, arguments: dict[str, Any], labels: Any, predictions: Any, weights: Any, expected: float
) -> None:
    whole, batches = family.make(arguments), family.make(arguments)
    assert whole.result() == 0
    whole.update_state(labels, predictions, sample_weight=weights)
    assert type(whole.result()) is float
    assert whole.result() == pytest.approx(expected)
    for n in range(len(labels)):
        part = slice(n, n + 1)
        share: Any = weights[part] if weights else None
        batches.update_state(labels[part], predictions[part], share)
    assert batches.result() == pytest.approx(expected)


@pytest.mark.parametrize("dtype", ["float16", np.float32, np.dtype("float64"), ml_dtypes.bfloat16])
def test_the_dtype_of_a_result(dtype: Any) -> None:
    mean, matrix = Mean("loss", dtype), ConfusionMatrix(2, dtype=dtype)
    recall = Recall([0.2, 0.7], dtype=dtype)
    # In a narrow sum the last 2 would be lost.
    mean.update_state([2.0**30], 1.0)
    mean.update_state([2.0], 1.0)
    mean.update_state([-(2.0**30)], 1.0)
    assert mean.result() == np.dtype(dtype).type(2 / 3)
    matrix.update_state([0, 1], [1, 1])
    recall.update_state([1, 1], [0.5, 0.9])
    assert recall.result().tolist() == [1, 0.5]
    assert [m.result().dtype for m in (mean, matrix, recall)] == [np.dtype(dtype)] * 3 == [
        m.dtype for m in (mean, matrix, recall)
    ]
    assert mean.result().shape == ()
    assert Mean().dtype == np.float64
    # What is summed is the same whatever the dtype.
    total = Mean()
    total.merge_state([mean])
    assert total.result() == 2 / 3


@pytest.mark.parametrize("dtype", ["int32", bool, "complex64", "floaty", "V2", str])
def test_a_dtype_that_does_not_fit(dtype: Any) -> None:
    for make in (Mean, Accuracy, Recall):
        with pytest.raises(ValueError, match="`dtype` must be a floating dtype, 'float32' for instance, got"):
            make(dtype=dtype)


def test_ties_and_odd_scores_in_top_k() -> None:
    scores = np.array([[1.0, 1.0, 1.0], [3.0, 2.0, 1.0], [np.nan, 2.0, 1.0], [3.0, np.inf, 1.0]])
    # Ties at the border count as inside; scores that are not finite and labels outside never do.
    assert in_top_k(np.array([2, 1, 1, 0]), scores, 1).tolist() == [True, False, False, False]
    assert in_top_k(np.array([2, 1, 1, 1]), scores, 9).tolist() == [True, True, False, False]
    assert in_top_k(np.array([-1, 3, 0, 0]), scores, 3).tolist() == [False] * 4


@given(st.data())
def test_top_k_is_that_of_a_sorted_row(data: st.DataObject) -> None:
    classes, k = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 7))
    scores = np.array(data.draw(st.permutations(range(classes))), float)
    label = data.draw(st.integers(0, classes - 1))
    assert in_top_k(np.array([label]), scores[None], k) == (label in np.argsort(-scores)[:k])


def test_confusion_matrix() -> None:
    generator = np.random.default_rng(0)
    labels, scores = generator.integers(0, 4, 60), generator.normal(size=(60, 4))
    weights = generator.random(60)
    expected = sklearn_metrics.confusion_matrix(labels, scores.argmax(1), sample_weight=weights)
    for shape in ((60,), (60, 1)):
        for predictions in (scores, scores.argmax(1), scores.argmax(1)[:, None].astype("float32")):
            matrix = ConfusionMatrix(4)
            matrix.update_state(labels.reshape(shape), predictions, weights)
            assert np.allclose(matrix.result(), expected)
    single = ConfusionMatrix(4)
    for example in range(60):
        single.update_state(labels[example : example + 1], scores[example : example + 1], weights[example])
    assert np.allclose(single.result(), expected)
    square = ConfusionMatrix(3)
    square.update_state([[0, 1, 2]], [[0, 1, 1]])
    square.update_state(np.zeros(0, int), np.zeros(0, int))
    assert square.result().tolist() == [[1, 0, 0], [0, 1, 0], [0, 1, 0]]


@pytest.mark.parametrize(
    ("metric", "labels", "predictions", "message"),
    [
        (Accuracy, [1, 2], [1, 2, 3], r"`y_pred` must have the shape of `y_true`, got y_true \(2,\) and y_pred \(3,\)"),
        (Accuracy, ["a"], ["a"], "`y_true` must be an array of real numbers, got dtype <U1"),
        (Accuracy, [[1], [1, 2]], [1, 2], "`y_true` must be an array, got nested lists of different lengths"),
        (MeanSquaredError, [1j], [1.0], "`y_true` must be an array of real numbers, got dtype complex128"),
        (MeanSquaredError, [[1, 2]], [[1], [2]], "`y_pred` must have the shape"),
        (CategoricalAccuracy, [0, 1], [[1, 0], [0, 1]], r"`y_true` must be one-hot, .* Sparse"),
        (TopKCategoricalAccuracy, 1, 1, "`y_true` must be one-hot"),
        (SparseTopKCategoricalAccuracy, [0, 1], [[1, 0]], "last dimension of classes"),
        (lambda: ConfusionMatrix(3), [0, 3], [0, 1], "`y_true` must hold class numbers from 0 to 2, got 3"),
        (lambda: ConfusionMatrix(3), [0, 1], [0.5, 1], "`y_pred` must hold class numbers from 0 to 2, got 0.5"),
        (lambda: ConfusionMatrix(3), [0, 1], [np.nan, 1], "`y_pred` must hold class numbers from 0 to 2, got nan"),
    ],
)
def test_inputs_that_do_not_fit(metric: Callable[[], Metric], labels: Any, predictions: Any, message: str) -> None:
    made = metric()
    with pytest.raises(ValueError, match=message):
        made.update_state(labels, predictions)
    assert not np.any(made.result())


@pytest.mark.parametrize("k", [0, -1, 1.5, True, None])
def test_numbers_that_do_not_fit(k: Any) -> None:
    for make in (TopKCategoricalAccuracy, SparseTopKCategoricalAccuracy, ConfusionMatrix):
        with pytest.raises(ValueError, match=f"must be an integer of at least 1, got {k}"):
            make(k)


@pytest.mark.parametrize("threshold", [0, 1, -0.5])
def test_a_threshold_that_does_not_fit(threshold: float) -> None:
    with pytest.raises(ValueError, match="`threshold` must be a number between 0 and 1"):
        BinaryAccuracy(threshold=threshold)


def test_crossentropies_by_hand_and_by_scikit_learn() -> None:
    rng = np.random.default_rng(0)
    classes, scores, weights = rng.integers(0, 4, 30), rng.random((30, 4)), rng.random(30)
    chances = scores / scores.sum(1, keepdims=True)
    expected = sklearn_metrics.log_loss(classes, chances, sample_weight=weights)
    one_hot, logits = np.eye(4)[classes], np.log(chances) + 3
    assert SparseCategoricalCrossentropy()(classes, scores, weights) == pytest.approx(expected)
    assert SparseCategoricalCrossentropy()(classes[:, None], scores, sample_weight=weights) == pytest.approx(expected)
    assert SparseCategoricalCrossentropy(axis=0)(classes, scores.T, weights) == pytest.approx(expected)
    assert SparseCategoricalCrossentropy(from_logits=True)(classes, 1000 + logits, weights) == pytest.approx(expected)
    assert CategoricalCrossentropy()(one_hot, scores, weights) == pytest.approx(expected)
    assert CategoricalCrossentropy(from_logits=True)(one_hot, logits, weights) == pytest.approx(expected)
    # Those that are ignored count neither above nor below; their number need not be a class.
    void = np.where(classes == 1, 255, classes)
    kept = classes != 1
    for own in (weights, None):
        ignoring = SparseCategoricalCrossentropy(ignore_class=255)(void, scores, sample_weight=own)
        rest = -np.log(chances[np.arange(30), classes])[kept]
        assert ignoring == pytest.approx(np.average(rest, weights=None if own is None else own[kept]))
    with pytest.raises(ValueError, match=r"`y_true` must hold class numbers from 0 to 3, got 255\. .* `ignore_class`"):
        SparseCategoricalCrossentropy().update_state(void, scores)
    labels, single = rng.integers(0, 2, 30), scores[:, 0]
    expected = sklearn_metrics.log_loss(labels, single, sample_weight=weights)
    assert BinaryCrossentropy()(labels, single, weights) == pytest.approx(expected)
    logits = np.log(single / (1 - single))
    assert BinaryCrossentropy(from_logits=True)(labels[:, None], logits, weights) == pytest.approx(expected)
    assert BinaryCrossentropy()([0, 1], [1.0, 0.0]) == pytest.approx(-np.log(1e-7))
    assert BinaryCrossentropy(from_logits=True)([1, 0], [-1e9, 0.0]) == pytest.approx(5e8)
    assert BinaryCrossentropy()([], []) == SparseCategoricalCrossentropy()([], np.zeros((0, 3))) == 0
    for wrong, text in (
        (lambda: BinaryCrossentropy(label_smoothing=2), "`label_smoothing` must be between 0 and 1"),
        (lambda: CategoricalCrossentropy()(classes, scores), "Use SparseCategoricalCrossentropy for class numbers"),
        (lambda: CategoricalCrossentropy(axis=3)(one_hot, scores), "`y_true` must have a dimension 3 of classes"),
    ):
        with pytest.raises(ValueError, match=text):
            wrong()


def test_intersection_over_union_by_scikit_learn() -> None:
    rng = np.random.default_rng(0)
    labels, predicted, weights = rng.integers(0, 3, (8, 5)), rng.integers(0, 3, (8, 5)), rng.random(8)
    spread = np.repeat(weights, 5)
    expected = sklearn_metrics.jaccard_score(labels.ravel(), predicted.ravel(), average="macro", sample_weight=spread)
    assert MeanIoU(3)(labels, predicted, weights) == pytest.approx(expected)
    # A class that never occurs does not count.
    assert MeanIoU(4)(labels, predicted, weights) == pytest.approx(expected)
    assert MeanIoU(3, sparse_y_pred=False)(labels, np.eye(3)[predicted], weights) == pytest.approx(expected)
    assert MeanIoU(3, sparse_y_true=False, sparse_y_pred=False, axis=1)(
        np.moveaxis(np.eye(3)[labels], -1, 1), np.moveaxis(np.eye(3)[predicted], -1, 1), weights
    ) == pytest.approx(expected)
    void = np.where(labels == 1, -1, labels)
    kept = labels != 1
    assert MeanIoU(3, ignore_class=-1)(void, predicted) == pytest.approx(MeanIoU(3)(labels[kept], predicted[kept]))
    assert MeanIoU(2)([0, 0, 1, 1], [0, 1, 0, 1], [0.3, 0.3, 0.3, 0.1]) == pytest.approx(0.23809525)
    assert MeanIoU(2).result() == 0
    with pytest.raises(ValueError, match="`y_true` must hold class numbers from 0 to 2, got -1"):
        MeanIoU(3).update_state(void, predicted)


def test_f1_score_by_scikit_learn() -> None:
    rng = np.random.default_rng(0)
    labels, scores, weights = rng.integers(0, 2, (30, 3)), rng.random((30, 3)), rng.random(30)
    for average in (None, "micro", "macro", "weighted"):
        expected = sklearn_metrics.f1_score(labels, scores > 0.3, average=average, sample_weight=weights)
        np.testing.assert_allclose(F1Score(average, 0.3, num_classes=3)(labels, scores, weights), expected)
    single = np.eye(3)[scores.argmax(1)]
    expected = sklearn_metrics.f1_score(labels, single, average="macro")
    assert F1Score("macro", num_classes=3)(labels, scores) == pytest.approx(expected)
    assert F1Score("micro")(labels, scores) == pytest.approx(sklearn_metrics.f1_score(labels, single, average="micro"))
    assert F1Score(num_classes=2)([[1, 0]], [[0.0, 0.0]]).tolist() == [0, 0]
    for wrong, text in (
        (lambda: F1Score("sum"), "`average` must be None or one of micro, macro, weighted"),  # type: ignore[arg-type]
        (lambda: F1Score("micro", 0.0), "`threshold` must be above 0 and at most 1"),
        (F1Score, "needs `num_classes`, got None: its sums are made before the first batch"),
        (lambda: F1Score(num_classes=3)(labels[:, 0], scores), r"must have the shape \(batch, 3\), got y_true \(30,\)"),
        (lambda: F1Score(num_classes=4)(labels, scores), r"must have the shape \(batch, 4\)"),
    ):
        with pytest.raises(ValueError, match=text):
            wrong()


def test_a_metric_that_is_called_adds_the_batch_and_gives_the_result() -> None:
    metric = SparseCategoricalAccuracy()
    assert metric([0, 1], [[2.0, 1.0], [0.0, 1.0]]) == 1.0
    assert metric([0, 0], y_pred=[[0.0, 1.0], [0.0, 1.0]], sample_weight=[1.0, 0.0]) == pytest.approx(2 / 3)
    assert metric.result() == pytest.approx(2 / 3)
