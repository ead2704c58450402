"""Roles under parameter servers across ranks: every rank comes to the same roles, or raises the same error."""

from __future__ import annotations

import json

import pytest

from mpidist import first_rank
from mpidist.cluster.resolvers.mpi import MPIClusterResolver
from mpidist.cluster.resolvers.simple import SimpleClusterResolver
from mpidist.cluster.roles.server_roles import agree_on_roles
from mpidist.cluster.spec import ClusterSpec
from mpidist.comm.group.communicator import Communicator
from mpidist.errors import LauncherError, MismatchError
from mpidist.strategy.parameter_server.strategy import ParameterServerStrategy

pytestmark = pytest.mark.mpi(min_size=3)


def jobs_of(size: int, *, evaluator: bool = False) -> list[tuple[str, int]]:
    """A chief, a server, and the others are workers, in the order of a group."""
    count = size - 2 - evaluator
    tasks = [("chief", 0), *(("worker", index) for index in range(count)), ("ps", 0)]
    return [*tasks, ("evaluator", 0)] if evaluator else tasks


def spec_of(tasks: list[tuple[str, int]]) -> dict[str, list[str]]:
    jobs: dict[str, list[str]] = {}
    for job, index in tasks:
        jobs.setdefault(job, []).append(f"{job}{index}:1")
    return jobs


