"""Which task of the cluster each rank is, and which ranks train together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from mpidist import launch
from mpidist.cluster.command import mpirun_line
from mpidist.cluster.resolver import ClusterResolver
from mpidist.cluster.spec import ClusterSpec, Task
from mpidist.comm.agreement import name_ranks, together
from mpidist.comm.communicator import Communicator
from mpidist.errors import LauncherError, MismatchError, mark_shared

JOB_ORDER = ("chief", "worker", "ps", "evaluator")
"""Order in which ranks are dealt the tasks of a cluster that says nobody's task."""

SYNCHRONOUS_GROUP = 0
EVALUATOR_GROUP = 1


@dataclass(frozen=True)
class Placement:
    """This rank's place under a synchronous strategy.

    Attributes:
        task_type: This rank's job: "chief", "worker" or "evaluator".
        task_id: Its index in the job.
        group: Split color: chief and workers train together, an evaluator is on its own.
        replica_key: Split key: within the group, replicas are in the order of their tasks, the chief first.
        as_launched: Whether the communicator already is the group, in its order: then there is nothing to split.
    """

    task_type: str
    task_id: int
    group: int
    replica_key: int
    as_launched: bool


class _Claim(NamedTuple):
    """What a rank's resolver says."""

    cluster: dict[str, list[str] | dict[int, str]]
    task: Task | None


def place(communicator: Communicator, resolver: ClusterResolver) -> Placement:
    """Collective. This rank's place under a synchronous strategy.

    Args:
        communicator: The ranks that take part.
        resolver: Says the cluster and this rank's task; nobody's task: they are dealt in the order of the ranks.

    Raises:
        LauncherError: Tasks and ranks do not fit together.
        MismatchError: The ranks were told different clusters.
        ValueError: The cluster has jobs that a synchronous strategy has no use for, or the resolver's is malformed.
    """
    # Before tasks are compared with ranks: else a cluster with servers is met with advice on the number of ranks.
    together(
        communicator, "reading the cluster",
        lambda: _refuse_servers([task.job for task in resolver.cluster_spec().tasks]),
    )
    tasks = agree_on_tasks(communicator, resolver)
    try:
        return placements(tasks)[communicator.rank]
    except ValueError as error:
        raise mark_shared(error) from None


def agree_on_tasks(communicator: Communicator, resolver: ClusterResolver) -> list[Task]:
    """Collective. The task of every rank, in the order of the ranks.

    Args:
        communicator: The ranks that take part.
        resolver: Says the cluster and this rank's task; is asked locally.

    Raises:
        LauncherError: Tasks and ranks do not fit together.
        MismatchError: The ranks were told different clusters.
    """
    claim = together(communicator, "asking the cluster resolver", lambda: _claim(resolver))
    claims = communicator.all_gather_object(claim)
    tasks = [claim.task for claim in claims]
    try:
        for other in claims:
            if other.cluster != claims[0].cluster:
                raise MismatchError(_different_clusters(claims))
        return assign_tasks(tasks, ClusterSpec(claims[0].cluster), launched=launch.read() is not None)
    except (LauncherError, MismatchError) as error:
        raise mark_shared(error) from None


def assign_tasks(tasks: list[Task | None], spec: ClusterSpec, *, launched: bool = True) -> list[Task]:
    """Local. Who is which task, from what the ranks were told.

    Args:
        tasks: What each rank was told, None where nothing.
        spec: The cluster, the same on every rank. Empty: every rank is a worker.
        launched: Whether a launcher started the program.

    Returns:
        Each rank's task. An evaluator need not be listed in the cluster.

    Raises:
        LauncherError: Duplicates, tasks that are not in the cluster, a count that does not fit, or only some ranks
            were told theirs. Lists every rank with its task.
    """
    if not spec:
        if all(task is None for task in tasks):
            return [Task("worker", rank) for rank in range(len(tasks))]
        spec = ClusterSpec({"worker": [""] * len(tasks)})
    expected = _in_order(spec.tasks)
    told = [task for task in tasks if task is not None]
    # tf.distribute lets a job have an evaluator that the cluster does not list.
    extra = {task for task in told if task == Task("evaluator", 0) and "evaluator" not in spec.jobs}
    problem = _find_problem(told, len(tasks), [*expected, *extra])
    if problem:
        raise LauncherError(_explain(problem, tasks, [*expected, *extra], launched))
    return told or expected


