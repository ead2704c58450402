"""The resolver that joins the clusters of several."""

from __future__ import annotations

from collections.abc import Mapping

from mpidist.cluster.resolver import ClusterResolver, find_master
from mpidist.cluster.spec import ClusterSpec


class UnionResolver(ClusterResolver):
    """One cluster out of several; who this process is, the first resolver says unless overridden.

    Args:
        resolvers: At least one.
        rpc_layer: Overrides the first resolver's.
        task_type: Overrides the first resolver's.
        task_id: Overrides the first resolver's; 0 counts as given.

    Raises:
        ValueError: No resolver was given.
        TypeError: One of them is no `ClusterResolver`.
    """

    def __init__(
        self,
        *resolvers: ClusterResolver,
        rpc_layer: str | None = None,
        task_type: str | None = None,
        task_id: int | None = None,
    ) -> None:
        if not resolvers:
            raise ValueError("UnionResolver needs at least one ClusterResolver, got none")
        for resolver in resolvers:
            if not isinstance(resolver, ClusterResolver):
                raise TypeError(
                    f"UnionResolver joins ClusterResolvers, got {type(resolver).__name__}: {resolver!r}"
                )
        self._resolvers = resolvers
        first = resolvers[0]
        self._rpc_layer = first.rpc_layer if rpc_layer is None else rpc_layer
        self._task_type = first.task_type if task_type is None else task_type
        self._task_id = first.task_id if task_id is None else task_id
        self._environment = first.environment

    def cluster_spec(self) -> ClusterSpec:
        """Local. The joined cluster: lists of one job are concatenated in order, mappings are merged.

        Raises:
            KeyError: Two resolvers name the same index of a job.
        """
        parts: dict[str, list[list[str] | dict[int, str]]] = {}
        for resolver in self._resolvers:
            for job, tasks in resolver.cluster_spec().as_dict().items():
                parts.setdefault(job, []).append(tasks)
        return ClusterSpec({job: _join(job, tasks) for job, tasks in parts.items()})

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """Local. Address of the task in the joined cluster, or what the first resolver gives when none is named.

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
        """Local. What the first resolver says."""
        return self._resolvers[0].num_accelerators(task_type, task_id, config_proto)


def _join(job: str, parts: list[list[str] | dict[int, str]]) -> dict[int, str]:
    lists = [part for part in parts if isinstance(part, list)]
    if len(lists) == len(parts):
        return dict(enumerate(address for part in lists for address in part))
    joined: dict[int, str] = {}
    for part in parts:
        for index, address in part.items() if isinstance(part, Mapping) else enumerate(part):
            if index in joined:
                raise KeyError(
                    f"task {index} of job {job!r} is in two of the joined clusters: {joined[index]!r} and {address!r}"
                )
            joined[index] = address
    return joined