@pytest.mark.parametrize("names", [("ps", "worker"), ("first", "second"), ("worker", "ps")])
def test_components_of_a_heterogeneous_slurm_job_are_the_roles(
    communicator: Communicator, names: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One task in the component on node n2, which comes first, and all others in that on n1."""
    size = communicator.size
    monkeypatch.delenv("TF_CONFIG", raising=False)
    for name, value in {
        "SLURM_PROCID": str(communicator.rank), "SLURM_STEP_NUM_TASKS": str(size), "SLURM_STEP_NODELIST": "n[1-2]",
        "SLURM_STEP_TASKS_PER_NODE": f"{size - 1},1", "SLURM_JOB_NODELIST_HET_GROUP_0": "n2",
        "SLURM_JOB_NODELIST_HET_GROUP_1": "n1", "SLURM_JOB_NAME_HET_GROUP_0": names[0],
        "SLURM_JOB_NAME_HET_GROUP_1": names[1],
    }.items():
        monkeypatch.setenv(name, value)
    if names == ("worker", "ps"):
        # The only worker became the chief.
        with pytest.raises(ValueError, match="there must be at least one worker in the cluster"):
            agree_on_roles(communicator)
        return
    roles = agree_on_roles(communicator)
    expected = [("ps", 0), ("chief", 0), *(("worker", index) for index in range(size - 2))]
    assert (roles.task_type, roles.task_id) == expected[communicator.rank]
    assert (roles.chief, roles.workers, roles.servers) == (0, tuple(range(1, size - 1)), (size - 1,))
    assert roles.group.rank == (communicator.rank - 1) % size


@pytest.mark.parametrize("turn", [0, 1, 2])
@pytest.mark.parametrize("evaluator", [False, True])
def test_roles_of_tf_config_in_any_order(
    communicator: Communicator, turn: int, evaluator: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = communicator.size
    if evaluator and size < 4:
        pytest.skip("a chief, a worker, a server and an evaluator")
    tasks = jobs_of(size, evaluator=evaluator)
    job, index = tasks[(communicator.rank + turn) % size]
    monkeypatch.setenv(
        "TF_CONFIG", json.dumps({"cluster": spec_of(tasks), "task": {"type": job, "index": index}})
    )
    roles = agree_on_roles(communicator)
    assert (roles.task_type, roles.task_id) == (job, index)
    assert (roles.resolver.task_type, roles.resolver.task_id) == (job, index)
    assert not roles.is_one_process
    if job == "evaluator":
        assert (roles.group.size, roles.chief, roles.workers, roles.servers) == (1, 0, (), ())
        assert roles.name_of(0) == "evaluator 0"
        assert first_rank.is_chief()
    else:
        workers = size - 2 - evaluator
        assert (roles.chief, roles.workers) == (0, tuple(range(1, 1 + workers)))
        assert roles.servers == (1 + workers,)
        assert roles.group.rank == tasks.index((job, index))
        # The group really is in this order, and the evaluator is not in it.
        assert roles.group.all_gather_object((job, index)) == tasks[: size - evaluator]
        assert [roles.name_of(rank) for rank in range(roles.group.size)] == [
            f"{name} {number}" for name, number in tasks[: size - evaluator]
        ]
        assert first_rank.is_chief() == (job == "chief")
    with pytest.raises(ValueError, match=f"expected a rank from 0 to {roles.group.size - 1}, got {size}"):
        roles.name_of(size)
    assert (roles.group is communicator) == (turn == 0 and not evaluator)
    if roles.group is not communicator:
        roles.group.close()


def test_roles_are_dealt_by_rank(communicator: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    size = communicator.size
    resolver = MPIClusterResolver(communicator, num_ps=1, num_evaluators=int(size > 3))
    tasks = jobs_of(size, evaluator=size > 3)
    assert (resolver.task_type, resolver.task_id) == tasks[communicator.rank]
    assert resolver.cluster_spec().task_address(*tasks[communicator.rank]).endswith(f":{communicator.rank}")
    roles = agree_on_roles(communicator, resolver)
    assert (roles.task_type, roles.task_id) == tasks[communicator.rank]
    assert roles.resolver is resolver
    if roles.group is not communicator:
        roles.group.close()


def test_untold_tasks_are_dealt_and_told_to_the_detected_resolver(
    communicator: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = jobs_of(communicator.size)
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": spec_of(tasks)}))
    roles = agree_on_roles(communicator)
    assert (roles.resolver.task_type, roles.resolver.task_id) == tasks[communicator.rank]


# The errors of tf.distribute's ParameterServerStrategy: the cluster without some jobs and with others, this rank's task
# where it is not its own, and the text.
CLUSTERS: dict[str, tuple[dict[str, list[str]], tuple[str, int] | None, str]] = {
    "an empty one": ({"chief": [], "worker": [], "ps": []}, None, "the cluster must not be empty"),
    "an unknown job": ({"foobar": ["x:1"]}, None, r"the cluster has \['foobar'\]"),
    "an unknown task": ({}, ("foobar", 0), "unrecognized task type 'foobar' of this rank"),
    "two chiefs": ({"chief": ["x:1", "y:1"]}, None, "at most one chief in the cluster, got 2"),
    "two evaluators": ({"evaluator": ["x:1", "y:1"]}, None, "at most one evaluator in the cluster, got 2"),
    "no server": ({"ps": []}, None, "at least one ps in the cluster"),
    "no worker": ({"worker": []}, None, "at least one worker in the cluster"),
    "no chief": ({"chief": []}, None, "at least one chief in the cluster"),
    "an index too large": ({}, ("worker", 99), "told that it is worker 99"),
}


@pytest.mark.parametrize("name", CLUSTERS)
def test_each_error_of_a_cluster_is_that_of_every_rank(communicator: Communicator, name: str) -> None:
    jobs, told, text = CLUSTERS[name]
    tasks = jobs_of(communicator.size)
    job, index = told or tasks[communicator.rank]
    spec = ClusterSpec({job: tasks for job, tasks in {**spec_of(tasks), **jobs}.items() if tasks})
    with pytest.raises(ValueError, match=text) as caught:
        ParameterServerStrategy(SimpleClusterResolver(spec, task_type=job, task_id=index))
    assert len(set(communicator.all_gather_object(str(caught.value)))) == 1


def test_what_one_rank_is_told_wrong_is_one_error(communicator: Communicator) -> None:
    tasks = jobs_of(communicator.size)
    job, index = tasks[communicator.rank]
    last = communicator.size - 1
    spec = ClusterSpec(spec_of(tasks))
    resolver = SimpleClusterResolver(spec, task_type=job, task_id=7 if communicator.rank == last else index)
    with pytest.raises(ValueError, match=rf"failed on rank {last} .*told that it is ps 7") as caught:
        agree_on_roles(communicator, resolver)
    assert len(set(communicator.all_gather_object(str(caught.value)))) == 1


def test_without_a_description_there_is_no_server(
    communicator: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    with pytest.raises(ValueError, match=r"at least one ps .*MPIClusterResolver\(num_ps=1\).*mpirun -n \d python"):
        agree_on_roles(communicator)


def test_tasks_and_ranks_that_do_not_fit_are_one_error(communicator: Communicator) -> None:
    spec = ClusterSpec(spec_of(jobs_of(communicator.size + 1)))
    with pytest.raises(LauncherError, match=rf"mpirun -n {communicator.size + 1} python"):
        agree_on_roles(communicator, SimpleClusterResolver(spec))


def test_different_numbers_of_servers_are_one_error(communicator: Communicator) -> None:
    with pytest.raises(MismatchError, match=r"\(num_ps, num_evaluators\) must be the same .*\(1, 0\) on rank 0"):
        MPIClusterResolver(communicator, num_ps=1 if communicator.rank == 0 else 2)


@pytest.mark.parametrize("evaluators", [0, 1])
def test_too_few_ranks_for_the_servers_are_one_error(communicator: Communicator, evaluators: int) -> None:
    size = communicator.size
    with pytest.raises(ValueError, match=rf"{size} ranks are too few .* mpirun -n {2 + size + evaluators} python"):
        MPIClusterResolver(communicator, num_ps=size, num_evaluators=evaluators)


def test_a_wrong_number_on_one_rank_is_one_error(communicator: Communicator) -> None:
    with pytest.raises(ValueError, match=r"failed on rank 1 .*`num_ps` must be an integer of at least 0"):
        MPIClusterResolver(communicator, num_ps=-1 if communicator.rank == 1 else 1)
