"""`TPUStrategy`: synchronous training where a replica is a group of ranks, its logical devices."""

from __future__ import annotations

from collections.abc import Callable
from types import NoneType
from typing import Any, NamedTuple, TypeVar

import numpy as np

from mpidist import context, tree
from mpidist.arguments import described, flag
from mpidist.cluster.devices.gpu_binding import agree, bind
from mpidist.cluster.devices.names import warn_about_idle_gpus
from mpidist.cluster.devices.topology import DeviceAssignment, ranks_of, topology_of
from mpidist.cluster.resolvers.resolver import ClusterResolver
from mpidist.cluster.resolvers.tpu import TPUClusterResolver
from mpidist.cluster.slurm.idle_tasks import warn_about_idle_tasks
from mpidist.comm.group.agreement import require_same, together
from mpidist.comm.group.communicator import Communicator
from mpidist.comm.group.opening import open_communicator
from mpidist.comm.group.resource import end_all
from mpidist.comm.group.solo import SoloCommunicator
from mpidist.errors import mark_shared
from mpidist.launch import mpirun_line
from mpidist.options import CommunicationOptions, ReduceOp
from mpidist.strategy.base import Strategy
from mpidist.strategy.tpu.context import LogicalReplicaContext
from mpidist.strategy.tpu.extended import LogicalExtended
from mpidist.strategy.values import as_array
from mpidist.variables.logical_arena import LogicalArena
from mpidist.variables.logical_devices import LogicalDevices
from mpidist.variables.replicas import Replicas
from mpidist.variables.tiles import tiling

T = TypeVar("T")


class Groups(NamedTuple):
    """The communicators of a strategy.

    Attributes:
        everyone: All ranks, replica after replica.
        column: The same logical device of all replicas, in the order of the replicas.
        replica: The logical devices of this rank's replica, in their order.
        opened: The communicators that were created for this strategy, which closes them.
    """

    everyone: Communicator
    column: Communicator
    replica: Communicator
    opened: tuple[Communicator, ...]


