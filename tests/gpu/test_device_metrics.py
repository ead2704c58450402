"""Metrics of arrays on a GPU: the results of host memory, with sums made where the arrays lie."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpidist import metrics
from mpidist.strategy.losses import compute_average_loss
from tests.metrics import OVER_RANKS, WEIGHTS

pytestmark = [pytest.mark.gpu, pytest.mark.mpi]


@pytest.mark.parametrize("weights", [None, WEIGHTS, WEIGHTS[:, None], 2.0], ids=["none", "each", "column", "number"])
@pytest.mark.parametrize("name", OVER_RANKS)
def test_a_metric_is_that_of_host_memory(
    cupy: Any, monkeypatch: pytest.MonkeyPatch, is_simulated: bool, name: str, weights: Any
) -> None:
    make, values = OVER_RANKS[name]
    on_host, on_gpu = make(), make()
    fetched: list[int] = []
    get = cupy.ndarray.get

    def counting_get(self: Any, *arguments: Any, **options: Any) -> Any:
        fetched.append(self.size)
        return get(self, *arguments, **options)

    monkeypatch.setattr(cupy.ndarray, "get", counting_get)
    for part in (slice(0, 20), slice(20, 20), slice(20, None)):
        given = weights[part] if isinstance(weights, np.ndarray) else weights
        on_host.update_state(*(value[part] for value in values), sample_weight=given)
        moved = cupy.asarray(given) if isinstance(given, np.ndarray) else given
        on_gpu.update_state(*(cupy.asarray(value[part]) for value in values), sample_weight=moved)
    np.testing.assert_allclose(on_gpu.result(), on_host.result(), rtol=1e-12 if is_simulated else 1e-9)
    assert type(on_gpu.sums.component) is np.ndarray
    assert fetched
    # Counts above one more than each threshold.
    assert all(size <= on_gpu.sums.size + 1 for size in fetched)


def test_what_lies_in_host_memory_goes_to_the_gpu_of_the_rest(cupy: Any) -> None:
    labels, scores = np.array([0, 1, 1]), np.array([[2.0, 1.0], [0.0, 1.0], [3.0, 1.0]])
    accuracy = metrics.SparseCategoricalAccuracy()
    accuracy.update_state(labels.tolist(), cupy.asarray(scores), sample_weight=np.array([1.0, 1.0, 2.0]))
    accuracy.update_state(cupy.asarray(labels), scores)
    assert accuracy.result() == pytest.approx((2 + 2) / (4 + 3))


def test_what_does_not_fit_is_refused_as_in_host_memory(cupy: Any) -> None:
    with pytest.raises(ValueError, match=r"probabilities in \[0, 1\], got 1\.5"):
        metrics.AUC().update_state(cupy.asarray([0, 1]), cupy.asarray([0.5, 1.5]))
    with pytest.raises(ValueError, match="class numbers from 0 to 1, got 2"):
        metrics.ConfusionMatrix(2).update_state(cupy.asarray([0, 2]), cupy.asarray([0, 1]))
    with pytest.raises(ValueError, match="must have the shape"):
        metrics.MeanSquaredError().update_state(cupy.zeros(3), cupy.zeros(4))


def test_the_average_loss_stays_on_the_gpu(cupy: Any) -> None:
    losses = np.array([1.0, 2.0, 6.0], np.float32)
    loss = compute_average_loss(cupy.asarray(losses), np.array([1.0, 0.5, 0.5]), 4)
    assert isinstance(loss, cupy.ndarray)
    assert loss.dtype == np.float32
    assert float(loss) == float(compute_average_loss(losses, np.array([1.0, 0.5, 0.5]), 4))
