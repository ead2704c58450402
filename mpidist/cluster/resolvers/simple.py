"""The resolver for a cluster that the program itself describes."""

from __future__ import annotations

from collections.abc import Mapping

from mpidist.cluster.resolvers.resolver import ClusterResolver, checked_id, checked_type, format_address
from mpidist.cluster.spec import ClusterSpec


class SimpleClusterResolver(ClusterResolver):
    """Local. Returns the arguments of its constructor.

    Args:
        cluster_spec: The cluster.
        master: The result of `master()` where no task is named.
        task_type: This process's job.
        task_id: This process's index in its job.
        environment: A name for the environment in which the cluster runs.
        num_accelerators: The result of `num_accelerators()`. Default: none.
        rpc_layer: Prefix of the addresses.

    Raises:
        TypeError: `cluster_spec` is not a `ClusterSpec`, `master` or `task_type` is not a string, or `task_id` is no
            integer.
        ValueError: `task_id` is negative.
    """

    def __init__(  # tf.distribute's signature
        self,
        cluster_spec: ClusterSpec,
        master: str = "",
        task_type: str | None = None,
        task_id: int | None = None,
        environment: str = "",
        num_accelerators: Mapping[str, int] | None = None,
        rpc_layer: str | None = None,
    ) -> None:
        if not isinstance(cluster_spec, ClusterSpec):
            raise TypeError(
                f"`cluster_spec` must be a ClusterSpec, got {type(cluster_spec).__name__}: {cluster_spec!r}. Wrap a "
                "dict: ClusterSpec({...})"
            )
        if not isinstance(master, str):
            raise TypeError(f"`master` must be a string, got {type(master).__name__}: {master!r}")
        if num_accelerators is not None and not isinstance(num_accelerators, Mapping):
            raise TypeError(
                '`num_accelerators` must be a dict from kind to number, for instance {"GPU": 2}, or None, got '
                f"{type(num_accelerators).__name__}: {num_accelerators!r}"
            )
        self._cluster_spec = cluster_spec
        self._master = master
        self._task_type = checked_type(task_type)
        self._task_id = checked_id(task_id)
        self._environment = environment
        self._num_accelerators = dict(num_accelerators or {})
        self._rpc_layer = rpc_layer

    def cluster_spec(self) -> ClusterSpec:
        """Local. The cluster given at construction."""
        return self._cluster_spec

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """Local. The address of the named task; the constructor's `master` unless both arguments are given.

        Raises:
            ValueError: There is no such task.
        """
        layer = rpc_layer or self._rpc_layer
        if task_type is None or task_id is None:
            return format_address(self._master, layer)
        return format_address(self._cluster_spec.task_address(task_type, task_id), layer)

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: object = None
    ) -> dict[str, int]:
        """Local. The accelerators given at construction."""
        del task_type, task_id, config_proto  # arguments of tf.distribute
        return dict(self._num_accelerators)
