"""`MirroredStrategy`: synchronous training on the ranks of one node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mpidist.cluster.devices.gpu_binding import agree, bind, choose_device
from mpidist.cluster.devices.names import warn_about_idle_gpus
from mpidist.cluster.slurm.idle_tasks import warn_about_idle_tasks
from mpidist.comm.group.opening import open_communicator
from mpidist.errors import mark_shared
from mpidist.options import CommunicationOptions
from mpidist.strategy.base import Strategy
from mpidist.variables.arena import Arena
from mpidist.variables.replicas import Replicas

if TYPE_CHECKING:
    from mpidist.comm.collective import Collective
    from mpidist.comm.cross_device.cross_device_ops import CrossDeviceOps


class MirroredStrategy(Strategy):
    """Collective. Every rank of one node is a replica. Variables are the same on all of them, and gradients are summed.

    Args:
        devices: The name of a device for each rank of the node, in the order of the ranks; default: the rank's own
            device. If GPUs are named and available with CuPy, variables are CuPy arrays; else they are in host memory.
        cross_device_ops: The reductions over replicas: a `CrossDeviceOps` object, or any object with the methods of
            `Collective` over these ranks. It also reduces the gradients; each rank then has private variables.
        communicator: An mpi4py communicator of the replicas; default: all ranks of the job.
        communication_options: Options of the communication.
        shared: False keeps a private copy of the variables on each rank; True makes it an error if there is no shared
            memory.

    Raises:
        ValueError: The ranks are on several nodes, `devices` does not name one device per rank, or
            `cross_device_ops` contradicts the options or shared=True, or belongs to other ranks.
        TypeError: `cross_device_ops` has another type; on every rank.
        RuntimeError: The other ranks serve a `ParameterServerStrategy` that was made before.
    """

    def __init__(
        self,
        devices: Sequence[str] | None = None,
        cross_device_ops: CrossDeviceOps | Collective | None = None,
        *,
        communicator: object | None = None,
        communication_options: CommunicationOptions | None = None,
        shared: bool | None = None,
    ) -> None:
        # Before the first communicator starts MPI: an MPI library that knows GPUs uses the one that is current then.
        binding = bind(devices)
        ranks = open_communicator(communicator)
        if len(ranks.node_sizes) > 1:
            raise mark_shared(ValueError(
                f"MirroredStrategy trains on the ranks of one node, but this job's {ranks.size} ranks are on "
                f"{len(ranks.node_sizes)} nodes with {list(ranks.node_sizes)} ranks. "
                "Use MultiWorkerMirroredStrategy(), which takes the ranks of all nodes"
            ))
        on_gpu = agree(binding, ranks) is not None
        device = choose_device(devices, ranks, on_gpu=on_gpu)
        warn_about_idle_gpus(ranks.node.size)
        warn_about_idle_tasks()
        replicas = Replicas(ranks, communication_options, cross_device_ops=cross_device_ops)
        arena = Arena(replicas, shared=shared, on_gpu=on_gpu)
        super().__init__(replicas, arena, device=device, namespace=arena.namespace)
        self._settle(MirroredStrategy)
