"""Placement: the task of each rank in the cluster, and the groups of ranks that train together."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, NamedTuple

from mpidist import launch
from mpidist.cluster.resolvers.resolver import ClusterResolver
from mpidist.cluster.spec import ClusterSpec, Task
from mpidist.comm.group.agreement import exchange, name_ranks
from mpidist.comm.group.communicator import Communicator
from mpidist.errors import LauncherError, MismatchError, mark_shared
from mpidist.launch import mpirun_line

JOB_ORDER = ("chief", "worker", "ps", "evaluator")
"""The order in which ranks get the tasks of a cluster, where no rank is told its task."""

# What TensorFlow 1 and others call the jobs, and what no comparison of letters finds.
_OTHER_NAMES = {"master": "chief", "coordinator": "chief", "server": "ps", "eval": "evaluator"}

TRAINING_GROUP = 0
EVALUATOR_GROUP = 1


@dataclass(frozen=True)
class Placement:
    """A rank's place in the job.

    Attributes:
        task_type: The rank's job: "chief", "worker", "ps" or "evaluator".
        task_id: Its index in the job.
        group: The color for `split`: an evaluator is alone, all others train together.
        replica_key: The key for `split`: in the group, ranks are in the order of their tasks, the chief first.
        as_launched: Whether the communicator already is the group in its order. Then there is nothing to split.
    """

    task_type: str
    task_id: int
    group: int
    replica_key: int
    as_launched: bool


class _Claim(NamedTuple):
    """The cluster and the task that a rank's resolver describes."""

    cluster: ClusterSpec
    task: Task | None

    @property
    def checksum(self) -> int:
        """Local. The same for equal clusters."""
        return zlib.crc32(repr(self.cluster).encode())


def place(communicator: Communicator, resolver: ClusterResolver) -> Placement:
    """Collective. This rank's place under a synchronous strategy.

    Args:
        communicator: The ranks that take part.
        resolver: Describes the cluster and this rank's task. Where it names no rank's task, ranks get the tasks in
            their order.

    Raises:
        LauncherError: Tasks and ranks do not fit together.
        MismatchError: The ranks have different clusters.
        ValueError: The cluster has jobs that a synchronous strategy cannot use, or its description is malformed.
    """
    tasks = agree_on_tasks(communicator, resolver, takes_servers=False)
    try:
        return placements(tasks)[communicator.rank]
    except ValueError as error:
        raise mark_shared(error) from None


def agree_on_tasks(
    communicator: Communicator, resolver: ClusterResolver, *, takes_servers: bool = True
) -> list[Task]:
    """Collective. The task of every rank, in the order of the ranks.

    Args:
        communicator: The ranks that take part.
        resolver: Describes the cluster and this rank's task; asking it is local.
        takes_servers: Whether the cluster may have parameter servers.

    Raises:
        LauncherError: Tasks and ranks do not fit together.
        MismatchError: The ranks have different clusters.
        ValueError: The cluster has parameter servers, and takes_servers=False.
    """
    claim = _Claim(ClusterSpec({}), None)
    error: Exception | None = None
    try:
        claim = _claim(resolver)
        # Before tasks are compared with ranks: otherwise a cluster with parameter servers would get an error about the
        # number of ranks, which is not the mistake.
        if not takes_servers:
            _refuse_servers([task.job for task in claim.cluster.tasks])
    except Exception as caught:
        error = caught
    # Every rank has a cluster of thousands of addresses already. It is sent only where ranks have different ones, and
    # tasks only where they are not in the order of the ranks.
    ordered = _in_order(claim.cluster.tasks)
    is_ordered = len(ordered) == communicator.size and ordered[communicator.rank] == claim.task
    own = claim.checksum, is_ordered, None if is_ordered else claim.task
    told = exchange(communicator, "asking the cluster resolver", own, error)
    if any(checksum != told[0][0] for checksum, _, _ in told):
        claims = communicator.all_gather_object((claim.cluster.as_dict(), claim.task))
        raise mark_shared(MismatchError(_different_clusters(claims)))
    tasks = [ordered[rank] if in_order else task for rank, (_, in_order, task) in enumerate(told)]
    try:
        return assign_tasks(tasks, claim.cluster, launched=launch.read() is not None)
    except LauncherError as wrong:
        raise mark_shared(wrong) from None


def assign_tasks(tasks: list[Task | None], spec: ClusterSpec, *, launched: bool = True) -> list[Task]:
    """Local. The task of each rank, derived from the tasks in the ranks' environments.

    Args:
        tasks: The task in each rank's environment, None for no task.
        spec: The cluster, the same on every rank. In an empty cluster every rank is a worker.
        launched: Whether a launcher started the program.

    Returns:
        The task of each rank. An evaluator need not be listed in the cluster.

    Raises:
        LauncherError: Ranks have the same task, or tasks that are not in the cluster; the numbers of ranks and
            tasks differ; or only some ranks have a task. The error lists every rank with its task.
    """
    if not spec:
        if all(task is None for task in tasks):
            return [Task("worker", rank) for rank in range(len(tasks))]
        spec = ClusterSpec({"worker": [""] * len(tasks)})
    expected = _in_order(spec.tasks)
    told = [task for task in tasks if task is not None]
    if not expected:
        raise LauncherError(
            f"expected a cluster with tasks, got {spec.as_dict()}, whose jobs have none. List an address for each rank "
            '(TF_CONFIG: {"cluster": {"worker": ["host:port", ...]}}), or leave the cluster out: MPI numbers the ranks'
        )
    # An evaluator that the cluster does not list.
    extra = {task for task in told if task == Task("evaluator", 0) and is_task(task, spec)} - set(expected)
    problem = _find_problem(told, len(tasks), [*expected, *extra])
    if problem:
        raise LauncherError(_explain(problem, tasks, [*expected, *extra], launched))
    return told or expected


