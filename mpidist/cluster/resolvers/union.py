"""The resolver that joins the clusters of several resolvers."""

from __future__ import annotations

from collections.abc import Mapping

from mpidist.cluster.resolvers.resolver import ClusterResolver, checked_id, checked_type, find_master
from mpidist.cluster.spec import ClusterSpec


class UnionResolver(ClusterResolver):
    """Local. Joins several clusters into one. The first resolver says which task this process is.

    Args:
        resolvers: At least one.
        rpc_layer: Replaces that of the first resolver.
        task_type: Replaces that of the first resolver.
        task_id: Replaces that of the first resolver; 0 counts as given.

    Raises:
        ValueError: No resolver was given.
        TypeError: An argument is not a `ClusterResolver`.
    """

    def __init__(
        self,
        *resolvers: ClusterResolver,
        rpc_layer: str | None = None,
        task_type: str | None = None,
        task_id: int | None = None,
    ) -> None:
        if not resolvers:
            raise ValueError("UnionResolver: expected at least one ClusterResolver, got none")
        for resolver in resolvers:
            if not isinstance(resolver, ClusterResolver):
                raise TypeError(
                    f"UnionResolver joins ClusterResolvers, got {type(resolver).__name__}: {resolver!r}"
                )
        self._resolvers = resolvers
        first = resolvers[0]
        self._rpc_layer = first.rpc_layer if rpc_layer is None else rpc_layer
        self._task_type = first.task_type if task_type is None else checked_type(task_type)
        self._task_id = first.task_id if task_id is None else checked_id(task_id)
        self._environment = first.environment

    def cluster_spec(self) -> ClusterSpec:
        """Local. The joined cluster. Lists of one job are concatenated in their order, mappings are merged.

        Raises:
            KeyError: Two resolvers name the same index of a job.
        """
        tasks_of_job: dict[str, list[list[str] | dict[int, str]]] = {}
        for resolver in self._resolvers:
            for job, tasks in resolver.cluster_spec().as_dict().items():
                tasks_of_job.setdefault(job, []).append(tasks)
        return ClusterSpec({job: _join(job, given) for job, given in tasks_of_job.items()})

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """Local. The address of a task in the joined cluster; without a task, the first resolver's `master()`.

        Raises:
            ValueError: There is no such task.
        """
        layer = rpc_layer or self._rpc_layer
        if task_type is None or task_id is None:
            return self._resolvers[0].master(rpc_layer=layer)
        return find_master(self.cluster_spec(), task_type, task_id, layer)

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: object = None
    ) -> dict[str, int]:
        """Local. The accelerators that the first resolver counts."""
        return self._resolvers[0].num_accelerators(task_type, task_id, config_proto)


def _join(job: str, given: list[list[str] | dict[int, str]]) -> dict[int, str]:
    lists = [tasks for tasks in given if isinstance(tasks, list)]
    if len(lists) == len(given):
        return dict(enumerate(address for tasks in lists for address in tasks))
    joined: dict[int, str] = {}
    for tasks in given:
        for index, address in tasks.items() if isinstance(tasks, Mapping) else enumerate(tasks):
            if index in joined:
                raise KeyError(
                    f"task {index} of job {job!r} is in two of the joined clusters: {joined[index]!r} and {address!r}. "
                    "Give it another index in one of them"
                )
            joined[index] = address
    return joined
