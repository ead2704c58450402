"""The resolver that needs no configuration: the ranks of the job are the cluster."""

from __future__ import annotations

from mpidist.cluster.resolver import ClusterResolver, find_master
from mpidist.cluster.spec import ClusterSpec
from mpidist.comm.communicator import Communicator, open_communicator


class MPIClusterResolver(ClusterResolver):
    """Describes the job "worker" with one task per rank, at the address `host:rank`.

    Collective: the constructor gathers the names of the hosts; the methods do not communicate. Without a launcher it
    describes one worker, and does not start MPI.

    Args:
        communicator: The ranks that take part, as `open_communicator` returns them. Default: all ranks of the job.

    Attributes:
        node_index: Number of this rank's node.
        node_rank: Number of this rank on its node.
        node_sizes: Number of ranks of each node.
    """

    def __init__(self, communicator: Communicator | None = None) -> None:
        communicator = open_communicator(purpose="cluster") if communicator is None else communicator
        hosts = communicator.all_gather_object(communicator.host)
        self._cluster_spec = ClusterSpec({"worker": [f"{host}:{rank}" for rank, host in enumerate(hosts)]})
        self._task_type = "worker"
        self._task_id = communicator.rank
        self.node_index = communicator.node_index
        self.node_rank = communicator.node.rank
        self.node_sizes = communicator.node_sizes

    def cluster_spec(self) -> ClusterSpec:
        """Local. The job "worker", with the ranks in their order."""
        return self._cluster_spec

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """Local. The address of a task, by default of this rank's; "" in a cluster of one task.

        Raises:
            ValueError: There is no such task.
        """
        return find_master(
            self._cluster_spec,
            self.task_type if task_type is None else task_type,
            self.task_id if task_id is None else task_id,
            rpc_layer or self.rpc_layer,
        )
