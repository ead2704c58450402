"""The topology of a job's ranks, and the assignment of ranks to replicas and their logical devices.

They correspond to TensorFlow's topology of TPUs: a node is a task, a rank a core. Ranks form no torus: only the product
of a shape of cores matters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mpidist.arguments import described, whole
from mpidist.arrays import AnyArray
from mpidist.comm.group.communicator import Communicator
from mpidist.errors import mark_shared
from mpidist.launch import mpirun_line

Coordinates = tuple[int, int, int, int]


class Topology:
    """Local. The nodes of a job and their ranks. The rank at place p of node n has the coordinates (n, 0, 0, p).

    Args:
        node_sizes: Number of ranks of each node.

    Attributes:
        mesh_shape: Number of nodes, 1, 1, and the number of ranks of the largest node.
        mesh_rank: Number of coordinates, 4.
        num_tasks: Number of nodes.
        num_tpus_per_task: Number of ranks of the largest node.
    """

    mesh_rank = 4

    def __init__(self, node_sizes: Sequence[int]) -> None:
        self._sizes = tuple(whole("node_sizes", size, least=1) for size in node_sizes)
        if not self._sizes:
            raise ValueError("`node_sizes` must have a number of ranks for each node, got an empty list")
        self.num_tasks, self.num_tpus_per_task = len(self._sizes), max(self._sizes)
        self.mesh_shape = np.array([self.num_tasks, 1, 1, self.num_tpus_per_task])

    @property
    def node_sizes(self) -> tuple[int, ...]:
        """Local. Number of ranks of each node."""
        return self._sizes

    @property
    def device_coordinates(self) -> AnyArray:
        """Local. The coordinates of all ranks, node by node. Shape (nodes, ranks, 4); -1 where a node has no rank."""
        found = np.full((self.num_tasks, self.num_tpus_per_task, self.mesh_rank), -1)
        for place in self.coordinates():
            found[place[0], place[3]] = place
        return found

    @property
    def missing_devices(self) -> AnyArray:
        """Local. The coordinates that no rank has. Shape (n, 4)."""
        known = set(self.coordinates())
        missing = [place for place in np.ndindex(*self.mesh_shape.tolist()) if place not in known]
        return np.array(missing, int).reshape(-1, self.mesh_rank)

    def coordinates(self) -> list[Coordinates]:
        """Local. The coordinates of all ranks, node by node."""
        return [(node, 0, 0, place) for node, size in enumerate(self._sizes) for place in range(size)]

    def task_ordinal_at_coordinates(self, device_coordinates: Sequence[int]) -> int:
        """Local. The node of the rank with these coordinates; ValueError where there is none."""
        return self._known(device_coordinates)[0]

    def tpu_device_ordinal_at_coordinates(self, device_coordinates: Sequence[int]) -> int:
        """Local. The place on its node of the rank with these coordinates; ValueError where there is none."""
        return self._known(device_coordinates)[3]

    def _known(self, device_coordinates: Sequence[int]) -> Coordinates:
        given = tuple(int(one) for one in device_coordinates)
        for known in self.coordinates():
            if known == given:
                return known
        raise ValueError(
            f"no rank has the coordinates {given}: they are (node, 0, 0, place on the node), of nodes with "
            f"{list(self._sizes)} ranks"
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Topology) and other.node_sizes == self._sizes

    def __hash__(self) -> int:
        return hash(self._sizes)

    def __repr__(self) -> str:
        return f"Topology(node_sizes={list(self._sizes)})"


class DeviceAssignment:
    """Local. The assignment of ranks to the logical devices of each replica.

    Args:
        topology: The ranks.
        core_assignment: The coordinates of the rank of each logical device. Shape (replicas, logical devices, 4).

    Raises:
        ValueError: The shape is wrong, coordinates belong to no rank, or a rank occurs twice.
        TypeError: `topology` is no topology.

    Attributes:
        topology: The constructor's argument.
        core_assignment: The constructor's argument as an array.
        num_replicas: Number of replicas.
        num_cores_per_replica: Number of logical devices of each replica.
    """

    def __init__(self, topology: Topology, core_assignment: npt.ArrayLike) -> None:
        _require_topology(topology)
        cores = np.array(core_assignment)
        if cores.ndim != 3 or cores.shape[2] != topology.mesh_rank or cores.dtype.kind not in "iu" or not cores.size:
            raise ValueError(
                "`core_assignment` must have the shape (replicas, logical devices, 4), of whole numbers, got shape "
                f"{cores.shape} of {cores.dtype}. Use DeviceAssignment.build(topology, computation_shape, num_replicas)"
            )
        places = [tuple(one) for one in cores.reshape(-1, topology.mesh_rank).tolist()]
        for number, place in enumerate(places):
            topology.task_ordinal_at_coordinates(place)
            if place in places[:number]:
                raise ValueError(
                    f"`core_assignment` must name each rank once, got the coordinates {place} twice. Use "
                    "DeviceAssignment.build"
                )
        self.topology = topology
        self.core_assignment = cores
        self.num_replicas, self.num_cores_per_replica = cores.shape[:2]

    @staticmethod
    def build(
        topology: Topology,
        computation_shape: Sequence[int] | None = None,
        computation_stride: Sequence[int] | None = None,
        num_replicas: int = 1,
        device_order_mode: object = None,
    ) -> DeviceAssignment:
        """Local. Build the assignment in which each replica takes the next ranks, node by node.

        A replica thus takes the remaining ranks of a node before it continues on another node.

        Args:
            topology: The ranks, as `initialize_tpu_system` returns them.
            computation_shape: Four numbers, whose product is the number of logical devices of a replica. Default: 1.
            computation_stride: Four ones: ranks form no torus in which they could be apart.
            num_replicas: Number of replicas.
            device_order_mode: An unused argument for code written for TensorFlow: ranks form no torus.

        Raises:
            ValueError: There are too few ranks, or a shape or stride has other numbers.
            TypeError: An argument has another type.
        """
        del device_order_mode
        _require_topology(topology)
        shape = _four("computation_shape", computation_shape)
        stride = _four("computation_stride", computation_stride)
        if math.prod(stride) != 1:
            raise ValueError(
                f"`computation_stride` must be [1, 1, 1, 1], got {list(stride)}: ranks have no torus in which they "
                "could be apart. Leave it out, or name the ranks: DeviceAssignment(topology, core_assignment)"
            )
        devices, replicas = math.prod(shape), whole("num_replicas", num_replicas, least=1)
        places = topology.coordinates()
        if devices * replicas > len(places):
            raise mark_shared(ValueError(
                f"{replicas} replicas of {devices} logical devices take {devices * replicas} ranks, got {len(places)}: "
                f"start as many, {mpirun_line(devices * replicas)}, or make num_replicas={len(places) // devices or 1} "
                f"with a computation_shape of {min(devices, len(places))}"
            ))
        return DeviceAssignment(topology, np.array(places[: devices * replicas]).reshape(replicas, devices, 4))

    def coordinates(self, replica: int, logical_core: int) -> Coordinates:
        """Local. The coordinates of the rank of a logical device of a replica.

        Raises:
            ValueError: There is no such replica or logical device.
        """
        for name, number, count in (
            ("replica", replica, self.num_replicas), ("logical_core", logical_core, self.num_cores_per_replica)
        ):
            if not 0 <= whole(name, number) < count:
                raise ValueError(f"`{name}` must be 0 to {count - 1}, got {number}")
        node, _, _, place = self.core_assignment[replica, logical_core].tolist()
        return node, 0, 0, place

    def lookup_replicas(self, task_id: int, logical_core: int) -> list[int]:
        """Local. The replicas that have their logical device of this number on a node.

        Raises:
            ValueError: There is no such replica.
        """
        found = [
            replica for replica in range(self.num_replicas)
            if 0 <= logical_core < self.num_cores_per_replica
            and self.core_assignment[replica, logical_core, 0] == task_id
        ]
        if not found:
            raise ValueError(
                f"no replica has its logical device {logical_core} on node {task_id}: there are nodes 0 to "
                f"{self.topology.num_tasks - 1} and logical devices 0 to {self.num_cores_per_replica - 1}"
            )
        return found

    def __repr__(self) -> str:
        return f"DeviceAssignment({self.num_replicas} replicas of {self.num_cores_per_replica} logical devices)"


def topology_of(communicator: Communicator) -> Topology:
    """Local. The topology of some ranks."""
    return Topology(communicator.node_sizes)


def ranks_of(communicator: Communicator) -> dict[Coordinates, int]:
    """Collective. The ranks by their coordinates."""
    ranks: dict[Coordinates, int] = {}
    counts: dict[int, int] = {}
    for rank, node in enumerate(communicator.all_gather_object(communicator.node_index)):
        place = counts[node] = counts.get(node, -1) + 1
        ranks[node, 0, 0, place] = rank
    return ranks


def _four(name: str, given: Any) -> tuple[int, ...]:
    if given is None:
        return 1, 1, 1, 1
    if not isinstance(given, (list, tuple, np.ndarray)) or len(given) != Topology.mesh_rank:
        raise ValueError(f"`{name}` must have four numbers, for instance [1, 1, 1, 2], got {described(given)}")
    return tuple(whole(name, int(one) if isinstance(one, np.integer) else one, least=1) for one in given)


def _require_topology(given: object) -> None:
    if not isinstance(given, Topology):
        raise TypeError(
            "`topology` must be what mpidist.tpu.experimental.initialize_tpu_system(resolver) returns, got "
            f"{described(given)}"
        )
