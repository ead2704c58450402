"""The resolver that needs no configuration: the ranks of the job are the cluster."""

from __future__ import annotations

from mpidist.arguments import whole
from mpidist.cluster.resolvers.resolver import ClusterResolver, find_master
from mpidist.cluster.spec import ClusterSpec, Task
from mpidist.comm.group.agreement import gather_together, require_same
from mpidist.comm.group.communicator import Communicator, require_communicator
from mpidist.comm.group.opening import open_communicator
from mpidist.errors import mark_shared
from mpidist.launch import mpirun_line


class MPIClusterResolver(ClusterResolver):
    """Collective. Describes the ranks as a cluster, each at the address `host:rank`.

    By default each rank is a worker. With parameter servers or an evaluator rank 0 is the chief, then come the workers,
    the servers, and last the evaluator.

    The constructor gathers the names of the hosts; the methods do not communicate. Without a launcher MPI does not
    start, and the cluster has one worker; with parameter servers it has a chief, a worker and a server, and this one
    process is all of them.

    Args:
        communicator: The ranks that take part, as `open_communicator` returns them. Default: all ranks of the job.
        num_ps: Number of parameter servers, for a `ParameterServerStrategy`.
        num_evaluators: Number of evaluators; strategies take one at most. A single process has none.

    Raises:
        ValueError: There are too few ranks, or a number is negative; on every rank.
        TypeError: A number is no integer; on every rank.
        MismatchError: The ranks pass different numbers.

    Attributes:
        node_index: Number of this rank's node.
        node_rank: Number of this rank on its node.
        node_sizes: Number of ranks of each node.
    """

    def __init__(
        self, communicator: Communicator | None = None, *, num_ps: int = 0, num_evaluators: int = 0
    ) -> None:
        communicator = open_communicator(purpose="cluster") if communicator is None else communicator
        require_communicator(communicator)
        size = communicator.size
        numbers = gather_together(communicator, "assigning the roles", lambda: (
            whole("num_ps", num_ps, least=0), whole("num_evaluators", num_evaluators, least=0)
        ))
        require_same(numbers, "(num_ps, num_evaluators)", "Pass the same numbers on every rank.")
        addresses = [f"{process.host}:{rank}" for rank, process in enumerate(communicator.processes)]
        if size == 1 and num_ps:
            tasks = [Task(job, 0) for job in ("chief", "worker", "ps")]
            addresses *= len(tasks)
        else:
            tasks = _deal(size, num_ps, num_evaluators if size > 1 else 0)
        cluster: dict[str, list[str]] = {}
        for task, address in zip(tasks, addresses, strict=True):
            cluster.setdefault(task.job, []).append(address)
        self._cluster_spec = ClusterSpec(cluster)
        self._task_type = tasks[communicator.rank].job
        self._task_id = tasks[communicator.rank].index
        self.node_index = communicator.node_index
        self.node_rank = communicator.node.rank
        self.node_sizes = communicator.node_sizes

    def cluster_spec(self) -> ClusterSpec:
        """Local. The jobs, with the ranks in their order."""
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


def _deal(size: int, num_ps: int, num_evaluators: int) -> list[Task]:
    """The task of each rank."""
    if not num_ps and not num_evaluators:
        return [Task("worker", rank) for rank in range(size)]
    num_workers = size - 1 - num_ps - num_evaluators
    least = 1 if num_ps else 0
    if num_workers < least:
        needed = size - num_workers + least
        raise mark_shared(ValueError(
            f"{size} ranks are too few for a chief, {least} worker(s) or more, num_ps={num_ps} and "
            f"num_evaluators={num_evaluators}: expected at least {needed} ranks. Start more: {mpirun_line(needed)}"
        ))
    counts = {"chief": 1, "worker": num_workers, "ps": num_ps, "evaluator": num_evaluators}
    return [Task(job, index) for job, count in counts.items() for index in range(count)]
