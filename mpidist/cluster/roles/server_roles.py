"""The roles under a `ParameterServerStrategy`: which rank coordinates, which work, serve, or evaluate."""

from __future__ import annotations

from dataclasses import dataclass

from mpidist.cluster.detect import detect
from mpidist.cluster.resolvers.mpi import MPIClusterResolver
from mpidist.cluster.resolvers.resolver import ClusterResolver
from mpidist.cluster.roles.groups import enter_group
from mpidist.cluster.roles.placement import JOB_ORDER, agree_on_tasks, arrange, did_you_mean
from mpidist.cluster.slurm.idle_tasks import warn_about_idle_tasks
from mpidist.cluster.spec import ClusterSpec, Task
from mpidist.comm.group.agreement import together
from mpidist.comm.group.communicator import Communicator
from mpidist.launch import mpirun_line

_NEEDED = {"ps": 1, "worker": 1, "chief": 1}
_AT_MOST_ONE = ("chief", "evaluator")


@dataclass(frozen=True)
class ServerRoles:
    """The roles of all ranks under a `ParameterServerStrategy`. Ranks are those of `group`.

    Attributes:
        task_type: This rank's job: "chief" (the coordinator), "worker", "ps" or "evaluator".
        task_id: Its index in the job.
        group: Chief, workers and servers, in this order; an evaluator's rank is alone in a group of its own. Where it
            is not the communicator of `agree_on_roles`, the caller of that function closes it.
        chief: The rank of the coordinator, 0; an evaluator is its own chief.
        workers: The ranks of the workers, in the order of their indices; none for an evaluator.
        servers: The ranks of the parameter servers, likewise.
        resolver: Describes the cluster; if nothing else gave this rank its task, it gets it now.
    """

    task_type: str
    task_id: int
    group: Communicator
    chief: int
    workers: tuple[int, ...]
    servers: tuple[int, ...]
    resolver: ClusterResolver

    @property
    def is_one_process(self) -> bool:
        """Local. Whether one process without a launcher is chief, worker and server at the same time."""
        return self.chief in self.servers

    def name_of(self, rank: int) -> str:
        """Local. The name of a rank of the group: "worker 1", "ps 0"; in one process "chief 0".

        Raises:
            ValueError: There is no such rank.
        """
        if rank == self.group.rank:
            return str(Task(self.task_type, self.task_id))
        for job, ranks in (("chief", (self.chief,)), ("worker", self.workers), ("ps", self.servers)):
            if rank in ranks:
                return str(Task(job, ranks.index(rank)))
        raise ValueError(f"expected a rank from 0 to {self.group.size - 1}, got {rank}")


def agree_on_roles(communicator: Communicator, resolver: ClusterResolver | None = None) -> ServerRoles:
    """Collective. The roles of all ranks under a `ParameterServerStrategy`.

    A process alone is chief, worker and server at once, if the cluster is empty or all its tasks have one address.

    Args:
        communicator: The ranks that take part. The coordinator may be any of them.
        resolver: Describes the cluster and this rank's task. Where it names no rank's task, ranks get the tasks in
            the order chief, workers, servers, evaluator. Default: TF_CONFIG where it is set, else the components of a
            heterogeneous Slurm job; without them a process alone.

    Raises:
        ValueError: The cluster is empty, has other jobs, several chiefs or evaluators, no chief, worker or server; a
            rank's task is not in it, or its description is malformed. On every rank.
        LauncherError: Tasks and ranks do not fit together.
        MismatchError: The ranks have different clusters.
    """
    warn_about_idle_tasks()
    is_detected = resolver is None
    if resolver is None:
        resolver = detect(communicator, takes_servers=True)
        if communicator.size == 1 and isinstance(resolver, MPIClusterResolver):
            resolver = MPIClusterResolver(communicator, num_ps=1)
    found = resolver
    is_alone = together(communicator, "reading the cluster", lambda: _read(found, communicator.size))
    if is_alone:
        return ServerRoles("chief", 0, communicator, 0, (0,), (0,), resolver)
    tasks = agree_on_tasks(communicator, resolver)
    placement = arrange(tasks)[communicator.rank]
    if is_detected and resolver.task_type is None:
        # Programs branch by `strategy.cluster_resolver.task_type`.
        resolver.task_type, resolver.task_id = placement.task_type, placement.task_id
    group = enter_group(communicator, placement)
    jobs = [] if placement.task_type == "evaluator" else [task.job for task in tasks]
    first_server = 1 + jobs.count("worker")
    return ServerRoles(
        task_type=placement.task_type,
        task_id=placement.task_id,
        group=group,
        chief=0,
        workers=tuple(range(1, first_server)) if jobs else (),
        servers=tuple(range(first_server, first_server + jobs.count("ps"))),
        resolver=resolver,
    )


def check_server_cluster(spec: ClusterSpec, task: Task | None) -> None:
    """Local. Raise ValueError unless a `ParameterServerStrategy` can use the cluster.

    Args:
        spec: The cluster.
        task: The task in this rank's environment; None without one.
    """
    if not spec:
        raise ValueError(_explain("the cluster must not be empty", spec))
    allowed = ", ".join(map(repr, JOB_ORDER))
    unknown = sorted(set(spec.jobs) - set(JOB_ORDER))
    if unknown:
        raise ValueError(
            f"the cluster has {unknown!r}; a ParameterServerStrategy takes the jobs {allowed}"
            f"{did_you_mean(unknown) or '. Take the others out of the cluster'}"
        )
    if task is not None and task.job not in JOB_ORDER:
        raise ValueError(
            f"unrecognized task type {task.job!r} of this rank; expected one of {allowed}{did_you_mean([task.job])}"
        )
    counts = {job: spec.num_tasks(job) if job in spec.jobs else 0 for job in JOB_ORDER}
    for job in _AT_MOST_ONE:
        if counts[job] > 1:
            raise ValueError(
                f"there must be at most one {job} in the cluster, got {counts[job]}. Take the others out of the cluster"
            )
    if task is not None and task.job != "evaluator" and task not in spec.tasks:
        raise ValueError(
            f"this rank was told that it is {task}, and the cluster has {counts[task.job]} task(s) of the job "
            f"{task.job!r}. Give it an index from 0, or add the task to the cluster"
        )
    for job in _NEEDED:
        if not counts[job]:
            raise ValueError(_explain(f"there must be at least one {job} in the cluster", spec))


def _read(resolver: ClusterResolver, size: int) -> bool:
    """Whether one process is the whole cluster; ValueError where the cluster cannot be used."""
    spec = resolver.cluster_spec()
    addresses = {spec.task_address(task.job, task.index) for task in spec.tasks}
    if size == 1 and not spec:
        return True
    job, index = resolver.task_type, resolver.task_id
    check_server_cluster(spec, None if job is None else Task(str(job), 0 if index is None else int(index)))
    return size == 1 and len(addresses) == 1


def _explain(problem: str, spec: ClusterSpec) -> str:
    counts = {job: max(spec.num_tasks(job) if job in spec.jobs else 0, least) for job, least in _NEEDED.items()}
    jobs = {job: spec.num_tasks(job) for job in spec.jobs}
    return (
        f"{problem}. A ParameterServerStrategy needs one chief, which coordinates, a worker and a parameter server "
        f"(job 'ps') or more, got {jobs or 'no job'}. Describe them in TF_CONFIG, or in Slurm by the components of a "
        "heterogeneous job (--job-name=ps), or let MPIClusterResolver(num_ps=1) deal these roles to the ranks, and "
        f"start a rank for each task: {mpirun_line(sum(counts.values()))}"
    )
