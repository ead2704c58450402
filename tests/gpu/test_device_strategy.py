"""A strategy on a GPU: what it reduces, spreads and delivers stays there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpidist.data import Dataset
from mpidist.options import InputOptions
from mpidist.strategy.default import Variable
from mpidist.strategy.one_device import OneDeviceStrategy

pytestmark = [pytest.mark.gpu, pytest.mark.mpi]


@pytest.fixture
def named(cupy: Any) -> int:
    """The number of a GPU that is not this rank's, where there are several."""
    return int((cupy.cuda.Device().id + 1) % cupy.cuda.runtime.getDeviceCount())


@pytest.fixture
def strategy(named: int) -> OneDeviceStrategy:
    return OneDeviceStrategy(f"/gpu:{named}")


def test_variables_batches_and_results_are_on_the_gpu_that_was_named(
    strategy: OneDeviceStrategy, cupy: Any, named: int
) -> None:
    with strategy.scope():
        weights = Variable(np.ones((2, 3), np.float32))
    assert weights.device == f"/device:GPU:{named}"
    dataset = Dataset.from_tensor_slices(np.arange(8.0, dtype=np.float32).reshape(4, 2)).batch(2)
    for batch in strategy.experimental_distribute_dataset(dataset):
        assert batch.device.id == named
        assert isinstance(strategy.run(lambda x: x @ weights, args=(batch,)), cupy.ndarray)
    (batch, _) = strategy.distribute_datasets_from_function(lambda _: dataset)
    assert isinstance(batch, cupy.ndarray)
    options = InputOptions(experimental_fetch_to_device=False)
    assert all(type(batch) is np.ndarray for batch in strategy.experimental_distribute_dataset(dataset, options))


@pytest.mark.parametrize("rows", [3, 0])
@pytest.mark.parametrize("op", ["SUM", "MEAN", "MIN", "MAX", "PROD"])
def test_components_are_reduced_where_they_lie(strategy: OneDeviceStrategy, cupy: Any, op: str, rows: int) -> None:
    values = np.arange(2.0 * rows, dtype=np.float32).reshape(rows, 2)
    for axis in (None, 0, (0, 1)):
        on_gpu = strategy.reduce(op, cupy.asarray(values), axis=axis)
        assert isinstance(on_gpu, cupy.ndarray)
        expected = OneDeviceStrategy("cpu:0").reduce(op, values, axis=axis)
        np.testing.assert_array_equal(on_gpu.get(), expected)
        assert on_gpu.dtype == expected.dtype


def test_a_value_is_spread_where_it_lies(strategy: OneDeviceStrategy, cupy: Any) -> None:
    spread = strategy.extended.broadcast_to(cupy.asarray([1.0, 2.0]))
    assert isinstance(spread, cupy.ndarray)
    np.testing.assert_array_equal(spread.get(), [1, 2])


def test_logical_replicas_are_refused(strategy: OneDeviceStrategy, cupy: Any) -> None:
    with pytest.raises(NotImplementedError, match=r"added up in host memory.*compute them in `run`"):
        strategy.gradients(lambda batch: batch.sum(0), cupy.ones((4, 2)), logical_replicas=2)
