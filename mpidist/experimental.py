"""Names of tf.distribute.experimental, with its arguments in its order; and the compressions of gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from mpidist import coordinator
from mpidist.checkpoint.preemption.handler import PreemptionCheckpointHandler
from mpidist.checkpoint.preemption.termination import TerminationConfig
from mpidist.cluster.devices.topology import DeviceAssignment
from mpidist.cluster.resolvers.resolver import ClusterResolver
from mpidist.comm.compression.power_sgd import PowerSGD
from mpidist.comm.compression.top_k import TopK
from mpidist.missing import no_attribute
from mpidist.options import CommunicationImplementation, CommunicationOptions
from mpidist.strategy import multi_worker
from mpidist.strategy.central_storage import CentralStorageStrategy
from mpidist.strategy.parameter_server.strategy import ParameterServerStrategy
from mpidist.strategy.tpu import strategy as tpu_strategy
from mpidist.strategy.values import ValueContext
from mpidist.variables.kinds.sync_on_read import variable_sync_on_read_context
from mpidist.variables.making import partitioners

CollectiveCommunication = CommunicationImplementation


class MultiWorkerMirroredStrategy(multi_worker.MultiWorkerMirroredStrategy):
    """Collective. `mpidist.MultiWorkerMirroredStrategy` with the older order of arguments.

    Args:
        communication: The collective to use, or its name.
        cluster_resolver: Describes the cluster.
        shard_optimizer: See `mpidist.MultiWorkerMirroredStrategy`.
    """

    def __init__(
        self,
        communication: CommunicationImplementation | str = CommunicationImplementation.AUTO,
        cluster_resolver: ClusterResolver | None = None,
        *,
        shard_optimizer: bool = False,
    ) -> None:
        options = CommunicationOptions(implementation=communication)
        super().__init__(cluster_resolver, options, shard_optimizer=shard_optimizer)


class TPUStrategy(tpu_strategy.TPUStrategy):
    """Collective. `mpidist.TPUStrategy` with the older names of arguments.

    Args:
        tpu_cluster_resolver: Describes the cluster.
        device_assignment: Which ranks make a replica.
    """

    def __init__(
        self,
        tpu_cluster_resolver: ClusterResolver | None = None,
        device_assignment: DeviceAssignment | None = None,
    ) -> None:
        super().__init__(tpu_cluster_resolver, device_assignment)


def CollectiveHints(bytes_per_pack: int = 0, timeout_seconds: float | None = None) -> CommunicationOptions:
    """Local. `CommunicationOptions` under its older name."""
    return CommunicationOptions(bytes_per_pack, timeout_seconds)


__all__ = [
    "CentralStorageStrategy",
    "CollectiveCommunication",
    "CollectiveHints",
    "CommunicationImplementation",
    "CommunicationOptions",
    "MultiWorkerMirroredStrategy",
    "ParameterServerStrategy",
    "PowerSGD",
    "PreemptionCheckpointHandler",
    "TPUStrategy",
    "TerminationConfig",
    "TopK",
    "ValueContext",
    "coordinator",
    "partitioners",
    "variable_sync_on_read_context",
]


# Hidden from type checkers, which would take any name for one of the module's.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> NoReturn:
        no_attribute(__name__, name)
