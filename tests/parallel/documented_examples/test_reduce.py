"""`Strategy.reduce`: the examples of its reference, and what its text says about `axis` and a partial batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist.comm.group.communicator import Communicator
from mpidist.errors import MismatchError

pytestmark = pytest.mark.mpi


def four_examples() -> Any:
    """Values for examples [0, 1, 2, 3] on replica 0, [4, 5, 6, 7] on replica 1, and so on."""
    i = mpidist.get_replica_context().replica_id_in_sync_group  # type: ignore[union-attr]
    return np.arange(4) + 4 * i


def test_sum_of_replica_ids(devices: list[str]) -> None:
    strategy = mpidist.MirroredStrategy(devices)

    def step_fn() -> Any:
        i = mpidist.get_replica_context().replica_id_in_sync_group  # type: ignore[union-attr]
        return np.int32(i)

    per_replica_result = strategy.run(step_fn)
    total = strategy.reduce("SUM", per_replica_result, axis=None)
    n = strategy.num_replicas_in_sync
    assert (total, total.shape, total.dtype) == (n * (n - 1) // 2, (), np.int32)
    if n == 2:
        assert total == 1  # as printed


def test_devices_of_what_is_reduced(devices: list[str], communicator: Communicator) -> None:
    strategy = mpidist.MirroredStrategy(devices=devices)

    def step_fn() -> Any:
        i = mpidist.get_replica_context().replica_id_in_sync_group  # type: ignore[union-attr]
        return np.int32(i)

    per_replica_result = strategy.run(step_fn)
    # The document asks component 0 and component 1 for their device: each rank has its own component.
    assert strategy.experimental_local_results(per_replica_result) == (communicator.rank,)
    assert str(strategy.device) == f"/device:CPU:{communicator.rank}"

    total = strategy.reduce("SUM", per_replica_result, axis=None)
    assert isinstance(total, np.generic)  # NumPy's: in host memory, on every rank


def test_without_axis_only_replicas_are_combined(devices: list[str]) -> None:
    strategy = mpidist.MirroredStrategy(devices=devices)
    per_replica_result = strategy.run(four_examples)
    n = strategy.num_replicas_in_sync

    result = strategy.reduce("sum", per_replica_result, axis=None)
    assert result.tolist() == [n * i + 4 * n * (n - 1) // 2 for i in range(4)]
    if n == 2:
        assert result.tolist() == [0 + 4, 1 + 5, 2 + 6, 3 + 7]  # as printed


def test_with_an_axis_the_batch_is_combined_too(devices: list[str]) -> None:
    strategy = mpidist.MirroredStrategy(devices=devices)
    per_replica_result = strategy.run(four_examples)
    n = strategy.num_replicas_in_sync

    result = strategy.reduce("sum", per_replica_result, axis=0)
    assert (result, result.shape) == (sum(range(4 * n)), ())
    if n == 2:
        assert result == 0 + 1 + 2 + 3 + 4 + 5 + 6 + 7  # as printed


@pytest.mark.mpi(min_size=2)
def test_partial_batch_needs_an_axis(devices: list[str], communicator: Communicator) -> None:
    strategy = mpidist.MirroredStrategy(devices=devices)
    n = strategy.num_replicas_in_sync
    # The document's own split: the last replica has two of the four examples that the others have.
    per_replica_result = strategy.run(four_examples)[: 2 if communicator.rank == n - 1 else 4]
    count = 4 * n - 2

    assert strategy.reduce("SUM", per_replica_result, axis=0) == sum(range(count))
    mean = strategy.reduce(mpidist.ReduceOp.MEAN, per_replica_result, axis=0)
    assert mean == sum(range(count)) / count
    # A mean of the replicas' means weighs the examples of the last replica twice.
    assert strategy.reduce("MEAN", per_replica_result.mean(), axis=None) > mean
    if n == 2:
        assert (mean, count) == (2.5, 6)
    with pytest.raises(MismatchError, match=r"\(2,\)"):
        strategy.reduce("SUM", per_replica_result, axis=None)
