"""How the documents create strategies, and the names that the library's overview lists."""

from __future__ import annotations

import numpy as np
import pytest

import mpidist
from mpidist.comm.choice.table import why_not
from mpidist.comm.group.communicator import Communicator
from mpidist.errors import UnavailableError
from mpidist.options import CommunicationImplementation

pytestmark = pytest.mark.mpi


def test_mirrored_strategy(communicator: Communicator) -> None:
    mirrored_strategy = mpidist.MirroredStrategy()
    assert mirrored_strategy.num_replicas_in_sync == communicator.size
    assert mirrored_strategy.cluster_resolver is None


def test_mirrored_strategy_on_two_devices(communicator: Communicator) -> None:
    if communicator.size == 2:
        mirrored_strategy = mpidist.MirroredStrategy(devices=["/gpu:0", "/gpu:1"])
        assert mirrored_strategy.num_replicas_in_sync == 2
        assert str(mirrored_strategy.device) == f"/device:GPU:{communicator.rank}"
    else:
        # One rank is one replica, so two devices want two ranks.
        with pytest.raises(ValueError, match=r"mpirun -n 2 python"):
            mpidist.MirroredStrategy(devices=["/gpu:0", "/gpu:1"])


@pytest.mark.parametrize(
    "kind", [mpidist.HierarchicalCopyAllReduce, mpidist.ReductionToOneDevice, mpidist.NcclAllReduce]
)
def test_cross_device_ops(communicator: Communicator, kind: type[mpidist.HierarchicalCopyAllReduce]) -> None:
    # The block has the first, its text names the others.
    mirrored_strategy = mpidist.MirroredStrategy(cross_device_ops=kind())
    assert mirrored_strategy.num_replicas_in_sync == communicator.size
    total = mirrored_strategy.reduce("SUM", np.float32(communicator.rank), axis=None)
    assert total == sum(range(communicator.size))
    by_position = mpidist.MirroredStrategy(None, kind())
    assert by_position.num_replicas_in_sync == communicator.size


def test_central_storage_strategy(communicator: Communicator) -> None:
    central_storage_strategy = mpidist.experimental.CentralStorageStrategy()
    assert central_storage_strategy.num_replicas_in_sync == communicator.size
    assert len(central_storage_strategy.extended.parameter_devices) == 1
    # "Update to variables on replicas will be aggregated before being applied to variables."
    with central_storage_strategy.scope():
        variable = mpidist.Variable(0.0, aggregation="SUM")
    central_storage_strategy.run(lambda: variable.assign_add(1.0))
    assert variable == communicator.size


@pytest.mark.parametrize("communication", [
    mpidist.experimental.CollectiveCommunication.RING, mpidist.experimental.CollectiveCommunication.NCCL,
])
def test_collective_communication(
    communicator: Communicator, monkeypatch: pytest.MonkeyPatch, communication: CommunicationImplementation
) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    reasons = communicator.all_gather_object(why_not(communication, communicator))
    if any(reasons):
        # Each rank needs a GPU of its own; the error says what is missing, and what there is.
        with pytest.raises(UnavailableError, match=r"NCCL, asked for by .* is not available on rank.*of: AUTO, MPI"):
            mpidist.experimental.MultiWorkerMirroredStrategy(communication)
        return
    multiworker_strategy = mpidist.experimental.MultiWorkerMirroredStrategy(communication)
    assert multiworker_strategy.num_replicas_in_sync == communicator.size


def test_multi_worker_mirrored_strategy(communicator: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    multiworker_strategy = mpidist.experimental.MultiWorkerMirroredStrategy()
    assert multiworker_strategy.num_replicas_in_sync == communicator.size
    assert isinstance(multiworker_strategy, mpidist.MultiWorkerMirroredStrategy)
    # Printed: communication = CollectiveCommunication.AUTO; the same by name, as the constructor's first argument.
    again = mpidist.experimental.MultiWorkerMirroredStrategy(mpidist.experimental.CollectiveCommunication.AUTO)
    assert again.num_replicas_in_sync == communicator.size
    # Without TF_CONFIG the ranks are the cluster.
    resolver = multiworker_strategy.cluster_resolver
    assert isinstance(resolver, mpidist.cluster_resolver.MPIClusterResolver)
    assert (resolver.task_type, resolver.task_id) == ("worker", communicator.rank)


@pytest.mark.parametrize("device", ["/gpu:0", "cpu:0"])
def test_one_device_strategy(device: str) -> None:
    strategy = mpidist.OneDeviceStrategy(device=device)
    with strategy.scope():
        variable = mpidist.Variable(1.0)
    assert (strategy.num_replicas_in_sync, variable.group.size) == (1, 1)
    # The 2.0 guide calls `strategy.experimental_run_v2`, which later became `run`.
    assert strategy.run(lambda: variable + 1.0, options=mpidist.RunOptions()) == 2.0
    # The references of `reduce` and `gather`: here the value may be a regular tensor.
    assert strategy.reduce("SUM", np.float32(3.0), axis=None) == 3.0
    assert strategy.gather(np.array([1, 2]), axis=0).tolist() == [1, 2]
    assert str(strategy.device) == ("/device:GPU:0" if device == "/gpu:0" else "/device:CPU:0")


def test_mirrored_variables_stay_the_same_by_identical_updates(devices: list[str]) -> None:
    # The glossary's mirrored variables and synchronous training, in one step.
    strategy = mpidist.MirroredStrategy(devices)
    with strategy.scope():
        weight = mpidist.Variable(1.0)
        optimizer = mpidist.optimizers.SGD(0.5)
    n = strategy.num_replicas_in_sync

    def step() -> None:
        i = mpidist.get_replica_context().replica_id_in_sync_group  # type: ignore[union-attr]
        optimizer.apply_gradients([(np.float32(i), weight)])

    strategy.run(step)
    assert strategy.gather(weight.numpy()[np.newaxis], axis=0).tolist() == [1 - 0.5 * n * (n - 1) / 2] * n


@pytest.mark.parametrize(
    "name",
    [
        "CrossDeviceOps", "HierarchicalCopyAllReduce", "NcclAllReduce", "ReductionToOneDevice",
        "cluster_resolver", "experimental", "InputContext", "InputReplicationMode", "MirroredStrategy",
        "OneDeviceStrategy", "ReduceOp", "ReplicaContext", "Server", "Strategy", "StrategyExtended",
    ],
)
def test_name_of_the_overview(name: str) -> None:
    assert name in mpidist.__all__
    assert getattr(mpidist, name).__doc__
