"""The resolver that reads the variables of a Slurm step."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence

from mpidist.arguments import whole
from mpidist.cluster.devices.names import visible_gpus
from mpidist.cluster.resolvers.resolver import ClusterResolver, find_master
from mpidist.cluster.slurm.step import SlurmStep, read_step
from mpidist.cluster.spec import ClusterSpec, Task
from mpidist.errors import LauncherError

DEFAULT_COMPONENTS = ("ps", "worker")
JOB_NAMES = ("chief", "worker", "ps", "evaluator")
"""A component of a heterogeneous job with one of these names (`--job-name`) is that job of the cluster."""


class SlurmClusterResolver(ClusterResolver):
    """Local. Describes the tasks of the Slurm step to which this process belongs.

    A strategy detects Slurm itself; a program needs this class to name jobs. Only the constructor reads the
    environment, and nothing writes it. No port is opened: addresses are only names.

    Hosts are in Slurm's own order, tasks in the order of their ranks, as `--distribution` assigns them. In a
    heterogeneous job each component is a job of the cluster, under the component's `--job-name` where all of these are
    names of jobs (chief, worker, ps, evaluator). Components of one name are one job. With servers and no chief the
    first worker is the chief.

    Args:
        jobs: The number of tasks of each job of the cluster. Jobs take the ranks in alphabetical order, as in
            tf.distribute. Default: all tasks are workers, or the components of a heterogeneous job.
        port_base: The port in the address of the first task of each host; the next one has the next port.
        gpus_per_node: The number of GPUs of each node. Default: those that Slurm, or else the driver, shows this task;
            0 means none.
        gpus_per_task: The number of GPUs of each task. Default: an equal share of the node's.
        tasks_per_node: The number of tasks on every node, or a mapping from a node's name to its number. Default:
            Slurm's.
        auto_set_gpu: An argument of tf.distribute, which sets `CUDA_VISIBLE_DEVICES` by it. Here strategies choose the
            GPU, and this argument does nothing.
        rpc_layer: Prefix of the addresses that `master` returns.
        components: The job of each component of a heterogeneous job, the last one for all that follow. Default: the
            components' own names, else `("ps", "worker")`.
        hosts: The host of each rank, needed where Slurm's variables do not contain it (`srun -m arbitrary`).

    Raises:
        LauncherError: This process is not a task of a step; the variables contradict one another; `jobs` has another
            number of tasks than the step; or there are fewer GPUs than asked for.
        ValueError: A variable is malformed, or a number negative.
        TypeError: An argument has another type.

    Attributes:
        step: The hosts and components that were read, in the order of the ranks.
    """

    def __init__(  # noqa: PLR0913  # tf.distribute's signature
        self,
        jobs: Mapping[str, int] | None = None,
        port_base: int = 8888,
        gpus_per_node: int | None = None,
        gpus_per_task: int | None = None,
        tasks_per_node: int | Mapping[str, int] | None = None,
        auto_set_gpu: bool = True,
        rpc_layer: str | None = "grpc",
        *,
        components: Sequence[str] | None = None,
        hosts: Sequence[str] | None = None,
    ) -> None:
        del auto_set_gpu  # an argument of tf.distribute
        environment = dict(os.environ)
        port_base = whole("port_base", port_base, least=0)
        if isinstance(tasks_per_node, Mapping):
            counts = {f"tasks_per_node[{host!r}]": n for host, n in tasks_per_node.items()}
            names = _names("tasks_per_node", tasks_per_node, 'a number, or numbers by host, such as {"n1": 2}')
            tasks_per_node = dict(zip(names, (whole(name, n, least=0) for name, n in counts.items()), strict=True))
        elif tasks_per_node is not None:
            tasks_per_node = whole("tasks_per_node", tasks_per_node, least=1)
        hosts = None if hosts is None else _names("hosts", hosts, 'names of hosts, such as ["n1", "n1", "n2"]')
        if components is not None:
            components = _names("components", components, 'names of jobs, such as ("ps", "worker")')
        self.step = step = read_step(environment, tasks_per_node, hosts)
        tasks = _component_tasks(step, components) if jobs is None else _job_tasks(step, jobs)
        seen: dict[str, int] = {}
        cluster: dict[str, dict[int, str]] = {}
        for task, host in zip(tasks, step.hosts, strict=True):
            number = seen[host] = seen.get(host, -1) + 1
            cluster.setdefault(task.job, {})[task.index] = f"{host}:{port_base + number}"
        self._cluster_spec = ClusterSpec(cluster)
        self._task_type, self._task_id = tasks[step.rank].job, tasks[step.rank].index
        self._rpc_layer = rpc_layer
        self._gpus_per_task = _share_gpus(environment, step, gpus_per_node, gpus_per_task)

    def cluster_spec(self) -> ClusterSpec:
        """Local. The jobs, with the tasks in the order of their ranks."""
        return self._cluster_spec

    def get_task_info(self) -> tuple[str | None, int | None]:
        """Local. This process's job and its index in it, as in tf.distribute."""
        return self.task_type, self.task_id

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """Local. The address of a task, by default of this one; "" in a cluster of one task.

        Raises:
            ValueError: There is no such task.
        """
        return find_master(
            self._cluster_spec,
            self.task_type if task_type is None else task_type,
            self.task_id if task_id is None else task_id,
            rpc_layer or self.rpc_layer,
        )

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: object = None
    ) -> dict[str, int]:
        """Local. The number of GPUs of each task, `{}` without any."""
        del task_type, task_id, config_proto  # arguments of tf.distribute
        return {"GPU": self._gpus_per_task} if self._gpus_per_task else {}


