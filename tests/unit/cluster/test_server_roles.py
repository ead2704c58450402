"""The roles under parameter servers: what clusters are refused, and one process that has all roles."""

from __future__ import annotations

import re

import pytest

from mpidist.cluster.resolvers.mpi import MPIClusterResolver
from mpidist.cluster.resolvers.resolver import ClusterResolver
from mpidist.cluster.resolvers.simple import SimpleClusterResolver
from mpidist.cluster.resolvers.tf_config import TFConfigClusterResolver
from mpidist.cluster.roles.server_roles import agree_on_roles, check_server_cluster
from mpidist.cluster.spec import ClusterSpec, Task
from mpidist.comm.group.solo import SoloCommunicator
from mpidist.errors import LauncherError

JOBS = {"chief": 1, "worker": 2, "ps": 2, "evaluator": 1}


def cluster(**counts: int) -> ClusterSpec:
    """As many tasks of each job, 0 for none, each at an address of its own."""
    jobs = {**JOBS, **counts}
    return ClusterSpec({job: [f"{job}{index}:1" for index in range(count)] for job, count in jobs.items() if count})


@pytest.mark.parametrize(
    ("spec", "task", "text"),
    [
        (ClusterSpec({}), None, r"must not be empty.*got no job.*MPIClusterResolver\(num_ps=1\).*mpirun -n 3 python"),
        (cluster(foobar=1), None, r"the cluster has \['foobar'\].*takes the jobs 'chief', 'worker', 'ps', 'evaluator'"),
        (cluster(master=1), None, r"\['master'\].*takes the jobs 'chief', .*Did you mean 'chief' by 'master'\?$"),
        (cluster(), Task("Worker", 0), "one of 'chief'.*Did you mean 'worker' by 'Worker'"),
        (cluster(), Task("foobar", 0), "unrecognized task type 'foobar' of this rank; expected one of 'chief'"),
        (cluster(chief=2), None, "at most one chief in the cluster, got 2"),
        (cluster(evaluator=3), None, "at most one evaluator in the cluster, got 3"),
        (cluster(ps=0), None, r"at least one ps in the cluster.*got \{'chief': 1, 'worker': 2.*mpirun -n 4 python"),
        (cluster(worker=0), None, "at least one worker in the cluster.*mpirun -n 4 python"),
        (cluster(chief=0), None, "at least one chief in the cluster.*mpirun -n 5 python"),
        (cluster(), Task("worker", 2), r"told that it is worker 2, and the cluster has 2 task\(s\) of the job 'w"),
        (cluster(), Task("ps", -1), r"told that it is ps -1, and the cluster has 2 task\(s\)"),
    ],
)
def test_what_a_cluster_lacks_is_said_with_the_way_out(spec: ClusterSpec, task: Task | None, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        check_server_cluster(spec, task)


@pytest.mark.parametrize("task", [None, *(Task(job, 0) for job in JOBS), Task("ps", 1)])
@pytest.mark.parametrize("evaluator", [0, 1])
def test_a_whole_cluster_is_taken(task: Task | None, evaluator: int) -> None:
    # An evaluator need not be listed.
    check_server_cluster(cluster(evaluator=evaluator), task)


@pytest.mark.parametrize(
    "resolver",
    [
        None, TFConfigClusterResolver(), MPIClusterResolver(SoloCommunicator(), num_ps=1),
        MPIClusterResolver(SoloCommunicator(), num_ps=3, num_evaluators=1),
    ],
    ids=["nothing", "no TF_CONFIG", "one server", "three servers and an evaluator"],
)
def test_a_process_alone_has_all_roles(resolver: ClusterResolver | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    ranks = SoloCommunicator()
    roles = agree_on_roles(ranks, resolver)
    assert roles.is_one_process
    assert roles.group is ranks
    assert (roles.task_type, roles.task_id) == ("chief", 0)
    assert (roles.chief, roles.workers, roles.servers) == (0, (0,), (0,))
    assert roles.name_of(0) == "chief 0"
    assert resolver is None or roles.resolver is resolver


def test_a_process_alone_is_a_chief_in_its_resolver() -> None:
    resolver = MPIClusterResolver(SoloCommunicator(), num_ps=2)
    assert (resolver.task_type, resolver.task_id) == ("chief", 0)
    assert {job: resolver.cluster_spec().num_tasks(job) for job in resolver.cluster_spec().jobs} == {
        "chief": 1, "worker": 1, "ps": 1,
    }
    assert MPIClusterResolver(SoloCommunicator()).cluster_spec().jobs == ["worker"]
    assert MPIClusterResolver(SoloCommunicator(), num_evaluators=1).cluster_spec().jobs == ["worker"]


@pytest.mark.parametrize("task", [Task("chief", 0), None])
def test_a_cluster_of_several_addresses_needs_a_launcher(task: Task | None) -> None:
    resolver = SimpleClusterResolver(cluster(evaluator=0), task_type=None if task is None else task.job, task_id=0)
    with pytest.raises(LauncherError, match=r"no launcher started this program.*mpirun -n 5 python"):
        agree_on_roles(SoloCommunicator(), resolver)


def test_one_task_is_not_the_whole_cluster() -> None:
    resolver = SimpleClusterResolver(ClusterSpec({"worker": ["a:1"]}), task_type="worker", task_id=0)
    with pytest.raises(ValueError, match="at least one ps in the cluster"):
        agree_on_roles(SoloCommunicator(), resolver)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"num_ps": -1}, ValueError, "`num_ps` must be an integer of at least 0, got -1"),
        ({"num_ps": 1.5}, TypeError, "`num_ps` must be an integer of at least 0, got 1.5"),
        ({"num_evaluators": True}, TypeError, "`num_evaluators` must be an integer of at least 0, got True"),
    ],
)
def test_impossible_numbers(arguments: dict[str, int], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=re.escape(text)):
        MPIClusterResolver(SoloCommunicator(), **arguments)