def is_task(task: Task, spec: ClusterSpec) -> bool:
    """Local. Whether a rank with this task has a place in the cluster."""
    # tf.distribute lets a job have an evaluator that the cluster does not list.
    return task in spec.tasks or (task == Task("evaluator", 0) and "evaluator" not in spec.jobs)


def did_you_mean(jobs: Iterable[str]) -> str:
    """Local. A question for names of jobs that are near to a known one, as 'wroker' or 'master'; "" without any."""
    known = (*JOB_ORDER, *_OTHER_NAMES)
    near: dict[str, str] = {}
    for job in jobs:
        found = get_close_matches(job.strip().lower(), known, 1, 0.7)
        if found and job not in JOB_ORDER:
            near[job] = _OTHER_NAMES.get(found[0], found[0])
    meant = ", and ".join(f"{name!r} by {job!r}" for job, name in near.items())
    return f". Did you mean {meant}?" if meant else ""


def placements(tasks: list[Task]) -> list[Placement]:
    """Local. The place of every rank under a synchronous strategy, worked out from the ranks' tasks.

    Raises:
        ValueError: There are jobs that a synchronous strategy cannot use, several chiefs or evaluators, or no rank
            that trains.
    """
    jobs = [task.job for task in tasks]
    _refuse_servers(jobs)
    unknown = sorted(set(jobs) - {"chief", "worker", "evaluator"})
    if unknown:
        raise ValueError(
            "a synchronous strategy takes the jobs 'chief', 'worker' and 'evaluator', but the cluster has "
            f"{unknown!r}{did_you_mean(unknown) or '. Take these jobs out of the cluster'}"
        )
    for job in ("chief", "evaluator"):
        if jobs.count(job) > 1:
            raise ValueError(f"there must be at most one {job} in the cluster, got {jobs.count(job)}")
    if "chief" not in jobs and "worker" not in jobs:
        raise ValueError(f"the cluster must have a chief or a worker, got only the jobs {sorted(set(jobs))!r}")
    return arrange(tasks)


def arrange(tasks: list[Task]) -> list[Placement]:
    """Local. The place of every rank: an evaluator apart, all others together in the order of their tasks.

    Args:
        tasks: The task of each rank; each task once.
    """
    order = _in_order(tasks)
    keys = {task: key for key, task in enumerate(order)}
    as_launched = order == tasks and all(task.job != "evaluator" for task in tasks)
    return [
        Placement(
            task_type=task.job,
            task_id=task.index,
            group=EVALUATOR_GROUP if task.job == "evaluator" else TRAINING_GROUP,
            replica_key=keys[task],
            as_launched=as_launched,
        )
        for task in tasks
    ]


def _refuse_servers(jobs: list[str]) -> None:
    if "ps" in jobs:
        raise ValueError(
            f"the cluster has parameter servers (job 'ps' with {jobs.count('ps')} task(s)), which only a "
            "ParameterServerStrategy uses. Build that strategy, or take the job out of the cluster"
        )


def _claim(resolver: ClusterResolver) -> _Claim:
    cluster = resolver.cluster_spec()
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
    duplicates = sorted(str(task) for task, times in Counter(told).items() if times > 1)
    if duplicates:
        return f"several ranks were told the same task ({', '.join(duplicates)})"
    strangers = sorted(str(task) for task in set(told) - set(expected))
    if strangers:
        jobs = dict.fromkeys(task.job for task in (*told, *expected))
        return f"tasks are not in the cluster ({', '.join(strangers)}){did_you_mean(jobs)}"
    if size != len(expected):
        return f"the cluster has {len(expected)} task(s) and the program {size} rank(s)"
    return ""


def _explain(problem: str, tasks: list[Task | None], expected: list[Task], launched: bool) -> str:
    names = ", ".join(str(task) for task in expected)
    line = mpirun_line(len(expected))
    if not launched and len(tasks) == 1 and len(expected) > 1:
        return (
            f"the cluster has {len(expected)} tasks ({names}), but no launcher started this program, so there is only "
            f"one process. Start all tasks at once: {line}. TF_CONFIG then needs no \"task\", and may even be unset: "
            "MPI numbers the ranks"
        )
    lines = "".join(f"\n  rank {rank}: {'no task' if task is None else task}" for rank, task in enumerate(tasks))
    return (
        f"{problem}{'' if problem.endswith('?') else '.'} Expected one rank for each of {names}, got{lines}\n"
        'Give every rank a task of its own, or leave "task" out of TF_CONFIG on all ranks, which then get the tasks in '
        f"their order. Start as many ranks as there are tasks: {line}"
    )


def _different_clusters(claims: list[tuple[dict[str, Any], Task | None]]) -> str:
    differing = [rank for rank, (cluster, _) in enumerate(claims) if cluster != claims[0][0]]
    lines = "".join(
        f"\n  rank {rank}: {'no task' if task is None else task} of {cluster or 'no cluster'}"
        for rank, (cluster, task) in enumerate(claims)
    )
    return (
        f"the ranks were told different clusters: {name_ranks(differing)} not the same as rank 0. Expected one "
        f"cluster, got{lines}\nSet the same TF_CONFIG cluster on every rank (Open MPI: mpirun -x TF_CONFIG; MPICH: "
        "mpirun -genvall), or on none"
    )
