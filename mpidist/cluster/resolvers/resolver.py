"""The cluster resolver: it describes the cluster, and says which task of it this process is."""

from __future__ import annotations

from abc import ABC, abstractmethod

from mpidist.arguments import described, whole
from mpidist.cluster.devices.names import visible_gpus
from mpidist.cluster.spec import ClusterSpec


class ClusterResolver(ABC):
    """Local. The base class of all resolvers. A user's own resolver needs only `cluster_spec` and `master`.

    Each rank has its own resolver. The methods must not communicate, since one rank may call them alone. `task_type`
    and `task_id` may be set. If they are None on all ranks, the strategy assigns the cluster's tasks to the ranks.
    """

    # Class attributes: as in tf.distribute, a subclass need not call this class's constructor.
    _task_type: str | None = None
    _task_id: int | None = None
    _environment: str | None = ""
    _rpc_layer: str | None = None

    @abstractmethod
    def cluster_spec(self) -> ClusterSpec:
        """Local. The cluster; an empty one means a single process."""

    @abstractmethod
    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """Local. The address of a task, `rpc://host:port` or `host:port`; "" in a cluster of one task."""

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: object = None
    ) -> dict[str, int]:
        """Local. The number of accelerators that are visible to this process, by kind; `{}` without any.

        Args:
            task_type: Kept for code written for tf.distribute: a process counts only its own accelerators.
            task_id: Not used, for the same reason.
            config_proto: Not used, for the same reason.
        """
        del task_type, task_id, config_proto  # arguments of tf.distribute
        count = len(visible_gpus())
        return {"GPU": count} if count else {}

    @property
    def task_type(self) -> str | None:
        """Local. This process's job, None where the resolver does not know."""
        return self._task_type

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        self._task_type = checked_type(task_type)

    @property
    def task_id(self) -> int | None:
        """Local. This process's index in its job, None where the resolver does not know."""
        return self._task_id

    @task_id.setter
    def task_id(self, task_id: int | None) -> None:
        self._task_id = checked_id(task_id)

    @property
    def environment(self) -> str | None:
        """Local. A name for the environment in which the cluster runs; usually empty."""
        return self._environment

    @property
    def rpc_layer(self) -> str | None:
        """Local. The prefix of addresses that `master` returns."""
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
    """Local. The address of a task, as `master` returns it.

    Returns:
        "" for an empty cluster and for a cluster of a single task, which needs no address.

    Raises:
        ValueError: There is no such task; or no task is named, and there are several.
    """
    tasks = spec.tasks
    if len(tasks) <= 1:
        return ""
    if task_type is None or task_id is None:
        raise ValueError(
            f"No such job in cluster: {task_type!r}, task {task_id!r}: the cluster has {len(tasks)} tasks. Name one by "
            "`task_type` and `task_id`"
        )
    return format_address(spec.task_address(task_type, task_id), rpc_layer)


def checked_type(task_type: str | None) -> str | None:
    """Local. The name of a job, or None.

    Raises:
        TypeError: It is something else.
    """
    if task_type is not None and not isinstance(task_type, str):
        raise TypeError(f"`task_type` must be the name of a job, or None, got {described(task_type)}")
    return task_type


def checked_id(task_id: int | None) -> int | None:
    """Local. The number of a task, or None.

    Raises:
        TypeError: It is no integer.
        ValueError: It is negative.
    """
    return None if task_id is None else whole("task_id", task_id, least=0)