def named_components(step: SlurmStep) -> tuple[str, ...] | None:
    """Local. The jobs of a heterogeneous job's components by their own names; None where a name is no job's."""
    return step.names if all(name in JOB_NAMES for name in step.names) else None


def _names(argument: str, given: Iterable[str], example: str) -> list[str]:
    names = None if isinstance(given, (str, bytes)) or not isinstance(given, Iterable) else list(given)
    if not names or not all(isinstance(name, str) for name in names):
        raise TypeError(f"`{argument}` must be {example}, got {given!r}")
    return names


def _job_tasks(step: SlurmStep, jobs: Mapping[str, int]) -> list[Task]:
    example = 'a dict from job to number of tasks, such as {"worker": 2}'
    if not isinstance(jobs, Mapping):
        raise TypeError(f"`jobs` must be {example}, got {jobs!r}")
    counts = {job: whole(f"jobs[{job!r}]", jobs[job], least=0) for job in sorted(_names("jobs", jobs, example))}
    tasks = [Task(job, index) for job, count in counts.items() for index in range(count)]
    if len(tasks) != len(step.hosts):
        raise LauncherError(
            f"Requested {len(tasks)} tasks but only {len(step.hosts)} were assigned."
            if len(tasks) > len(step.hosts) else
            f"Requested {len(tasks)} tasks and {len(step.hosts)} were assigned: jobs={counts}. Expected a job for each "
            f"task of the step; start fewer: srun -n {len(tasks)}"
        )
    return tasks


def _component_tasks(step: SlurmStep, components: Sequence[str] | None) -> list[Task]:
    """The tasks where each component of the job is a job of the cluster."""
    if len(set(step.components)) == 1:
        return [Task("worker", rank) for rank in range(len(step.hosts))]
    names = components or named_components(step) or DEFAULT_COMPONENTS
    jobs = [names[min(component, len(names) - 1)] for component in step.components]
    if "ps" in jobs and "chief" not in jobs and "worker" in jobs:
        jobs[jobs.index("worker")] = "chief"
    return [Task(job, jobs[:rank].count(job)) for rank, job in enumerate(jobs)]


def _share_gpus(
    environment: Mapping[str, str], step: SlurmStep, gpus_per_node: int | None, gpus_per_task: int | None
) -> int:
    """The number of GPUs of each task."""
    most_tasks = max(step.hosts.count(host) for host in set(step.hosts))
    shown = _shown_gpus(environment)
    told = environment.get("SLURM_GPUS_ON_NODE", "")
    of_node = max(shown, int(told)) if told.isdecimal() else shown
    if gpus_per_node is not None:
        of_node = whole("gpus_per_node", gpus_per_node, least=0)
    elif gpus_per_task is None and shown < of_node:
        # `--gpus-per-task` and `--gpu-bind` show each task its own GPUs only.
        return shown
    if gpus_per_task is None:
        return of_node // most_tasks
    of_task = whole("gpus_per_task", gpus_per_task, least=0)
    if most_tasks * of_task > of_node:
        raise LauncherError(
            f"Requested more GPUs per node than available. Expected at most {of_node} on a node, got {most_tasks} "
            f"tasks with {of_task} each. Start fewer tasks per node, or pass a smaller gpus_per_task"
        )
    return of_task


def _shown_gpus(environment: Mapping[str, str]) -> int:
    """The number of GPUs that this task may use. Where no driver answers, Slurm's list counts."""
    found = len(visible_gpus(environment))
    listed = environment.get("CUDA_VISIBLE_DEVICES")
    if found or listed is None:
        return found
    names = [name.strip() for name in listed.split(",")]
    # CUDA's rule: "-1" and "" end the list.
    return next((number for number, name in enumerate(names) if name in ("", "-1")), len(names))
