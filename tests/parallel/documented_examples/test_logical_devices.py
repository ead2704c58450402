"""The documents' blocks with `TPUStrategy`: replicas of several ranks, and the lines that make one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist.arrays import AnyArray
from mpidist.comm.group.communicator import Communicator

pytestmark = pytest.mark.mpi


def test_a_tensor_is_assigned_to_a_logical_device(communicator: Communicator) -> None:
    # The comment says "2 logical devices and 4 replicas", which are 8 ranks.
    cores = 2 if communicator.size % 2 == 0 else 1
    replicas = communicator.size // cores
    resolver = mpidist.cluster_resolver.TPUClusterResolver(tpu="")
    topology = mpidist.tpu.experimental.initialize_tpu_system(resolver)
    device_assignment = mpidist.tpu.experimental.DeviceAssignment.build(
        topology, computation_shape=[1, 1, 1, cores], num_replicas=replicas
    )
    with mpidist.TPUStrategy(resolver, experimental_device_assignment=device_assignment) as strategy:
        dataset = mpidist.data.Dataset.range(4 * replicas).batch(2 * replicas)
        inputs = strategy.experimental_distribute_dataset(dataset)
        iterator = iter(inputs)
        seen: list[AnyArray] = []

        def step_fn(inputs: AnyArray) -> Any:
            seen.append(inputs)
            output = np.add(inputs, inputs)

            # Add operation will be executed on logical device 0.
            output = strategy.experimental_assign_to_logical_device(output, 0)
            return output  # noqa: RET504  # as the document has it

        output = strategy.run(step_fn, args=(next(iterator),))
        assert output.tolist() == (seen[0] + seen[0]).tolist()
        assert strategy.num_replicas_in_sync == replicas
        assert strategy.gather(output, axis=0).tolist() == [2 * number for number in range(2 * replicas)]
        # "The logical device id presented is not consistent with total number of partitions specified by the device
        # assignment."
        with pytest.raises(ValueError, match="the logical devices of a replica"):
            strategy.experimental_assign_to_logical_device(output, cores)


def test_tpu_strategy(communicator: Communicator) -> None:
    tpu_address = "grpc://10.240.1.2:8470"
    cluster_resolver = mpidist.cluster_resolver.TPUClusterResolver(tpu=tpu_address)
    mpidist.tpu.experimental.initialize_tpu_system(cluster_resolver)
    for kind in (mpidist.experimental.TPUStrategy, mpidist.TPUStrategy):
        with kind(cluster_resolver) as tpu_strategy:
            assert tpu_strategy.num_replicas_in_sync == communicator.size
            # "there is a ClusterResolver associated with the strategy used, and such an instance is returned".
            assert tpu_strategy.cluster_resolver is cluster_resolver


def test_values_of_replicas_of_a_tpu_strategy(communicator: Communicator) -> None:
    with mpidist.TPUStrategy() as strategy:
        worker_devices = strategy.extended.worker_devices
        multiple_values = []
        for i in range(strategy.num_replicas_in_sync):
            multiple_values.append(np.float32(1.0 + i))

        def value_fn(ctx: mpidist.experimental.ValueContext) -> Any:
            return multiple_values[ctx.replica_id_in_sync_group]

        distributed_values = strategy.experimental_distribute_values_from_function(value_fn)
        assert distributed_values == 1.0 + communicator.rank
        assert len(worker_devices) == 1
