"""The cluster: jobs, their tasks, and each task's address."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mpidist.arguments import whole

Addresses = Mapping[int, str] | Mapping[str, str] | Sequence[str]
"""The tasks of one job: addresses in the order of their indices, or by index."""


@dataclass(frozen=True)
class Task:
    """One participant of a cluster.

    Attributes:
        job: Name of the job, such as "worker".
        index: Index within the job.
    """

    job: str
    index: int

    def __str__(self) -> str:
        return f"{self.job} {self.index}"


class ClusterSpec:
    """Local. Jobs, each with tasks that have an index and an address. Immutable, like `tf.train.ClusterSpec`.

    Args:
        cluster: For each job a list of addresses, or a mapping from index to address where indices have gaps; or
            another `ClusterSpec`.

    Raises:
        TypeError: The cluster, a job or an address has another type.
        ValueError: An index is negative, or is listed twice.

    Example:
        >>> ClusterSpec({"worker": ["a:1", "b:1"], "ps": {2: "c:1"}}).as_dict()
        {'worker': ['a:1', 'b:1'], 'ps': {2: 'c:1'}}
    """

    def __init__(self, cluster: Mapping[str, Addresses] | ClusterSpec) -> None:
        if isinstance(cluster, ClusterSpec):
            cluster = cluster.as_dict()
        if not isinstance(cluster, Mapping):
            raise TypeError(
                "a cluster must be a dict from job names to addresses, or a ClusterSpec, got "
                f"{type(cluster).__name__}: {cluster!r}"
            )
        self._addresses: dict[str, dict[int, str]] = {
            _job_name(job): _addresses(job, tasks) for job, tasks in cluster.items()
        }

    def __bool__(self) -> bool:
        return bool(self._addresses)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, ClusterSpec):
            return self._addresses == other._addresses
        return self._addresses == other

    # A ClusterSpec equals a plain dict, which has no hash either.
    __hash__ = None  # type: ignore[assignment]  # how Python says that a class with `__eq__` has no hash

    def __repr__(self) -> str:
        jobs = self.as_dict()
        return "ClusterSpec({" + ", ".join(f"{job!r}: {jobs[job]!r}" for job in sorted(jobs)) + "})"

    def as_dict(self) -> dict[str, list[str] | dict[int, str]]:
        """Local. For each job a list of addresses, or a dict by index where indices have gaps."""
        return {
            job: list(tasks.values()) if list(tasks) == list(range(len(tasks))) else dict(tasks)
            for job, tasks in self._addresses.items()
        }

    @property
    def jobs(self) -> list[str]:
        """Local. Names of the jobs."""
        return list(self._addresses)

    @property
    def tasks(self) -> list[Task]:
        """Local. All tasks, job after job, those of a job by index."""
        return [Task(job, index) for job, tasks in self._addresses.items() for index in tasks]

    def num_tasks(self, job_name: str) -> int:
        """Local. Number of tasks of the job.

        Raises:
            ValueError: There is no such job.
        """
        return len(self._job(job_name))

    def task_indices(self, job_name: str) -> list[int]:
        """Local. Indices of the job's tasks, ascending.

        Raises:
            ValueError: There is no such job.
        """
        return list(self._job(job_name))

    def task_address(self, job_name: str, task_index: int) -> str:
        """Local. Address of the task.

        Raises:
            ValueError: There is no such job, or no such task in it.
        """
        tasks = self._job(job_name)
        if task_index not in tasks:
            raise ValueError(
                f"No task with index {task_index!r} in job {job_name!r}; its indices are {list(tasks)!r}"
            )
        return tasks[task_index]

    def job_tasks(self, job_name: str) -> list[str | None]:
        """Local. Addresses of the job's tasks by index, None where the indices have a gap.

        Raises:
            ValueError: There is no such job.
        """
        tasks = self._job(job_name)
        return [tasks.get(index) for index in range(max(tasks, default=-1) + 1)]

    def _job(self, job: str) -> dict[int, str]:
        if job not in self._addresses:
            raise ValueError(f"No such job in cluster: {job!r}; the cluster's jobs are {sorted(self._addresses)!r}")
        return self._addresses[job]


def _job_name(job: object) -> str:
    if not isinstance(job, str):
        raise TypeError(f"names of a cluster's jobs must be strings, got {type(job).__name__}: {job!r}")
    return job


def _addresses(job: str, tasks: Addresses) -> dict[int, str]:
    if isinstance(tasks, Mapping):
        addresses: dict[int, str] = {}
        for key, address in tasks.items():
            index = _index(job, key)
            if index in addresses:
                raise ValueError(
                    f"expected each index of job {job!r} of a cluster once, got {index} for {addresses[index]!r} and, "
                    f"as {key!r}, for {address!r}. Give one of them another index"
                )
            addresses[index] = address
    elif isinstance(tasks, Sequence) and not isinstance(tasks, (str, bytes)):
        addresses = dict(enumerate(tasks))
    else:
        raise TypeError(
            f"job {job!r} of a cluster must be a list of addresses or a dict from index to address, got "
            f"{type(tasks).__name__}: {tasks!r}"
        )
    for index, address in addresses.items():
        if not isinstance(address, str):
            raise TypeError(
                f"the address of task {index} of job {job!r} must be a string, got {type(address).__name__}: "
                f"{address!r}"
            )
    return {index: addresses[index] for index in sorted(addresses)}


def _index(job: str, key: object) -> int:
    try:
        # JSON has string keys. `int` reads "1_0", too.
        index = int(key if re.fullmatch("-?[0-9]+", key) else "") if isinstance(key, str) else whole("index", key)
    except (TypeError, ValueError):
        raise TypeError(
            f"the keys of job {job!r} of a cluster must be task indices, such as 0 or \"0\", got {key!r}"
        ) from None
    if index < 0:
        raise ValueError(f"task indices must not be negative, got {index} in job {job!r}")
    return index
