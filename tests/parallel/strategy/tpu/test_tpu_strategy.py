"""A replica is a group of ranks: its groups, what combines replicas and what combines devices, and the input."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist.cluster_resolver import TPUClusterResolver
from mpidist.comm.group.communicator import Communicator
from mpidist.errors import MismatchError
from mpidist.experimental import CommunicationOptions
from mpidist.strategy.tpu.context import LogicalReplicaContext
from mpidist.tpu.experimental import DeviceAssignment, initialize_tpu_system
from tests.helpers.amounts import turns
from tests.parallel.layouts import LAYOUTS
from tests.parallel.strategy.tpu.making import devices_of, make_tpu, place

pytestmark = pytest.mark.mpi


def everywhere(communicator: Communicator, error: BaseException) -> str:
    """The text of an error, which is the same on all ranks."""
    texts = set(communicator.all_gather_object(str(error)))
    assert len(texts) == 1, texts
    return texts.pop()


def context() -> LogicalReplicaContext:
    made = mpidist.get_replica_context()
    assert isinstance(made, LogicalReplicaContext)
    return made


@pytest.mark.parametrize("layout", turns(LAYOUTS, 1, always=("node", "private", "each", "first")))
def test_replicas_are_combined_by_their_device_0(communicator: Communicator, layout: str) -> None:
    with make_tpu(communicator, layout) as strategy:
        replica, device = place(strategy)
        n, devices = strategy.num_replicas_in_sync, strategy.logical_devices.count
        assert (n * devices, communicator.rank) == (communicator.size, replica * devices + device)
        # What other devices have is not even looked at.
        value: Any = np.float64(replica + 1) if device == 0 else "nothing"
        assert strategy.reduce("SUM", value, axis=None) == n * (n + 1) / 2
        rows: Any = np.full((replica + 1, 2), replica) if device == 0 else None
        assert strategy.gather(rows, axis=0)[:, 0].tolist() == [r for r in range(n) for _ in range(r + 1)]
        assert strategy.reduce("MEAN", rows, axis=0).tolist() == [np.repeat(np.arange(n), np.arange(n) + 1).mean()] * 2
        assert strategy.gather_object((replica, device)) == [(one, 0) for one in range(n)]
        assert strategy.extended.broadcast_to(np.array(communicator.rank)) == 0
        assert strategy.extended.reduce_to("MAX", communicator.rank, "cpu:0") == (n - 1) * devices
        assert strategy.extended.should_checkpoint == (communicator.rank == 0)


def test_inside_run_the_same_devices_are_combined_and_the_devices_of_a_replica(communicator: Communicator) -> None:
    with make_tpu(communicator) as strategy:
        replica, device = place(strategy)
        n, devices = strategy.num_replicas_in_sync, strategy.logical_devices.count

        def look() -> None:
            own = context()
            assert (own.replica_id_in_sync_group, own.num_replicas_in_sync) == (replica, n)
            assert (own.logical_device_id, own.num_logical_devices) == (device, devices)
            mates = [one * devices + device for one in range(n)]
            assert own.all_reduce("SUM", communicator.rank) == sum(mates)
            assert own.all_gather(np.array([communicator.rank]), 0).tolist() == mates
            ranks = list(range(replica * devices, (replica + 1) * devices))
            assert own.logical_all_reduce("MAX", communicator.rank) == ranks[-1]
            nest = own.logical_all_reduce("SUM", {"a": np.ones(2), "b": communicator.rank})
            assert nest["a"].tolist() == [devices] * 2
            assert nest["b"] == sum(ranks)
            assert own.logical_all_gather(np.full((2, 1), communicator.rank), 1).tolist() == [ranks] * 2
            part = own.logical_reduce_scatter("SUM", np.arange(2.0 * devices).reshape(2, devices), axis=1)
            assert part.tolist() == [[devices * device], [devices * (devices + device)]]
            assert own.merge_call(lambda s: s.reduce("SUM", s.logical_devices.device, axis=None)) == 0

        strategy.run(look)

        def refused() -> None:
            with pytest.raises(ValueError, match="divisible by the"):
                context().logical_reduce_scatter("SUM", np.ones(devices + 1), axis=1)

        strategy.run(refused)
        outside = strategy.run(context)
        with pytest.raises(RuntimeError, match="inside"):
            outside.logical_all_reduce("SUM", 1)
        with pytest.raises(RuntimeError, match="cross-replica"):
            strategy.run(lambda: strategy.reduce("SUM", 1, axis=None))
        with pytest.raises(RuntimeError, match="gather requires cross-replica context"):
            strategy.run(lambda: strategy.gather(np.ones(1), axis=0))


def test_an_error_of_device_0_is_that_of_its_replica(communicator: Communicator) -> None:
    with make_tpu(communicator) as strategy:
        with pytest.raises(ValueError, match="`axis` is out of range"):
            strategy.reduce("SUM", np.ones(2), axis=3)
        with pytest.raises(TypeError, match="expected arrays or numbers"):
            strategy.reduce("SUM", "text", axis=None)
        if strategy.num_replicas_in_sync > 1:
            with pytest.raises(MismatchError, match="shape") as caught:
                strategy.reduce("SUM", np.ones(strategy.communicator.rank + 1), axis=None)
            assert "(1,)" in everywhere(communicator, caught.value)


def test_metrics_are_those_of_device_0(communicator: Communicator) -> None:
    with make_tpu(communicator) as strategy:
        replica, device = place(strategy)
        with strategy.scope():
            mean = mpidist.metrics.Mean()
            count = mpidist.Variable(0, synchronization="ON_READ", aggregation="SUM")
        strategy.run(lambda: mean.update_state([replica] if device == 0 else [1000.0, 7.0]))
        assert mean.result() == (strategy.num_replicas_in_sync - 1) / 2
        count.assign(7)
        assert count.numpy() == 7
        strategy.run(lambda: count.assign_add(1 if device == 0 else 100))
        assert count.numpy() == 7 + strategy.num_replicas_in_sync


@pytest.mark.parametrize("layout", ["node", "each"])
def test_the_ranks_of_a_replica_get_the_same_batches(communicator: Communicator, layout: str) -> None:
    with make_tpu(communicator, layout) as strategy:
        replica, _ = place(strategy)
        n, devices = strategy.num_replicas_in_sync, strategy.logical_devices.count
        places = []

        def make(own: mpidist.InputContext) -> mpidist.data.Dataset:
            places.append(own)
            return mpidist.data.Dataset.range(12 * n).shard(n, own.input_pipeline_id).shuffle(12 * n).batch(4)

        # Without a seed.
        shuffled = mpidist.data.Dataset.range(12 * n).shuffle(12 * n).batch(4 * n)
        for distributed in (
            strategy.experimental_distribute_dataset(shuffled), strategy.distribute_datasets_from_function(make)
        ):
            for _ in range(2):
                read = [batch.tolist() for batch in distributed]
                everyone = communicator.all_gather_object(read)
                for first in range(0, communicator.size, devices):
                    assert everyone[first : first + devices] == [everyone[first]] * devices
                rows = [row for first in everyone[::devices] for batch in first for row in batch]
                assert sorted(rows) == list(range(12 * n))
        assert places == [mpidist.InputContext(n, replica, n)]


@pytest.mark.mpi(min_size=2)
def test_ranks_of_a_replica_with_other_datasets_are_one_error(communicator: Communicator) -> None:
    with make_tpu(communicator) as strategy:
        device = strategy.logical_devices.device

        def make(_: mpidist.InputContext) -> mpidist.data.Dataset:
            return mpidist.data.Dataset.range(8 + device).batch(2)

        def fail(_: mpidist.InputContext) -> mpidist.data.Dataset:
            if communicator.rank == communicator.size - 1:
                raise ValueError("no such file")
            return mpidist.data.Dataset.range(8).batch(2)

        calls: list[tuple[str, Callable[[], object]]] = [
            ("of the ranks of replica 0", lambda: strategy.distribute_datasets_from_function(make)),
            ("no such file", lambda: strategy.distribute_datasets_from_function(fail)),
            ("of the dataset must be the same on all ranks", lambda: strategy.experimental_distribute_dataset(
                mpidist.data.Dataset.range(8 + device).batch(4))),
        ]
        for match, call in calls:
            with pytest.raises(ValueError, match=match) as caught:
                call()
            everywhere(communicator, caught.value)


def test_without_an_assignment_each_rank_is_a_replica(communicator: Communicator) -> None:
    resolver = TPUClusterResolver(tpu="grpc://10.240.1.2:8470")
    for make in (mpidist.TPUStrategy, mpidist.experimental.TPUStrategy):
        with make(resolver) as strategy:
            assert strategy.cluster_resolver is resolver
            assert strategy.num_replicas_in_sync == communicator.size
            assert strategy.logical_devices.count == 1
            with strategy.scope():
                variable = mpidist.Variable(np.zeros(3))
                optimizer = mpidist.optimizers.SGD(1.0)
            strategy.run(lambda v=variable, o=optimizer: o.apply_gradients([(np.ones(3), v)]))
            assert variable.numpy().tolist() == [-communicator.size] * 3
            assert strategy.run(lambda: context().logical_all_reduce("SUM", 3)) == 3
            assert strategy.gather(np.array([communicator.rank]), 0).tolist() == list(range(communicator.size))
    assert len(resolver.cluster_spec().tasks) == communicator.size


def test_replicas_of_a_part_of_the_ranks(communicator: Communicator) -> None:
    world: Any = importlib.import_module("mpi4py.MPI").COMM_WORLD
    # The last ones first.
    mine = world.Split(int(communicator.rank >= communicator.size // 2), -communicator.rank)
    topology = initialize_tpu_system(communicator=mine)
    assignment = DeviceAssignment.build(topology, [1, 1, 1, mine.size], num_replicas=1)
    with mpidist.TPUStrategy(None, assignment, communicator=mine) as strategy:
        assert strategy.num_replicas_in_sync == 1
        assert strategy.logical_devices.count == mine.size
        with strategy.scope():
            whole = mpidist.Variable(np.zeros(2))
            split = mpidist.Variable(np.zeros((2 * mine.size, 2)), partition_dimensions=[mine.size, 1])
            optimizer = mpidist.optimizers.SGD(1.0)
        # Both halves of the ranks train side by side, each with numbers of its own.
        number = float(communicator.rank >= communicator.size // 2) + 1
        assert strategy.run(lambda: context().logical_all_reduce("SUM", number)) == number * mine.size
        strategy.run(lambda: optimizer.apply_gradients([
            (np.full(2, number), whole), (np.full(split.value().shape, number), split),
        ]))
        assert (whole.numpy() == -number).all()
        assert (split.numpy() == -number).all()
        assert split.numpy().shape == (2 * mine.size, 2)
    mine.Free()


def test_ranks_that_do_not_fit_are_one_error(communicator: Communicator) -> None:
    topology = initialize_tpu_system(TPUClusterResolver(tpu=""))
    size = communicator.size
    with pytest.raises(ValueError, match=f"take {2 * size + 2} ranks, got {size}.*mpirun -n {2 * size + 2}") as caught:
        DeviceAssignment.build(topology, computation_shape=[1, 1, 1, 2], num_replicas=size + 1)
    everywhere(communicator, caught.value)
    if size > 1:
        few = DeviceAssignment.build(topology, num_replicas=size - 1)
        with pytest.raises(ValueError, match=f"{size - 1} replicas of 1 logical devices.*got {size} ranks") as caught:
            mpidist.TPUStrategy(experimental_device_assignment=few)
        assert f"mpirun -n {size - 1}" in everywhere(communicator, caught.value)
        turned = DeviceAssignment(topology, few.core_assignment[::-1])
        whole = DeviceAssignment.build(topology, num_replicas=size)
        turned = DeviceAssignment(topology, whole.core_assignment[::-1])
        with pytest.raises(MismatchError, match="device assignment must be the same"):
            mpidist.TPUStrategy(None, turned if communicator.rank else whole)
        with mpidist.TPUStrategy(None, turned) as strategy:
            assert strategy.communicator.rank == size - 1 - communicator.rank


def test_wrong_arguments_are_one_error(communicator: Communicator) -> None:
    for error, match, arguments in (
        (ValueError, "asks a compiler", {"experimental_spmd_xla_partitioning": True}),
        (TypeError, "must be a ClusterResolver or None", {"tpu_cluster_resolver": "grpc://"}),
        (TypeError, "must be a DeviceAssignment or None", {"experimental_device_assignment": [1, 1, 1, 2]}),
        (TypeError, "must be CommunicationOptions", {"communication_options": 3}),
    ):
        with pytest.raises(error, match=match) as caught:
            mpidist.TPUStrategy(**arguments)
        everywhere(communicator, caught.value)
    if devices_of(communicator) > 1:
        with pytest.raises(NotImplementedError, match="without `compression` and `reproducible`, got reproducible"):
            make_tpu(communicator, communication_options=CommunicationOptions(reproducible=True))
        with make_tpu(communicator) as strategy, pytest.raises(NotImplementedError, match="replicas of one rank"):
            strategy.gradients(lambda batch: batch.sum(), np.ones(4))


def test_what_a_device_has_computed_is_given_to_the_others(communicator: Communicator) -> None:
    with make_tpu(communicator) as strategy:
        replica, device = place(strategy)
        devices = strategy.logical_devices.count

        def step(inputs: Any) -> None:
            output = inputs + communicator.rank
            last = strategy.experimental_assign_to_logical_device(output, devices - 1)
            assert last.tolist() == (inputs + replica * devices + devices - 1).tolist()
            first = strategy.experimental_replicate_to_logical_devices({"a": output, "b": communicator.rank})
            assert first["a"].tolist() == (inputs + replica * devices).tolist()
            assert first["b"] == replica * devices
            whole = np.arange(4 * devices).reshape(4, devices)
            tile = strategy.experimental_split_to_logical_devices(whole, [1, devices])
            assert tile.tolist() == [[row * devices + device] for row in range(4)]

        strategy.run(step, args=(np.arange(3),))
        for wrong in (-1, devices):
            with pytest.raises(ValueError, match=f"0 to {devices - 1}, the logical devices") as caught:
                strategy.experimental_assign_to_logical_device(np.ones(2), wrong)
            everywhere(communicator, caught.value)
        with pytest.raises(TypeError, match="whole number"):
            strategy.experimental_assign_to_logical_device(np.ones(2), 0.0)  # type: ignore[arg-type]
        # In this order: the first that is wrong is named.
        prime = 7
        for dimensions, match in (
            ([prime], "a number for each dimension"), ([1, prime], "divisible"), ([1, 1, prime], "each dimension"),
            ([4 * devices, 1], f"which is {devices}, got {4 * devices}"), ([1, 2 * devices], "divisible"),
        ):
            with pytest.raises(ValueError, match=match) as caught:
                strategy.experimental_split_to_logical_devices(np.ones((4 * devices, devices)), dimensions)
            everywhere(communicator, caught.value)
        with pytest.raises(TypeError, match="a list with a whole number"):
            strategy.experimental_split_to_logical_devices(np.ones((4, 4)), [1.0, 2.0])
