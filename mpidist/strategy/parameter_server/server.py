"""`Server`: the branch of workers and servers in programs of tf.distribute, `Server(...).join()`."""

from __future__ import annotations

from collections.abc import Mapping

from mpidist.arguments import whole
from mpidist.cluster.resolvers.resolver import format_address
from mpidist.cluster.resolvers.simple import SimpleClusterResolver
from mpidist.cluster.spec import Addresses, ClusterSpec
from mpidist.comm.group.opening import open_communicator
from mpidist.errors import LauncherError
from mpidist.launch import mpirun_line
from mpidist.strategy.parameter_server.strategy import ParameterServerStrategy


class Server:
    """Local. Serves as the task of this rank, a worker or a parameter server, like `tf.distribute.Server`.

    A program that makes its `ParameterServerStrategy` on every rank needs no `Server`: workers and servers serve inside
    its constructor.

    Args:
        server_or_cluster_def: The cluster, the same on every rank.
        job_name: This rank's job, "worker" or "ps"; needed if the cluster has several jobs.
        task_index: This rank's index in it; needed if the job has several tasks.
        protocol: The prefix in `target`, "grpc" by default; the ranks are connected by MPI.
        config: Kept for code written for tf.distribute; it changes nothing.
        start: Kept for code written for tf.distribute: the rank begins in `join`.
        communicator: An mpi4py communicator of the ranks that take part; default: all ranks of the job.

    Raises:
        TypeError: `server_or_cluster_def` is no cluster, or `task_index` no integer.
        ValueError: The job or the task is needed, or is not in the cluster.

    Attributes:
        target: The address of the task.
    """

    def __init__(
        self,
        server_or_cluster_def: Mapping[str, Addresses] | ClusterSpec,
        job_name: str | None = None,
        task_index: int | None = None,
        protocol: str | None = None,
        config: object = None,
        start: bool = True,
        *,
        communicator: object | None = None,
    ) -> None:
        del config, start  # arguments of tf.distribute
        self._spec = spec = ClusterSpec(server_or_cluster_def)
        if job_name is None:
            if len(spec.jobs) != 1:
                raise ValueError(f"Must specify an explicit `job_name`: the cluster has the jobs {spec.jobs!r}")
            job_name = spec.jobs[0]
        if not isinstance(job_name, str):
            raise TypeError(f"`job_name` must be the name of a job, one of {spec.jobs!r}, got {job_name!r}")
        if task_index is None:
            indices = spec.task_indices(job_name)
            if len(indices) != 1:
                raise ValueError(f"Must specify an explicit `task_index`: the job {job_name!r} has the tasks {indices}")
            task_index = indices[0]
        address = spec.task_address(job_name, whole("task_index", task_index, least=0))
        self.target = format_address(address, protocol or "grpc")
        self._resolver = SimpleClusterResolver(spec, task_type=job_name, task_id=task_index)
        self._communicator = communicator

    def start(self) -> None:
        """Local. Do nothing: `join` begins to serve."""

    def join(self) -> None:
        """Collective, with the construction of the chief's `ParameterServerStrategy`. Serve the chief.

        It does not return: the process exits with code 0 when the chief's program has ended.

        Raises:
            ValueError: This rank's job does not serve, or the cluster cannot be used.
            LauncherError: Tasks and ranks do not fit together, or there is no launcher.
        """
        job = self._resolver.task_type
        if job not in ("worker", "ps"):
            raise ValueError(
                f"expected a rank of the job 'worker' or 'ps', got {job!r}, which runs no server. Build the "
                "ParameterServerStrategy on the chief and the evaluator"
            )
        if open_communicator(self._communicator).size == 1:
            raise LauncherError(
                f"this process is alone: no rank would connect to the server of {job} {self._resolver.task_id}. Start "
                f"a rank for each task: {mpirun_line(len(self._spec.tasks))}; or build the ParameterServerStrategy "
                "alone, with a cluster of one address"
            )
        ParameterServerStrategy(self._resolver, communicator=self._communicator)
