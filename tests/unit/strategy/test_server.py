"""`Server` as programs of tf.distribute write it: its arguments, and where it is of no use."""

from __future__ import annotations

import re
from typing import Any

import pytest

from mpidist.cluster.resolvers.mpi import MPIClusterResolver
from mpidist.comm.group.solo import SoloCommunicator
from mpidist.errors import LauncherError
from mpidist.strategy.parameter_server.server import Server

CLUSTER = {"chief": ["a:1"], "worker": ["b:1", "c:1"], "ps": ["d:1"]}


@pytest.mark.parametrize(
    ("arguments", "target"),
    [
        ({"job_name": "worker", "task_index": 1}, "grpc://c:1"),
        ({"job_name": "worker", "task_index": 1, "protocol": "grpc+verbs"}, "grpc+verbs://c:1"),
        ({"job_name": "ps", "config": object(), "start": False}, "grpc://d:1"),
    ],
)
def test_a_target_is_the_address_of_the_task(arguments: dict[str, Any], target: str) -> None:
    server = Server(CLUSTER, **arguments)
    server.start()
    assert server.target == target


def test_the_only_task_needs_no_name() -> None:
    assert Server({"worker": {3: "x:1"}}).target == "grpc://x:1"


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({}, ValueError, "Must specify an explicit `job_name`: the cluster has the jobs ['chief', 'worker', 'ps']"),
        ({"job_name": "worker"}, ValueError, "Must specify an explicit `task_index`: the job 'worker' has the tasks"),
        ({"job_name": "foobar"}, ValueError, "No such job in cluster: 'foobar'"),
        ({"job_name": "ps", "task_index": 1}, ValueError, "No task with index 1 in job 'ps'"),
        ({"job_name": "ps", "task_index": 0.0}, TypeError, "`task_index` must be an integer of at least 0, got 0.0"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=re.escape(text)):
        Server(CLUSTER, **arguments)


def test_what_is_no_cluster_is_refused() -> None:
    wrong: Any = ["a:1"]
    with pytest.raises(TypeError, match="a cluster must be a dict from job names to addresses"):
        Server(wrong)


def test_a_chief_serves_nobody() -> None:
    server = Server(CLUSTER, job_name="chief")
    with pytest.raises(ValueError, match=r"got 'chief', which runs no server.*ParameterServerStrategy on the chief"):
        server.join()


@pytest.mark.parametrize("is_one_process", [True, False])
def test_a_server_needs_a_launcher(is_one_process: bool) -> None:
    spec = MPIClusterResolver(SoloCommunicator(), num_ps=1).cluster_spec() if is_one_process else CLUSTER
    ranks = 3 if is_one_process else 4
    with pytest.raises(LauncherError, match=rf"no rank would connect to the server of ps 0.*mpirun -n {ranks} python"):
        Server(spec, job_name="ps").join()
