"""What a cluster resolver is: it says which cluster this process belongs to, and which task of it this process is."""

from __future__ import annotations

from abc import ABC, abstractmethod

from mpidist.cluster.devices import visible_gpus
from mpidist.cluster.spec import ClusterSpec


class ClusterResolver(ABC):
    """Base of all resolvers, and of a user's own: only `cluster_spec` and `master` have to be written.

    A resolver is asked on every rank and does not communicate when asked. `task_type` and `task_id` may be set; None
    on all ranks leaves it to the strategy to deal the cluster's tasks to the ranks.
    """

    # Class attributes, so that a subclass need not call a constructor here, as in tf.distribute.
    _task_type: str | None = None
    _task_id: int | None = None
    _environment: str | None = ""
    _rpc_layer: str | None = None

    @abstractmethod
    def cluster_spec(self) -> ClusterSpec:
        """Local. The cluster; an empty one means one process on its own."""

    @abstractmethod
    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """Local. Address of a task, `rpc://host:port` or `host:port`; "" where there is only one."""

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: object = None
    ) -> dict[str, int]:
        """Local. Accelerators that this process can see, by kind; `{}` without any.

        Args:
            task_type: Taken for compatibility: a process can count its own only.
            task_id: Likewise.
            config_proto: Likewise.
        """
        count = len(visible_gpus())
        return {"GPU": count} if count else {}

    @property
    def task_type(self) -> str | None:
        """Local. This process's job, None where the resolver does not know."""
        return self._task_type

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        self._task_type = task_type

    @property
    def task_id(self) -> int | None:
        """Local. This process's index in its job, None where the resolver does not know."""
        return self._task_id

    @task_id.setter
    def task_id(self, task_id: int | None) -> None:
        self._task_id = task_id

    @property
    def environment(self) -> str | None:
        """Local. A word for where the cluster runs, mostly empty."""
        return self._environment

    @property
    def rpc_layer(self) -> str | None:
        """Local. Prefix of the addresses that `master` gives."""
        return self._rpc_layer

    @rpc_layer.setter
    def rpc_layer(self, rpc_layer: str | None) -> None:
        self._rpc_layer = rpc_layer


def format_address(address: str, rpc_layer: str | None) -> str:
    """Local. `rpc://address`, or the bare address without an rpc layer."""
    return f"{rpc_layer}://{address}" if rpc_layer and address else address


def find_master(
    spec: ClusterSpec, task_type: str | None, task_id: int | None, rpc_layer: str | None
) -> str:
    """Local. The address that `master` gives for a task of a cluster.

    Returns:
        "" for an empty cluster and for one of a single task, which needs no address.

    Raises:
        ValueError: There is no such task, or several tasks and none was named.
    """
    tasks = spec.tasks
    if len(tasks) <= 1:
        return ""
    if task_type is None or task_id is None:
        raise ValueError(
            f"No such job in cluster: {task_type!r}, task {task_id!r}: the cluster has {len(tasks)} tasks, name one "
            "by `task_type` and `task_id`"
        )
    return format_address(spec.task_address(task_type, task_id), rpc_layer)