class TPUStrategy(Strategy):
    """Collective. A replica is a group of ranks, its logical devices, among which a model can be split.

    By default each rank is a replica, as under `MultiWorkerMirroredStrategy`. A device assignment makes groups:

        resolver = mpidist.cluster_resolver.TPUClusterResolver()
        topology = mpidist.tpu.experimental.initialize_tpu_system(resolver)
        assignment = mpidist.tpu.experimental.DeviceAssignment.build(
            topology, computation_shape=[1, 1, 1, 2], num_replicas=4
        )
        strategy = mpidist.TPUStrategy(resolver, experimental_device_assignment=assignment)   # mpirun -n 8

    All ranks of a replica get the same batch. In `reduce`, `gather`, `gather_object` and metrics the value of logical
    device 0 is the value of its replica, and every rank gets the result. Inside `run`, `all_reduce` and `all_gather`
    combine the values of the same logical device of all replicas, and methods that begin with `logical_` combine the
    values of the logical devices of this replica.

    A variable is one variable over all ranks, and only the gradients and values of logical device 0 change it.
    `mpidist.Variable(value, partition_dimensions=[1, 2])` has a tile on each logical device instead.

    Args:
        tpu_cluster_resolver: A description of the cluster; default: `TPUClusterResolver()`. It does not select ranks.
        experimental_device_assignment: The ranks of each replica. The assignment must contain all ranks.
        experimental_spmd_xla_partitioning: Must be False, since there is no compiler that splits a program.
        communicator: An mpi4py communicator of the ranks that take part; default: all ranks of the job.
        communication_options: Options of the communication. Where replicas have several ranks, `reproducible` and
            `compression` are not supported.
        shared: False keeps a private copy of the variables on each rank; True makes it an error if there is no shared
            memory.

    Raises:
        ValueError: The assignment has another number of ranks, or an argument is out of range; on every rank.
        TypeError: An argument has another type; on every rank.
        NotImplementedError: Replicas have several ranks, and use GPUs or an unsupported option; on every rank.
        MismatchError: Ranks pass different assignments.

    Attributes:
        logical_devices: The logical devices of this rank's replica.
        device_assignment: The assignment of ranks to logical devices.
    """

    _extended_class = LogicalExtended
    _context_class = LogicalReplicaContext

    def __init__(
        self,
        tpu_cluster_resolver: ClusterResolver | None = None,
        experimental_device_assignment: DeviceAssignment | None = None,
        experimental_spmd_xla_partitioning: bool = False,
        *,
        communicator: object | None = None,
        communication_options: CommunicationOptions | None = None,
        shared: bool | None = None,
    ) -> None:
        # Before the first communicator starts MPI: a GPU-aware MPI library uses the GPU that is current at its start.
        binding = bind()
        ranks = open_communicator(communicator)
        on_gpu = agree(binding, ranks) is not None
        assignment = together(ranks, "TPUStrategy", lambda: _checked(
            ranks, tpu_cluster_resolver, experimental_device_assignment, experimental_spmd_xla_partitioning,
            communication_options, on_gpu=on_gpu,
        ))
        require_same(
            ranks.all_gather_object(assignment.core_assignment.tolist()), "TPUStrategy: the device assignment",
            "Build it the same way on every rank.",
        )
        self.device_assignment = assignment
        warn_about_idle_gpus(ranks.node.size)
        warn_about_idle_tasks()
        self._groups = groups = _group(ranks, assignment)
        replicas = Replicas(groups.column, communication_options, everyone=groups.everyone)
        self.logical_devices = LogicalDevices(groups.replica, replicas.options)
        arena = LogicalArena(replicas, self.logical_devices, shared=shared, on_gpu=on_gpu)
        resolver = tpu_cluster_resolver
        if resolver is None:
            resolver = TPUClusterResolver(communicator=groups.everyone)
        super().__init__(replicas, arena, cluster_resolver=resolver, namespace=arena.namespace)
        self._settle(TPUStrategy)

    def _end(self, *, is_collective: bool) -> None:
        super()._end(is_collective=is_collective)
        end_all([self.logical_devices, *self._groups.opened], is_collective=is_collective)

    def reduce(self, reduce_op: ReduceOp | str, value: Any, axis: Any) -> Any:
        """Collective. See `Strategy.reduce`; the value of logical device 0 is the value of its replica."""
        self._require_cross_replica()
        return self.logical_devices.lead("reduce", lambda: super(TPUStrategy, self).reduce(reduce_op, value, axis))

    def gather(self, value: Any, axis: int) -> Any:
        """Collective. See `Strategy.gather`; the value of logical device 0 is the value of its replica."""
        entry = context.innermost()
        if entry is None or entry.replica_context is None:
            self._require_cross_replica()
            return self.logical_devices.lead("gather", lambda: super(TPUStrategy, self).gather(value, axis))
        return super().gather(value, axis)

    def gather_object(self, value: T) -> list[T]:
        """Collective. See `Strategy.gather_object`; the value of logical device 0 is the value of its replica."""
        self._require_cross_replica()
        return self.logical_devices.lead("gather_object", lambda: super(TPUStrategy, self).gather_object(value))

    def gradients(
        self, fn: Callable[[Any], Any], batch: Any, logical_replicas: int = 8, *, blas_threads: int = 1
    ) -> Any:
        """Collective. See `Strategy.gradients`; each replica must be one rank.

        Raises:
            NotImplementedError: Replicas have several ranks; on every rank.
        """
        if self.logical_devices.count > 1:
            raise mark_shared(NotImplementedError(
                f"gradients of logical replicas need replicas of one rank, got {self.logical_devices.count} logical "
                "devices: compute gradients in `run`"
            ))
        return super().gradients(fn, batch, logical_replicas, blas_threads=blas_threads)

    def experimental_assign_to_logical_device(self, tensor: Any, logical_device_id: int) -> Any:
        """Collective over the replica. Broadcast the value of one logical device to all devices of the replica.

        Args:
            tensor: Any nest of arrays and numbers, of the same shapes and dtypes on all logical devices.
            logical_device_id: The logical device whose value is sent.

        Raises:
            ValueError: There is no such logical device; on every rank.
            TypeError: `logical_device_id` is no whole number, or `tensor` contains other objects than numbers.
        """
        count = self.logical_devices.count
        if isinstance(logical_device_id, bool) or not isinstance(logical_device_id, (int, np.integer)):
            raise mark_shared(TypeError(
                f"`logical_device_id` must be a whole number, got {described(logical_device_id)}"
            ))
        if not 0 <= logical_device_id < count:
            raise mark_shared(ValueError(
                f"`logical_device_id` must be 0 to {count - 1}, the logical devices of a replica, got "
                f"{logical_device_id}. More of them need another computation_shape of the device assignment"
            ))
        return self._from_device(tensor, int(logical_device_id))

    def experimental_split_to_logical_devices(self, tensor: Any, partition_dimensions: Any) -> Any:
        """Local. This logical device's tile of an array that all ranks of the replica have.

        Args:
            tensor: The array, the same on all these ranks.
            partition_dimensions: Number of parts of each dimension. Tiles are numbered as
                `arange(product).reshape(partition_dimensions)`.

        Returns:
            The tile, a view.

        Raises:
            ValueError: There is not one number for each dimension, a dimension is not divisible by its number, or the
                product of the numbers is not the number of logical devices; on every rank.
            TypeError: `partition_dimensions` is no list of whole numbers, or `tensor` is no array of numbers.
        """
        array, devices = as_array(tensor), self.logical_devices
        try:
            cut = tiling(
                array.shape, partition_dimensions, devices.device, devices.count,
                "experimental_split_to_logical_devices",
            )
        except (TypeError, ValueError) as error:
            raise mark_shared(error) from None
        return cut.take(array)

    def experimental_replicate_to_logical_devices(self, tensor: Any) -> Any:
        """Collective over the replica. Broadcast the value of logical device 0 to all devices of the replica.

        Args:
            tensor: See `experimental_assign_to_logical_device`.
        """
        return self._from_device(tensor, 0)

    def _from_device(self, tensor: Any, device: int) -> Any:
        collective = self.logical_devices.collective
        return tree.map_leaves(lambda leaf: collective.broadcast(as_array(leaf), device)[()], tensor)


