"""`Strategy.gather`: the examples of its reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mpidist

pytestmark = pytest.mark.mpi


def test_gather_of_a_column(devices: list[str]) -> None:
    strategy = mpidist.MirroredStrategy(devices)
    # A component of shape (2, 1) on each replica.
    distributed_values = strategy.experimental_distribute_values_from_function(
        lambda _: np.array([[1], [2]], np.int32)
    )

    def run() -> Any:
        return strategy.gather(distributed_values, axis=0)

    result = run()
    assert result.dtype == np.int32
    assert result.tolist() == [[1], [2]] * strategy.num_replicas_in_sync
    if strategy.num_replicas_in_sync == 2:
        assert result.tolist() == [[1], [2], [1], [2]]  # as printed


def test_gather_along_each_axis(devices: list[str]) -> None:
    strategy = mpidist.MirroredStrategy(devices)
    single_tensor = np.reshape(np.arange(6, dtype=np.int32), (1, 2, 3))
    distributed_values = strategy.experimental_distribute_values_from_function(lambda _: single_tensor.copy())

    def run(axis: int) -> Any:
        return strategy.gather(distributed_values, axis=axis)

    n = strategy.num_replicas_in_sync
    for axis in (0, 1, 2, -1):
        result = run(axis)
        assert result.dtype == np.int32
        assert np.array_equal(result, np.concatenate([single_tensor] * n, axis=axis))
    if n == 4:  # as printed
        assert run(0).tolist() == [[[0, 1, 2], [3, 4, 5]]] * 4
        assert run(1).tolist() == [[[0, 1, 2], [3, 4, 5]] * 4]
        assert run(2).tolist() == [[[0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2], [3, 4, 5, 3, 4, 5, 3, 4, 5, 3, 4, 5]]]


def test_gather_of_what_is_no_dense_tensor_with_dimensions(devices: list[str]) -> None:
    # "Dense tensors with non-zero rank, NOT a tf.IndexedSlices."
    strategy = mpidist.MirroredStrategy(devices)
    rows = mpidist.IndexedSlices(np.ones((1, 2)), np.array([0]), dense_shape=(3, 2))
    values: list[tuple[Any, type[Exception], str]] = [
        (np.float32(1.0), ValueError, "at least one dimension|axis"),
        (rows, NotImplementedError, "does not support IndexedSlices"),
    ]
    for value, error, text in values:
        with pytest.raises(error, match=text) as caught:
            strategy.gather(value, axis=0)
        assert len(set(strategy.gather_object(str(caught.value)))) == 1


def test_gather_has_a_counterpart_in_replica_context(devices: list[str]) -> None:
    strategy = mpidist.MirroredStrategy(devices)
    value = np.array([[1], [2]], np.int32)
    with pytest.raises(RuntimeError, match="all_gather"):
        strategy.run(lambda: strategy.gather(value, axis=0))

    def replica_fn() -> Any:
        return mpidist.get_replica_context().all_gather(value, axis=0)  # type: ignore[union-attr]

    assert np.array_equal(strategy.run(replica_fn), strategy.gather(value, axis=0))
