"""Metrics on one rank: batch by batch the same as those of Keras 3, with and without weights."""

from __future__ import annotations

import importlib
import inspect
import os
from typing import Any

import numpy as np
import pytest

from mpidist import metrics

pytest.importorskip("torch", reason="Keras is run on PyTorch")
os.environ["KERAS_BACKEND"] = "torch"
keras: Any = importlib.import_module("keras")

# Keras's own: its variables know the first form of NumPy's protocol.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")

# Arguments that Keras does not have.
OWN = {"F1Score": ["num_classes"]}
BATCHES, SIZE, CLASSES = 5, 16, 6


def compare(name: str, options: dict[str, Any], batches: list[tuple[Any, ...]]) -> None:
    """Give both the same batches, and compare the results after each of them and after a reset."""
    metric = getattr(metrics, name)(**options)
    given = {key: value for key, value in options.items() if key not in ("num_labels", *OWN.get(name, ()))}
    reference = getattr(keras.metrics, name)(**given)
    for _ in range(2):
        for *values, weights in batches:
            metric.update_state(*values, sample_weight=weights)
            reference.update_state(*values, sample_weight=weights)
            np.testing.assert_allclose(metric.result(), to_numpy(reference.result()), rtol=2e-5, atol=1e-6)
        metric.reset_state()
        reference.reset_state()
        np.testing.assert_array_equal(metric.result(), to_numpy(reference.result()))


def to_numpy(result: Any) -> Any:
    return np.array([keras.ops.convert_to_numpy(part) for part in result]) if isinstance(result, list) else (
        keras.ops.convert_to_numpy(result)
    )


def batches_of(kind: str, weighted: bool) -> list[tuple[Any, ...]]:
    """(y_true, y_pred, weights) or (values, weights); one weight for each example."""
    generator = np.random.default_rng(7)
    result: list[tuple[Any, ...]] = []
    for _ in range(BATCHES):
        weights = generator.random(SIZE).astype(np.float32) if weighted else None
        classes = generator.integers(0, CLASSES, SIZE)
        scores = generator.random((SIZE, CLASSES)).astype(np.float32)
        labels = generator.integers(0, 2, (SIZE, CLASSES)).astype(np.float32)
        values = {
            "values": (generator.normal(size=(SIZE, 3)).astype(np.float32),),
            "numbers": tuple(generator.normal(size=(2, SIZE, 1)).astype(np.float32)),
            "equal": (classes, generator.integers(0, CLASSES, SIZE)),
            "binary": (labels[:, 0], scores[:, 0]),
            "columns": (labels[:, :1], scores[:, :1]),
            "labels": (labels, scores),
            "logits": (labels, 8 * scores - 4),
            "classes": (classes, scores),
            "maps": (
                np.stack([np.eye(CLASSES, dtype=np.float32)[classes]] * 2, -1), np.stack([scores, 1 - scores], -1)
            ),
            "one-hot": (np.eye(CLASSES, dtype=np.float32)[classes], scores),
        }[kind]
        result.append((*values, weights))
    return result


