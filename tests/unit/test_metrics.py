"""Metrics on one rank: their arithmetic, and inputs that do not fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpidist.metrics import Mean, SparseCategoricalAccuracy


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
    assert result == pytest.approx(expected, rel=1e-3)
    mean.reset_state()
    assert mean.result() == 0
    assert [v.name for v in mean.variables] == ["loss/sums"]


@pytest.mark.parametrize("weights", [[1.0], [1.0, 2.0, 3.0], [[1.0], [2.0]]])
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
    with pytest.raises(TypeError, match="a mean takes one array of values, got 2"):
        Mean().update_state([1.0], [2.0])
    with pytest.raises(TypeError, match=r"an accuracy takes \(y_true, y_pred\), got 1"):
        SparseCategoricalAccuracy().update_state([1])
    assert "'mean'" in repr(Mean())
