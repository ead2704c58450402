"""The table of all metrics, from which the tests of families draw: a new metric is one row of it.

`Family(name="New", over_ranks={"New": ({}, "binary")})` is enough for a metric that no other library has: it is tested
over ranks, saved and restored, and of arrays on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpidist import metrics
from mpidist.arrays import AnyArray
from mpidist.metrics import Metric

Arguments = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Family:
    """One metric.

    Attributes:
        name: Its name in `mpidist.metrics`.
        over_ranks: Names of arguments, each with the kind of its values; see `VALUES`.
        keras: Arguments for which it does what Keras's of the same name does, and the kind of the values.
        not_in_keras: Arguments that Keras does not have.
        examples: Those of the docstrings of tf.keras, and others by hand: arguments, `y_true`, `y_pred`, weights and
            the result.
    """

    name: str
    over_ranks: Mapping[str, tuple[Arguments, str]]
    keras: Sequence[tuple[Arguments, str]] = ()
    not_in_keras: Sequence[str] = ()
    examples: Sequence[tuple[Arguments, Any, Any, Any, float]] = ()

    def make(self, arguments: Arguments) -> Metric:
        """The metric."""
        made: Metric = getattr(metrics, self.name)(**arguments)
        return made


# Of the classes of Keras's comparison.
CLASSES = 6
COUNT = 53
_generator = np.random.default_rng(7)
_CLASSES = _generator.integers(0, 4, COUNT)
_SCORES = _generator.normal(size=(COUNT, 4))
_BINARY = _generator.integers(0, 2, COUNT)
_CHANCES = np.clip(0.3 * _BINARY + 0.7 * _generator.random(COUNT), 0, 1)
WEIGHTS = _generator.random(COUNT)
_ONE_HOT = np.eye(4)[_CLASSES]
# Of 4 classes.
VALUES: dict[str, tuple[AnyArray, ...]] = {
    "values": (_CHANCES,),
    "equal": (_CLASSES, _SCORES.argmax(1)),
    "binary": (_BINARY, _CHANCES),
    "one-hot": (_ONE_HOT, _SCORES),
    "classes": (_CLASSES, _SCORES),
    "probabilities": (_ONE_HOT, np.exp(_SCORES) / np.exp(_SCORES).sum(1, keepdims=True)),
}

_FEW = ([[0, 0, 1], [0, 1, 0]], [[0.1, 0.9, 0.8], [0.05, 0.95, 0]])
_SQUARE = ([[0, 1], [0, 0]], [[1, 1], [0, 0]])
_OF_POSITIVES: Sequence[tuple[Arguments, str]] = (
    ({}, "binary"), ({}, "columns"), ({"thresholds": 0.3}, "binary"), ({"thresholds": [0, 0.8, 0.2]}, "labels"),
    ({"top_k": 2}, "one-hot"), ({"top_k": 3}, "logits"), ({"top_k": 2, "thresholds": [0.4, 0.9]}, "labels"),
    ({"class_id": 1}, "labels"), ({"class_id": 4, "top_k": 3}, "logits"),
    ({"class_id": 2, "thresholds": [0.2, 0.6]}, "one-hot"),
)
_LABELS: Arguments = {"multi_label": True, "num_labels": CLASSES}
_LABEL_WEIGHTS: Arguments = {"label_weights": [0.5, 0, 2, 1, 1, 3]}
_IOU: Arguments = {"num_classes": CLASSES, "dtype": "float32"}

FAMILIES = (
    Family(name="Mean", over_ranks={"Mean": ({}, "values")}, keras=[({}, "values")]),
    Family(name="Sum", over_ranks={"Sum": ({}, "values")}, keras=[({}, "values")]),
    Family(
        name="MeanSquaredError",
        over_ranks={"MeanSquaredError": ({}, "binary")},
        keras=[({}, "numbers"), ({}, "labels")],
        examples=[
            ({}, *_SQUARE, None, 0.25), ({}, *_SQUARE, [1, 0], 0.5), ({}, [1.0, 2.0], [[1.0], [3.0]], None, 0.5),
        ],
    ),
    Family(
        name="RootMeanSquaredError",
        over_ranks={"RootMeanSquaredError": ({}, "binary")},
        keras=[({}, "numbers"), ({}, "labels")],
        examples=[({}, *_SQUARE, None, 0.5), ({}, *_SQUARE, [1, 0], 0.70710677)],
    ),
    Family(
        name="MeanAbsoluteError",
        over_ranks={"MeanAbsoluteError": ({}, "binary")},
        keras=[({}, "labels")],
        examples=[
            ({}, *_SQUARE, None, 0.25), ({}, np.array([0, 255], "uint8"), np.array([255, 0], "uint8"), None, 255),
        ],
    ),
    Family(
        name="Accuracy",
        over_ranks={"Accuracy": ({}, "equal")},
        keras=[({}, "equal")],
        examples=[
            ({}, [[1], [2], [3], [4]], [[0], [2], [3], [4]], None, 0.75),
            ({}, [[1], [2], [3], [4]], [[0], [2], [3], [4]], [1, 1, 0, 0], 0.5),
        ],
    ),
    Family(
        name="BinaryAccuracy",
        over_ranks={"BinaryAccuracy": ({}, "binary")},
        keras=[({}, "binary"), ({"threshold": 0.3}, "columns"), ({}, "labels")],
        examples=[
            ({}, [[1], [1], [0], [0]], [[0.98], [1], [0], [0.6]], None, 0.75),
            ({}, [[1], [1], [0], [0]], [[0.98], [1], [0], [0.6]], [1, 0, 0, 1], 0.5),
        ],
    ),
    Family(
        name="CategoricalAccuracy",
        over_ranks={"CategoricalAccuracy": ({}, "one-hot")},
        keras=[({}, "one-hot")],
        examples=[({}, *_FEW, None, 0.5), ({}, *_FEW, [0.7, 0.3], 0.3)],
    ),
    Family(
        name="SparseCategoricalAccuracy",
        over_ranks={"SparseCategoricalAccuracy": ({}, "classes")},
        keras=[({}, "classes")],
    ),
    Family(
        name="TopKCategoricalAccuracy",
        over_ranks={"TopKCategoricalAccuracy": ({"k": 2}, "one-hot")},
        keras=[({}, "one-hot"), ({"k": 2}, "one-hot")],
        examples=[({"k": 1}, *_FEW, None, 0.5)],
    ),
    Family(
        name="SparseTopKCategoricalAccuracy",
        over_ranks={"SparseTopKCategoricalAccuracy": ({"k": 2}, "classes")},
        keras=[({}, "classes"), ({"k": 3}, "classes")],
        examples=[({"k": 1}, [2, 1], _FEW[1], [0.7, 0.3], 0.3), ({"k": 2}, [[2], [1]], _FEW[1], None, 1.0)],
    ),
    Family(
        name="BinaryCrossentropy",
        over_ranks={"BinaryCrossentropy": ({}, "binary")},
        keras=[
            ({"from_logits": kind == "logits", **options}, kind)
            for kind in ("columns", "labels", "logits") for options in ({}, {"label_smoothing": 0.2})
        ],
    ),
    Family(
        name="CategoricalCrossentropy",
        over_ranks={"CategoricalCrossentropy": ({"from_logits": True}, "one-hot")},
        keras=[
            *(({"from_logits": logits, **options}, "one-hot")
              for logits in (False, True) for options in ({}, {"label_smoothing": 0.2})),
            ({"from_logits": True}, "logits"),
            ({"axis": 1}, "maps"),
        ],
    ),
    Family(
        name="SparseCategoricalCrossentropy",
        over_ranks={"SparseCategoricalCrossentropy": ({"from_logits": True, "ignore_class": 3}, "classes")},
        keras=[({}, "classes"), ({"from_logits": True}, "classes")],
    ),
    Family(
        name="MeanIoU",
        over_ranks={"MeanIoU": ({"num_classes": 4}, "equal")},
        keras=[
            (_IOU, "equal"),
            ({"num_classes": CLASSES + 2, "dtype": "float32", "ignore_class": 2}, "equal"),
            ({**_IOU, "sparse_y_pred": False}, "classes"),
            ({**_IOU, "sparse_y_true": False, "sparse_y_pred": False}, "one-hot"),
        ],
    ),
    Family(
        name="F1Score",
        over_ranks={"F1Score": ({"num_classes": 4}, "one-hot")},
        keras=[
            ({"average": average, "num_classes": CLASSES, **options}, kind)
            for average in (None, "micro", "macro", "weighted")
            for options, kind in (({}, "one-hot"), ({"threshold": 0.4}, "labels"), ({}, "labels"))
        ],
        not_in_keras=["num_classes"],
    ),
    Family(name="ConfusionMatrix", over_ranks={"ConfusionMatrix": ({"num_classes": 4}, "classes")}),
    Family(
        name="Precision",
        over_ranks={
            "Precision": ({"thresholds": [0.3, 0.6]}, "binary"),
            "Precision of a class": ({"top_k": 2, "class_id": 1}, "one-hot"),
        },
        keras=_OF_POSITIVES,
    ),
    Family(name="Recall", over_ranks={"Recall": ({}, "binary")}, keras=_OF_POSITIVES),
    Family(
        name="AUC",
        over_ranks={
            "AUC": ({}, "binary"),
            "AUC, PR": ({"num_thresholds": 50, "curve": "PR"}, "binary"),
            "AUC of labels": ({"multi_label": True, "num_labels": 4}, "probabilities"),
        },
        keras=[
            ({"curve": curve, "summation_method": method, **options}, kind)
            for curve in ("ROC", "PR")
            for method in ("interpolation", "minoring", "majoring")
            for options, kind in (
                ({}, "binary"), ({"num_thresholds": 20}, "labels"), ({"thresholds": [0.7, 0.1, 0.45]}, "binary"),
                ({"from_logits": True}, "logits"), (_LABELS, "labels"), ({**_LABELS, **_LABEL_WEIGHTS}, "labels"),
                (_LABEL_WEIGHTS, "labels"),
            )
        ],
    ),
)


def _maker(family: Family, arguments: Arguments) -> Callable[[], Metric]:
    return lambda: family.make(arguments)


OVER_RANKS: dict[str, tuple[Callable[[], Metric], tuple[AnyArray, ...]]] = {
    name: (_maker(family, arguments), VALUES[kind])
    for family in FAMILIES for name, (arguments, kind) in family.over_ranks.items()
}
