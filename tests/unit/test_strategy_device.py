"""A strategy on a GPU, simulated: what it reduces, spreads and delivers stays there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from mpidist.data import Dataset
from mpidist.options import InputOptions
from mpidist.strategy.default import Variable
from mpidist.strategy.one_device import OneDeviceStrategy
from tests.simulated_cuda import simulated_gpus


@pytest.fixture
def xp() -> Iterator[Any]:
    with simulated_gpus() as module:
        yield module


@pytest.fixture
def strategy(xp: Any) -> OneDeviceStrategy:
    return OneDeviceStrategy("/gpu:2")


def test_variables_batches_and_results_are_on_the_gpu_that_was_named(strategy: OneDeviceStrategy, xp: Any) -> None:
    with strategy.scope():
        weights = Variable(np.ones((2, 3), np.float32))
    assert weights.device == "/device:GPU:2"
    dataset = Dataset.from_tensor_slices(np.arange(8.0, dtype=np.float32).reshape(4, 2)).batch(2)
    for batch in strategy.experimental_distribute_dataset(dataset):
        assert batch.device.id == 2
        assert isinstance(strategy.run(lambda x: x @ weights, args=(batch,)), xp.ndarray)
    (batch, _) = strategy.distribute_datasets_from_function(lambda _: dataset)
    assert isinstance(batch, xp.ndarray)
    options = InputOptions(experimental_fetch_to_device=False)
    assert all(type(batch) is np.ndarray for batch in strategy.experimental_distribute_dataset(dataset, options))


@pytest.mark.parametrize("rows", [3, 0])
@pytest.mark.parametrize("op", ["SUM", "MEAN", "MIN", "MAX", "PROD"])
def test_components_are_reduced_where_they_lie(strategy: OneDeviceStrategy, xp: Any, op: str, rows: int) -> None:
    values = np.arange(2.0 * rows, dtype=np.float32).reshape(rows, 2)
    for axis in (None, 0, (0, 1)):
        on_gpu = strategy.reduce(op, xp.asarray(values), axis=axis)
        assert isinstance(on_gpu, xp.ndarray)
        expected = OneDeviceStrategy("cpu:0").reduce(op, values, axis=axis)
        np.testing.assert_array_equal(on_gpu.get(), expected)
        assert on_gpu.dtype == expected.dtype


def test_a_value_is_spread_where_it_lies(strategy: OneDeviceStrategy, xp: Any) -> None:
    spread = strategy.extended.broadcast_to(xp.asarray([1.0, 2.0]))
    assert isinstance(spread, xp.ndarray)
    np.testing.assert_array_equal(spread.get(), [1, 2])


def test_logical_replicas_are_refused(strategy: OneDeviceStrategy, xp: Any) -> None:
    with pytest.raises(NotImplementedError, match=r"added up in host memory.*compute them in `run`"):
        strategy.gradients(lambda batch: batch.sum(0), xp.ones((4, 2)), logical_replicas=2)