def placements(tasks: list[Task]) -> list[Placement]:
    """Local. Every rank's place under a synchronous strategy, from every rank's task.

    Raises:
        ValueError: There are jobs that a synchronous strategy has no use for, more than one chief or evaluator, or
            nobody who trains.
    """
    jobs = [task.job for task in tasks]
    _refuse_servers(jobs)
    unknown = sorted(set(jobs) - {"chief", "worker", "evaluator"})
    if unknown:
        raise ValueError(
            f"a synchronous strategy knows the jobs 'chief', 'worker' and 'evaluator', the cluster has {unknown!r}"
        )
    for job in ("chief", "evaluator"):
        if jobs.count(job) > 1:
            raise ValueError(f"there must be at most one {job} in the cluster, got {jobs.count(job)}")
    if "chief" not in jobs and "worker" not in jobs:
        raise ValueError(f"the cluster must have a chief or a worker, its jobs are {sorted(set(jobs))!r}")
    order = _in_order(tasks)
    as_launched = order == tasks and "evaluator" not in jobs
    return [
        Placement(
            task_type=task.job,
            task_id=task.index,
            group=EVALUATOR_GROUP if task.job == "evaluator" else SYNCHRONOUS_GROUP,
            replica_key=order.index(task),
            as_launched=as_launched,
        )
        for task in tasks
    ]


def _refuse_servers(jobs: list[str]) -> None:
    if "ps" in jobs:
        raise ValueError(
            f"the cluster has parameter servers (job 'ps' with {jobs.count('ps')} task(s)), for which a "
            "synchronous strategy has no use. Use ParameterServerStrategy, or take the job out of the cluster"
        )


def _claim(resolver: ClusterResolver) -> _Claim:
    cluster = resolver.cluster_spec().as_dict()
    job, index = resolver.task_type, resolver.task_id
    if job is None:
        return _Claim(cluster, None)
    return _Claim(cluster, Task(str(job), 0 if index is None else int(index)))


def _in_order(tasks: list[Task]) -> list[Task]:
    """Chief, workers, parameter servers, evaluator, then other jobs by name; each by index."""
    known = {job: place for place, job in enumerate(JOB_ORDER)}
    return sorted(tasks, key=lambda task: (known.get(task.job, len(known)), task.job, task.index))


def _find_problem(told: list[Task], size: int, expected: list[Task]) -> str:
    if told and len(told) < size:
        return f"only {len(told)} of {size} ranks were told their task"
    duplicates = sorted({str(task) for task in told if told.count(task) > 1})
    if duplicates:
        return f"several ranks were told the same task ({', '.join(duplicates)})"
    strangers = sorted(str(task) for task in set(told) - set(expected))
    if strangers:
        return f"tasks are not in the cluster ({', '.join(strangers)})"
    if size != len(expected):
        return f"the cluster has {len(expected)} task(s) and the program {size} rank(s)"
    return ""


def _explain(problem: str, tasks: list[Task | None], expected: list[Task], launched: bool) -> str:
    names = ", ".join(str(task) for task in expected)
    line = mpirun_line(len(expected))
    if not launched and len(tasks) == 1 and len(expected) > 1:
        return (
            f"the cluster has {len(expected)} tasks ({names}) and no launcher started this program, which is one "
            f"process. Start all of them at once: {line}. Tasks need not be told then: without "
            '"task" in TF_CONFIG, or without TF_CONFIG, ranks are numbered by MPI'
        )
    lines = "".join(f"\n  rank {rank}: {'no task' if task is None else task}" for rank, task in enumerate(tasks))
    return (
        f"{problem}. Expected one rank for each of {names}, got{lines}\n"
        'Give every rank a task of its own, or leave "task" out of TF_CONFIG on all of them to have tasks dealt in '
        f"the order of ranks; and start as many ranks as there are tasks: {line}"
    )


def _different_clusters(claims: list[_Claim]) -> str:
    first = claims[0].cluster
    differing = [rank for rank, claim in enumerate(claims) if claim.cluster != first]
    lines = "".join(
        f"\n  rank {rank}: {'no task' if claim.task is None else claim.task} of {claim.cluster or 'no cluster'}"
        for rank, claim in enumerate(claims)
    )
    return (
        f"the ranks were told different clusters: {name_ranks(differing)} not the same as rank 0. Expected one, got"
        f"{lines}\nSet the same TF_CONFIG cluster on every rank (mpirun -x TF_CONFIG, or -genvall), or none at all"
    )
