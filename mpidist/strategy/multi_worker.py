"""`MultiWorkerMirroredStrategy`: synchronous training on the ranks of all nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpidist.arguments import flag
from mpidist.cluster.detect import detect
from mpidist.cluster.devices.gpu_binding import agree, bind
from mpidist.cluster.devices.names import warn_about_idle_gpus
from mpidist.cluster.resolvers.resolver import ClusterResolver
from mpidist.cluster.roles.groups import enter_group
from mpidist.cluster.roles.placement import place
from mpidist.cluster.slurm.idle_tasks import warn_about_idle_tasks
from mpidist.comm.group.agreement import gather_together, require_same
from mpidist.comm.group.communicator import Communicator
from mpidist.comm.group.opening import open_communicator
from mpidist.comm.group.resource import end_all
from mpidist.options import CommunicationOptions
from mpidist.strategy.base import Strategy
from mpidist.variables.arena import Arena
from mpidist.variables.replicas import Replicas

if TYPE_CHECKING:
    from mpidist.comm.collective import Collective
    from mpidist.comm.cross_device.cross_device_ops import CrossDeviceOps


class MultiWorkerMirroredStrategy(Strategy):
    """Collective. Every rank is a replica. Variables are the same on all replicas, and gradients are summed.

    If TF_CONFIG or another resolver describes a cluster, replicas are in the order of its tasks: the chief, then the
    workers. The rank of an evaluator gets a strategy of its own with one replica, and prints and writes by itself.

    Args:
        cluster_resolver: Describes the cluster; default: TF_CONFIG where it is set, else the ranks themselves.
        communication_options: Options of the communication.
        communicator: An mpi4py communicator of the ranks that take part; default: all ranks of the job.
        shared: False keeps a private copy of the variables on each rank; True makes it an error if there is no shared
            memory.
        cross_device_ops: See `MirroredStrategy`.
        shard_optimizer: True keeps a part of the state of optimizers on each node, 1/k of it on k nodes, and not all of
            it on each. Each node updates the variables whose state it has, and sends them to the others, with as many
            bytes as an all-reduce. Where memory is private, each rank has a part. Reading a slot of an optimizer then
            is Collective. Variables and gradients are not in parts.

    Raises:
        LauncherError: Tasks and ranks do not fit together, or there is no launcher.
        ValueError: The cluster has parameter servers, or an argument has a wrong type.
        TypeError: `shard_optimizer` is no bool; on every rank.
        MismatchError: Ranks pass different `shard_optimizer`.
        RuntimeError: The other ranks serve a `ParameterServerStrategy` that was made before.
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        communication_options: CommunicationOptions | None = None,
        *,
        communicator: object | None = None,
        shared: bool | None = None,
        cross_device_ops: CrossDeviceOps | Collective | None = None,
        shard_optimizer: bool = False,
    ) -> None:
        if cluster_resolver is not None and not isinstance(cluster_resolver, ClusterResolver):
            raise ValueError(f"`cluster_resolver` must be a ClusterResolver, got {cluster_resolver!r}")
        if communication_options is not None and not isinstance(communication_options, CommunicationOptions):
            raise ValueError(f"`communication_options` must be CommunicationOptions, got {communication_options!r}")
        # Before the first communicator starts MPI: an MPI library that knows GPUs uses the one that is current then.
        binding = bind()
        ranks = open_communicator(communicator)
        resolver = detect(ranks) if cluster_resolver is None else cluster_resolver
        placement = place(ranks, resolver)
        if cluster_resolver is None and resolver.task_type is None:
            # Programs branch by `strategy.cluster_resolver.task_type`, so the resolver must know the task that this
            # rank got.
            resolver.task_type, resolver.task_id = placement.task_type, placement.task_id
        self.task_type = placement.task_type
        self.task_id = placement.task_id
        group = enter_group(ranks, placement)
        self._own: Communicator | None = None if group is ranks else group
        ranks = group
        on_gpu = agree(binding, ranks) is not None
        warn_about_idle_gpus(ranks.node.size)
        warn_about_idle_tasks()
        replicas = Replicas(ranks, communication_options, cross_device_ops=cross_device_ops)
        shards = agreed_sharding(ranks, shard_optimizer)
        arena = Arena(replicas, shared=shared, on_gpu=on_gpu, shard_optimizer=shards)
        super().__init__(replicas, arena, cluster_resolver=resolver, namespace=arena.namespace)
        self._settle(MultiWorkerMirroredStrategy)

    def _end(self, *, is_collective: bool) -> None:
        super()._end(is_collective=is_collective)
        end_all([] if self._own is None else [self._own], is_collective=is_collective)


def agreed_sharding(ranks: Communicator, shard_optimizer: bool) -> bool:
    """Collective. The argument `shard_optimizer`, which must be the same on all ranks.

    Raises:
        TypeError: It is no bool on some rank; on every rank.
        MismatchError: Ranks pass different values.
    """
    given = gather_together(
        ranks, "making a MultiWorkerMirroredStrategy", lambda: flag("shard_optimizer", shard_optimizer)
    )
    require_same(given, "`shard_optimizer`", "Make the strategy the same way on every rank.")
    return given[0]
