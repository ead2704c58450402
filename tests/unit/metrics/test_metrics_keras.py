"""Metrics on one rank: batch by batch the same as those of Keras 3, with and without weights."""

from __future__ import annotations

import importlib
import inspect
import os
from typing import Any

import numpy as np
import pytest

from mpidist import metrics
from tests.metrics import CLASSES, FAMILIES, Family

pytest.importorskip("torch", reason="Keras is run on PyTorch")
os.environ["KERAS_BACKEND"] = "torch"
keras: Any = importlib.import_module("keras")

# Keras's own: its variables know the first form of NumPy's protocol.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")

BATCHES, SIZE = 5, 16


def compare(family: Family, options: dict[str, Any], batches: list[tuple[Any, ...]]) -> None:
    """Give both the same batches, and compare the results after each of them and after a reset."""
    metric = family.make(options)
    given = {key: value for key, value in options.items() if key not in ("num_labels", *family.not_in_keras)}
    reference = getattr(keras.metrics, family.name)(**given)
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


CASES = [(family, arguments, kind) for family in FAMILIES for arguments, kind in family.keras]


@pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"])
@pytest.mark.parametrize(("family", "options", "kind"), CASES, ids=[f"{f.name} {o} {k}" for f, o, k in CASES])
def test_every_metric(family: Family, options: dict[str, Any], kind: str, weighted: bool) -> None:
    if family.name in ("Precision", "Recall") and weighted and "class_id" not in options and kind != "binary":
        # Of arrays with classes Keras wants weights that broadcast.
        batches = [(*values, weights[:, None]) for *values, weights in batches_of(kind, weighted)]
    else:
        batches = batches_of(kind, weighted)
    compare(family, options, batches)


@pytest.mark.parametrize("family", [one for one in FAMILIES if one.keras], ids=lambda family: family.name)
def test_arguments_and_defaults(family: Family) -> None:
    own = inspect.signature(getattr(metrics, family.name)).parameters
    reference = inspect.signature(getattr(keras.metrics, family.name).__init__).parameters
    # New in Keras 3, and not in tf.keras.
    names = [key for key in reference if key not in ("self", "from_sorted_ids")]
    assert list(own) == [*names, *family.not_in_keras]
    for key in names:
        # Keras names what has no name after its class, and numbers it.
        if key != "name" or reference[key].default is not None:
            assert own[key].default == reference[key].default, key
