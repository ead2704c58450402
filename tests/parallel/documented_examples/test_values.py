"""`Strategy.experimental_distribute_values_from_function`: the examples of its reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist.experimental import ValueContext

pytestmark = pytest.mark.mpi


def test_constant_per_replica(devices: list[str]) -> None:
    strategy = mpidist.MirroredStrategy(devices)

    def value_fn(ctx: ValueContext) -> Any:
        return np.float32(1.0)

    distributed_values = strategy.experimental_distribute_values_from_function(value_fn)
    local_result = strategy.experimental_local_results(distributed_values)
    # Printed: (1.0, 1.0), one entry for each of the two replicas; a rank has its own.
    assert len(local_result) == 1
    assert local_result[0].dtype == np.float32
    assert local_result[0] == 1.0


def test_values_of_an_array_by_replica_id(devices: list[str]) -> None:
    strategy = mpidist.MirroredStrategy(devices)
    array_value = np.array([3.0, 2.0, 1.0, 0.0])

    def value_fn(ctx: ValueContext) -> Any:
        return array_value[ctx.replica_id_in_sync_group]

    distributed_values = strategy.experimental_distribute_values_from_function(value_fn)
    local_result = strategy.experimental_local_results(distributed_values)
    of_all_replicas = strategy.gather(np.array(local_result), axis=0)
    assert tuple(of_all_replicas) == (3.0, 2.0, 1.0, 0.0)[: strategy.num_replicas_in_sync]
    if strategy.num_replicas_in_sync == 2:
        assert tuple(of_all_replicas) == (3.0, 2.0)  # as printed


def test_values_of_the_number_of_replicas(devices: list[str]) -> None:
    strategy = mpidist.MirroredStrategy(devices)

    def value_fn(ctx: ValueContext) -> int:
        return ctx.num_replicas_in_sync

    distributed_values = strategy.experimental_distribute_values_from_function(value_fn)
    local_result = strategy.experimental_local_results(distributed_values)
    # Printed: (2, 2) for two replicas.
    assert local_result == (len(devices),)


def test_values_made_beforehand_for_each_device(devices: list[str]) -> None:
    strategy = mpidist.MirroredStrategy(devices)
    worker_devices = strategy.extended.worker_devices
    # One rank is one replica with one device, in host memory: no `tf.device` to choose one of them.
    assert worker_devices == (str(strategy.device),)
    multiple_values = []
    for i in range(strategy.num_replicas_in_sync):
        multiple_values.append(np.float32(1.0 + i))

    def value_fn(ctx: ValueContext) -> Any:
        return multiple_values[ctx.replica_id_in_sync_group]

    distributed_values = strategy.experimental_distribute_values_from_function(value_fn)
    (own,) = strategy.experimental_local_results(distributed_values)
    assert own.dtype == np.float32
    of_all_replicas = strategy.gather(np.array([own]), axis=0)
    assert of_all_replicas.tolist() == [1.0 + i for i in range(strategy.num_replicas_in_sync)]
