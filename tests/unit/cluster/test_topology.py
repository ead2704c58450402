"""Topologies and device assignments: which rank is which logical device of which replica."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpidist.cluster.devices.topology import DeviceAssignment, Topology
from mpidist.tpu import experimental


def test_a_topology_has_nodes_and_places() -> None:
    topology = Topology([2, 3])
    assert topology.mesh_shape.tolist() == [2, 1, 1, 3]
    assert (topology.mesh_rank, topology.num_tasks, topology.num_tpus_per_task) == (4, 2, 3)
    assert topology.device_coordinates.shape == (2, 3, 4)
    assert topology.device_coordinates[0].tolist() == [[0, 0, 0, 0], [0, 0, 0, 1], [-1] * 4]
    assert topology.missing_devices.tolist() == [[0, 0, 0, 2]]
    assert topology.task_ordinal_at_coordinates([1, 0, 0, 2]) == 1
    assert topology.tpu_device_ordinal_at_coordinates([1, 0, 0, 2]) == 2
    with pytest.raises(ValueError, match=r"no rank has the coordinates \(0, 0, 0, 2\)"):
        topology.task_ordinal_at_coordinates([0, 0, 0, 2])
    assert topology == Topology((2, 3)) != Topology([3, 2])
    assert len({topology, Topology([2, 3])}) == 1


@pytest.mark.parametrize("shape", [[1, 1, 1, 2], [2, 1, 1, 1], (1, 2, 1, 1), np.array([1, 1, 2, 1])])
def test_of_a_shape_the_product_counts(shape: Any) -> None:
    assignment = DeviceAssignment.build(Topology([4, 4]), computation_shape=shape, num_replicas=4)
    assert (assignment.num_replicas, assignment.num_cores_per_replica) == (4, 2)
    assert [assignment.coordinates(r, c)[::3] for r in range(4) for c in range(2)] == [
        (0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1), (1, 2), (1, 3)
    ]
    assert assignment.lookup_replicas(0, 1) == [0, 1]
    assert assignment.lookup_replicas(1, 0) == [2, 3]


def test_a_replica_fills_a_node_before_it_crosses_to_another() -> None:
    assignment = DeviceAssignment.build(Topology([3, 3]), computation_shape=[1, 2, 1, 1], num_replicas=3)
    assert assignment.core_assignment[:, :, 0].tolist() == [[0, 0], [0, 1], [1, 1]]
    wide = DeviceAssignment.build(Topology([4, 4]), computation_shape=[1, 2, 2, 2])
    assert (wide.num_replicas, wide.num_cores_per_replica) == (1, 8)
    assert DeviceAssignment.build(Topology([2])).num_cores_per_replica == 1


def test_what_does_not_fit_is_an_error_that_says_how_many_ranks_would() -> None:
    topology = Topology([4])
    with pytest.raises(ValueError, match=r"4 replicas of 2 logical devices take 8 ranks, got 4.*mpirun -n 8"):
        DeviceAssignment.build(topology, computation_shape=[1, 1, 1, 2], num_replicas=4)
    for shape in ([1, 1, 2], [0, 1, 1, 1], "1112", 2):
        with pytest.raises(ValueError, match="computation_shape"):
            DeviceAssignment.build(topology, computation_shape=shape)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"must be \[1, 1, 1, 1\], got \[1, 1, 1, 2\]"):
        DeviceAssignment.build(topology, computation_stride=[1, 1, 1, 2])
    with pytest.raises(ValueError, match="num_replicas"):
        DeviceAssignment.build(topology, num_replicas=0)
    with pytest.raises(TypeError, match="initialize_tpu_system"):
        DeviceAssignment.build(None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"shape \(replicas, logical devices, 4\)"):
        DeviceAssignment(topology, [[0, 0, 0, 0]])
    with pytest.raises(ValueError, match="twice"):
        DeviceAssignment(topology, [[[0, 0, 0, 1]], [[0, 0, 0, 1]]])
    with pytest.raises(ValueError, match="no rank has the coordinates"):
        DeviceAssignment(topology, [[[0, 0, 0, 4]]])
    assignment = DeviceAssignment.build(topology, num_replicas=4)
    for replica, core in ((4, 0), (0, 1), (-1, 0)):
        with pytest.raises(ValueError, match="must be 0 to"):
            assignment.coordinates(replica, core)
    with pytest.raises(ValueError, match="no replica has its logical device 0 on node 1"):
        assignment.lookup_replicas(1, 0)


def test_the_topology_of_a_process_alone() -> None:
    assert experimental.initialize_tpu_system().node_sizes == (1,)
    with pytest.raises(AttributeError, match="HardwareFeature"):
        _ = experimental.HardwareFeature  # type: ignore[attr-defined]
