"""The names of `tf.tpu.experimental`: which ranks there are, and which of them is which logical device of a replica.

    resolver = mpidist.cluster_resolver.TPUClusterResolver()
    topology = mpidist.tpu.experimental.initialize_tpu_system(resolver)
    device_assignment = mpidist.tpu.experimental.DeviceAssignment.build(
        topology, computation_shape=[1, 1, 1, 2], num_replicas=4
    )
    strategy = mpidist.TPUStrategy(resolver, experimental_device_assignment=device_assignment)

Ranks take the places of cores, and no address is used.
"""

from typing import TYPE_CHECKING, NoReturn

from mpidist.cluster.devices.topology import DeviceAssignment, Topology, topology_of
from mpidist.cluster.resolvers.resolver import ClusterResolver
from mpidist.comm.group.opening import open_communicator
from mpidist.missing import no_attribute

__all__ = ["DeviceAssignment", "Topology", "initialize_tpu_system"]


def initialize_tpu_system(
    cluster_resolver: ClusterResolver | None = None, *, communicator: object | None = None
) -> Topology:
    """Collective. The topology of the job's ranks; there is nothing to be initialized but MPI.

    Args:
        cluster_resolver: Not used: the launcher says which ranks there are. It is here for code written for TensorFlow.
        communicator: An mpi4py communicator, for a strategy of a part of the ranks; default: all ranks of the job.

    Raises:
        TypeError: `communicator` is no mpi4py intracommunicator.
    """
    del cluster_resolver
    return topology_of(open_communicator(communicator))


# Hidden from type checkers, which would take any name for one of the module's.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> NoReturn:
        no_attribute(__name__, name)
