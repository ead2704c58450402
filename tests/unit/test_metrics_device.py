"""Metrics of CuPy arrays, simulated: the results of host memory, with sums made where the arrays lie."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from mpidist import metrics
from mpidist.strategy.values import compute_average_loss
from tests.parallel.metrics.test_families import CASES, WEIGHTS
from tests.simulated_cupy import simulated_cupy


@pytest.fixture
def xp() -> Iterator[Any]:
    with simulated_cupy() as module:
        yield module


@pytest.mark.parametrize("weights", [None, WEIGHTS, WEIGHTS[:, None], 2.0], ids=["none", "each", "column", "number"])
@pytest.mark.parametrize("name", CASES)
def test_a_result_is_that_of_host_memory(xp: Any, monkeypatch: pytest.MonkeyPatch, name: str, weights: Any) -> None:
    make, values = CASES[name]
    on_host, on_gpu = make(), make()
    fetched: list[int] = []
    get = xp.ndarray.get

    def counting_get(self: Any, out: Any = None) -> Any:
        fetched.append(self.size)
        return get(self, out)

    monkeypatch.setattr(xp.ndarray, "get", counting_get)
    for part in (slice(0, 20), slice(20, 20), slice(20, None)):
        given = weights[part] if isinstance(weights, np.ndarray) else weights
        on_host.update_state(*(value[part] for value in values), sample_weight=given)
        moved = xp.asarray(given) if isinstance(given, np.ndarray) else given
        on_gpu.update_state(*(xp.asarray(value[part]) for value in values), sample_weight=moved)
    np.testing.assert_allclose(on_gpu.result(), on_host.result(), rtol=1e-12)
    assert type(on_gpu.sums.component) is np.ndarray
    # Counts above one more than each threshold.
    assert all(size <= on_gpu.sums.size + 1 for size in fetched)


def test_what_lies_in_host_memory_goes_to_the_gpu_of_the_rest(xp: Any) -> None:
    labels, scores = np.array([0, 1, 1]), np.array([[2.0, 1.0], [0.0, 1.0], [3.0, 1.0]])
    accuracy = metrics.SparseCategoricalAccuracy()
    accuracy.update_state(labels.tolist(), xp.asarray(scores), sample_weight=np.array([1.0, 1.0, 2.0]))
    accuracy.update_state(xp.asarray(labels), scores)
    assert accuracy.result() == pytest.approx((2 + 2) / (4 + 3))


def test_what_does_not_fit_is_refused_as_in_host_memory(xp: Any) -> None:
    with pytest.raises(ValueError, match=r"probabilities in \[0, 1\], got 1\.5"):
        metrics.AUC().update_state(xp.asarray([0, 1]), xp.asarray([0.5, 1.5]))
    with pytest.raises(ValueError, match="class numbers from 0 to 1, got 2"):
        metrics.ConfusionMatrix(2).update_state(xp.asarray([0, 2]), xp.asarray([0, 1]))
    with pytest.raises(ValueError, match="must have the shape"):
        metrics.MeanSquaredError().update_state(xp.zeros(3), xp.zeros(4))


def test_the_average_loss_stays_on_the_gpu(xp: Any) -> None:
    losses = np.array([1.0, 2.0, 6.0], np.float32)
    loss = compute_average_loss(xp.asarray(losses), np.array([1.0, 0.5, 0.5]), 4)
    assert isinstance(loss, xp.ndarray)
    assert loss.dtype == np.float32
    assert float(loss) == float(compute_average_loss(losses, np.array([1.0, 0.5, 0.5]), 4))