CASES: list[tuple[str, dict[str, Any], str]] = [
    ("Mean", {}, "values"),
    ("Sum", {}, "values"),
    ("MeanSquaredError", {}, "numbers"),
    ("MeanSquaredError", {}, "labels"),
    ("RootMeanSquaredError", {}, "numbers"),
    ("RootMeanSquaredError", {}, "labels"),
    ("MeanAbsoluteError", {}, "labels"),
    ("Accuracy", {}, "equal"),
    ("BinaryAccuracy", {}, "binary"),
    ("BinaryAccuracy", {"threshold": 0.3}, "columns"),
    ("BinaryAccuracy", {}, "labels"),
    ("CategoricalAccuracy", {}, "one-hot"),
    ("SparseCategoricalAccuracy", {}, "classes"),
    ("TopKCategoricalAccuracy", {}, "one-hot"),
    ("TopKCategoricalAccuracy", {"k": 2}, "one-hot"),
    ("SparseTopKCategoricalAccuracy", {}, "classes"),
    ("SparseTopKCategoricalAccuracy", {"k": 3}, "classes"),
    *[
        ("BinaryCrossentropy", {"from_logits": kind == "logits", **options}, kind)
        for kind in ("columns", "labels", "logits") for options in ({}, {"label_smoothing": 0.2})
    ],
    *[
        ("CategoricalCrossentropy", {"from_logits": logits, **options}, "one-hot")
        for logits in (False, True) for options in ({}, {"label_smoothing": 0.2})
    ],
    ("CategoricalCrossentropy", {"from_logits": True}, "logits"),
    ("CategoricalCrossentropy", {"axis": 1}, "maps"),
    ("SparseCategoricalCrossentropy", {}, "classes"),
    ("SparseCategoricalCrossentropy", {"from_logits": True}, "classes"),
    ("MeanIoU", {"num_classes": CLASSES, "dtype": "float32"}, "equal"),
    ("MeanIoU", {"num_classes": CLASSES + 2, "dtype": "float32", "ignore_class": 2}, "equal"),
    ("MeanIoU", {"num_classes": CLASSES, "dtype": "float32", "sparse_y_pred": False}, "classes"),
    (
        "MeanIoU",
        {"num_classes": CLASSES, "dtype": "float32", "sparse_y_true": False, "sparse_y_pred": False}, "one-hot",
    ),
    *[
        ("F1Score", {"average": average, "num_classes": CLASSES, **options}, kind)
        for average in (None, "micro", "macro", "weighted")
        for options, kind in (({}, "one-hot"), ({"threshold": 0.4}, "labels"), ({}, "labels"))
    ],
    *[
        (name, options, kind)
        for name in ("Precision", "Recall")
        for options, kind in (
            ({}, "binary"), ({}, "columns"), ({"thresholds": 0.3}, "binary"), ({"thresholds": [0, 0.8, 0.2]}, "labels"),
            ({"top_k": 2}, "one-hot"), ({"top_k": 3}, "logits"), ({"top_k": 2, "thresholds": [0.4, 0.9]}, "labels"),
            ({"class_id": 1}, "labels"), ({"class_id": 4, "top_k": 3}, "logits"),
            ({"class_id": 2, "thresholds": [0.2, 0.6]}, "one-hot"),
        )
    ],
    *[
        ("AUC", {"curve": curve, "summation_method": method, **options}, kind)
        for curve in ("ROC", "PR")
        for method in ("interpolation", "minoring", "majoring")
        for options, kind in (
            ({}, "binary"), ({"num_thresholds": 20}, "labels"), ({"thresholds": [0.7, 0.1, 0.45]}, "binary"),
            ({"from_logits": True}, "logits"), ({"multi_label": True, "num_labels": CLASSES}, "labels"),
            ({"multi_label": True, "num_labels": CLASSES, "label_weights": [0.5, 0, 2, 1, 1, 3]}, "labels"),
            ({"label_weights": [0.5, 0, 2, 1, 1, 3]}, "labels"),
        )
    ],
]


@pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"])
@pytest.mark.parametrize(("name", "options", "kind"), CASES, ids=[f"{n} {o} {k}" for n, o, k in CASES])
def test_every_metric(name: str, options: dict[str, Any], kind: str, weighted: bool) -> None:
    if name in ("Precision", "Recall") and weighted and "class_id" not in options and kind != "binary":
        # Of arrays with classes Keras wants weights that broadcast.
        batches = [(*values, weights[:, None]) for *values, weights in batches_of(kind, weighted)]
    else:
        batches = batches_of(kind, weighted)
    compare(name, options, batches)


@pytest.mark.parametrize("name", sorted({name for name, _, _ in CASES}))
def test_arguments_and_defaults(name: str) -> None:
    own = inspect.signature(getattr(metrics, name)).parameters
    reference = inspect.signature(getattr(keras.metrics, name).__init__).parameters
    # New in Keras 3, and not in tf.keras.
    names = [key for key in reference if key not in ("self", "from_sorted_ids")]
    assert list(own) == [*names, *OWN.get(name, ())]
    for key in names:
        # Keras names what has no name after its class, and numbers it.
        if key != "name" or reference[key].default is not None:
            assert own[key].default == reference[key].default, key