def _checked(
    ranks: Communicator, resolver: object, assignment: object, spmd: object,
    options: CommunicationOptions | None, *, on_gpu: bool,
) -> DeviceAssignment:
    """Local. The device assignment, if the arguments of a strategy fit these ranks."""
    if flag("experimental_spmd_xla_partitioning", spmd):
        raise ValueError(
            "experimental_spmd_xla_partitioning=True asks a compiler to split the program, and there is none here, got "
            "True: leave it out, and split variables by `partition_dimensions`"
        )
    if not isinstance(resolver, (ClusterResolver, NoneType)):
        raise TypeError(f"`tpu_cluster_resolver` must be a ClusterResolver or None, got {described(resolver)}")
    if options is not None and not isinstance(options, CommunicationOptions):
        raise TypeError(f"`communication_options` must be CommunicationOptions or None, got {described(options)}")
    topology = topology_of(ranks)
    if assignment is None:
        assignment = DeviceAssignment.build(topology, num_replicas=ranks.size)
    if not isinstance(assignment, DeviceAssignment):
        raise TypeError(
            f"`experimental_device_assignment` must be a DeviceAssignment or None, got {described(assignment)}. "
            "Make it by mpidist.tpu.experimental.DeviceAssignment.build"
        )
    replicas, devices = assignment.num_replicas, assignment.num_cores_per_replica
    if replicas * devices != ranks.size:
        ways = f", or make num_replicas={ranks.size // devices}" if ranks.size % devices == 0 else ""
        raise ValueError(
            f"the device assignment has {replicas} replicas of {devices} logical devices, which are "
            f"{replicas * devices} ranks, got {ranks.size} ranks. Start as many: {mpirun_line(replicas * devices)}"
            f"{ways}"
        )
    if assignment.topology != topology:
        raise ValueError(
            f"the device assignment is for nodes with {list(assignment.topology.node_sizes)} ranks, got nodes with "
            f"{list(topology.node_sizes)}. Build it on the topology that initialize_tpu_system() returns in this job"
        )
    if devices > 1:
        asked = "compression" if options is not None and options.compression is not None else (
            "reproducible" if options is not None and options.reproducible else ""
        )
        if asked or on_gpu:
            raise NotImplementedError(
                f"replicas of {devices} logical devices compute on CPUs, without `compression` and `reproducible`, got "
                f"{asked or 'GPUs'}: leave it out, or make replicas of one rank"
            )
    return assignment


def _group(ranks: Communicator, assignment: DeviceAssignment) -> Groups:
    """Collective. The groups of these ranks."""
    rank_at = ranks_of(ranks)
    count = assignment.num_cores_per_replica
    order = [rank_at[node, 0, 0, place] for node, _, _, place in assignment.core_assignment.reshape(-1, 4).tolist()]
    place = order.index(ranks.rank)
    everyone, opened = ranks, []
    if order != list(range(ranks.size)):
        everyone = ranks.split(0, place)
        opened.append(everyone)
    if count == 1:
        return Groups(everyone, everyone, SoloCommunicator(), tuple(opened))
    replica, device = divmod(place, count)
    # Only calls of all ranks transmit interrupts, so calls of these groups are part of others.
    column = everyone.split(device, replica, is_part=True)
    return Groups(everyone, column, everyone.split(replica, device, is_part=True), (column, *opened))
