"""Clusters across ranks: every rank comes to the same placement, or raises the same error."""

from __future__ import annotations

import json
import os

import pytest

import mpidist
from mpidist import first_rank, launch
from mpidist.cluster.detect import detect
from mpidist.cluster.resolvers.mpi import MPIClusterResolver
from mpidist.cluster.resolvers.simple import SimpleClusterResolver
from mpidist.cluster.resolvers.slurm import SlurmClusterResolver
from mpidist.cluster.roles.placement import EVALUATOR_GROUP, TRAINING_GROUP, place
from mpidist.cluster.spec import ClusterSpec
from mpidist.comm.group.communicator import Communicator
from mpidist.errors import LauncherError, MismatchError
from mpidist.strategy.multi_worker import MultiWorkerMirroredStrategy
from mpidist.testing import fake_nodes

pytestmark = pytest.mark.mpi


def workers(count: int) -> dict[str, list[str]]:
    return {"worker": [f"host:{index}" for index in range(count)]}


def set_tf_config(monkeypatch: pytest.MonkeyPatch, config: object) -> None:
    monkeypatch.setenv("TF_CONFIG", config if isinstance(config, str) else json.dumps(config))


def test_ranks_are_the_cluster(communicator: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    monkeypatch.delenv("SLURM_PROCID", raising=False)
    resolver = detect(communicator)
    assert isinstance(resolver, MPIClusterResolver)
    assert resolver.cluster_spec().num_tasks("worker") == communicator.size
    assert resolver.cluster_spec().task_address("worker", communicator.rank).endswith(f":{communicator.rank}")
    assert resolver.task_id == communicator.rank
    placement = place(communicator, resolver)
    assert (placement.group, placement.replica_key) == (TRAINING_GROUP, communicator.rank)
    assert placement.as_launched


@pytest.mark.mpi(min_size=2)
def test_the_launcher_is_seen_or_what_it_has_started(communicator: Communicator) -> None:
    assert not launch.has_lost_launcher()
    assert communicator.size == launch.world_size()


def set_slurm_step(monkeypatch: pytest.MonkeyPatch, rank: int, size: int, **more: str) -> None:
    """The variables of a step of as many tasks as there are ranks, all of them on the node n1."""
    monkeypatch.delenv("TF_CONFIG", raising=False)
    step = {"SLURM_PROCID": rank, "SLURM_STEP_NUM_TASKS": size, "SLURM_STEP_TASKS_PER_NODE": size}
    for name, value in {**step, "SLURM_STEP_NODELIST": "n1", **more}.items():
        monkeypatch.setenv(name, str(value))


@pytest.mark.mpi(min_size=2)
def test_the_step_of_a_slurm_job_is_found(communicator: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    set_slurm_step(monkeypatch, communicator.rank, communicator.size)
    resolver = detect(communicator)
    assert isinstance(resolver, SlurmClusterResolver)
    assert resolver.cluster_spec().num_tasks("worker") == communicator.size
    # The host is MPI's, not Slurm's "n1".
    assert resolver.cluster_spec().task_address("worker", communicator.rank).startswith(f"{communicator.host}:")
    placement = place(communicator, resolver)
    assert (placement.task_id, placement.replica_key) == (communicator.rank, communicator.rank)
    assert placement.as_launched


@pytest.mark.mpi(min_size=2)
def test_a_step_of_other_ranks_is_not_taken(communicator: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables of mpirun's daemons, of another order of the ranks, and of some ranks only."""
    last = communicator.size - 1
    for rank, size in ((0, 1), (last - communicator.rank, communicator.size), (communicator.rank, 99)):
        set_slurm_step(monkeypatch, rank, size)
        assert isinstance(detect(communicator), MPIClusterResolver)
    set_slurm_step(monkeypatch, communicator.rank, communicator.size)
    if communicator.rank == last:
        monkeypatch.delenv("SLURM_STEP_NODELIST")
    assert isinstance(detect(communicator), MPIClusterResolver)


@pytest.mark.mpi(min_size=2)
def test_ranks_in_an_order_of_the_users_do_not_get_the_tasks_of_a_step(
    communicator: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_slurm_step(monkeypatch, communicator.rank, communicator.size)
    turned = communicator.split(0, -communicator.rank)
    try:
        resolver = detect(turned)
        assert isinstance(resolver, MPIClusterResolver)
        assert resolver.task_id == communicator.size - 1 - communicator.rank
    finally:
        turned.close()


@pytest.mark.mpi(min_size=2)
def test_a_malformed_variable_of_slurm_is_the_same_error_on_all(
    communicator: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = communicator.size - 1
    lists = {"SLURM_JOB_NODELIST_HET_GROUP_0": "n1", "SLURM_JOB_NODELIST_HET_GROUP_1": "n2"}
    set_slurm_step(monkeypatch, communicator.rank, communicator.size, **lists)
    if communicator.rank == last:
        monkeypatch.setenv("SLURM_JOB_NODELIST_HET_GROUP_1", "n[2")
    with pytest.raises(ValueError, match=rf"failed on rank {last}.*SLURM_JOB_NODELIST: malformed host list 'n\[2'"):
        detect(communicator)


@pytest.mark.mpi(min_size=2)
def test_unnamed_components_are_workers_of_a_synchronous_strategy(
    communicator: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = {"SLURM_STEP_NODELIST": "n[1-2]", "SLURM_STEP_TASKS_PER_NODE": f"1,{communicator.size - 1}"}
    lists = {"SLURM_JOB_NODELIST_HET_GROUP_0": "n2", "SLURM_JOB_NODELIST_HET_GROUP_1": "n1"}
    set_slurm_step(monkeypatch, communicator.rank, communicator.size, **two, **lists)
    assert detect(communicator).cluster_spec().num_tasks("worker") == communicator.size
    set_slurm_step(
        monkeypatch, communicator.rank, communicator.size, **two, **lists,
        SLURM_JOB_NAME_HET_GROUP_0="ps", SLURM_JOB_NAME_HET_GROUP_1="worker",
    )
    with pytest.raises(ValueError, match=r"parameter servers .job 'ps' with .*, which only a ParameterServerStrategy"):
        place(communicator, detect(communicator))


def test_resolver_knows_nodes(communicator: Communicator) -> None:
    nodes = fake_nodes(communicator, 2)
    resolver = MPIClusterResolver(nodes)
    assert resolver.node_index == communicator.rank // 2
    assert resolver.node_rank == communicator.rank % 2
    assert sum(resolver.node_sizes) == communicator.size
    if communicator.size == 3:
        assert resolver.node_sizes == (2, 1)


def test_told_tasks_order_the_replicas(communicator: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    # Rank 0 is the last worker, the last rank the first.
    index = communicator.size - 1 - communicator.rank
    config = {"cluster": workers(communicator.size), "task": {"type": "worker", "index": index}}
    set_tf_config(monkeypatch, config)
    placement = place(communicator, detect(communicator))
    assert (placement.task_id, placement.replica_key) == (index, index)
    assert placement.as_launched == (communicator.size == 1)
    group = communicator.split(placement.group, placement.replica_key)
    assert (group.rank, group.size) == (index, communicator.size)


@pytest.mark.mpi(min_size=2)
def test_an_evaluator_is_apart(communicator: Communicator) -> None:
    cluster = {**workers(communicator.size - 1), "evaluator": ["host:9"]}
    placement = place(communicator, SimpleClusterResolver(ClusterSpec(cluster)))
    group = communicator.split(placement.group, placement.replica_key)
    if communicator.rank == communicator.size - 1:
        assert (placement.task_type, placement.group, group.size) == ("evaluator", EVALUATOR_GROUP, 1)
    else:
        assert (placement.task_type, group.size) == ("worker", communicator.size - 1)
        assert group.rank == placement.task_id


@pytest.mark.mpi(min_size=2)
def test_untold_tasks_are_dealt_by_rank(communicator: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    set_tf_config(monkeypatch, {"cluster": {"chief": ["host:0"], **workers(communicator.size - 1)}})
    placement = place(communicator, detect(communicator))
    expected = ("chief", 0) if communicator.rank == 0 else ("worker", communicator.rank - 1)
    assert (placement.task_type, placement.task_id) == expected
    assert placement.as_launched


@pytest.mark.mpi(min_size=2)
def test_duplicates_are_one_error(communicator: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    set_tf_config(monkeypatch, {"cluster": workers(communicator.size), "task": {"type": "worker", "index": 0}})
    with pytest.raises(LauncherError, match=r"several ranks were told the same task \(worker 0\)") as caught:
        place(communicator, detect(communicator))
    texts = communicator.all_gather_object(str(caught.value))
    assert set(texts) == {texts[0]}
    assert all(f"rank {rank}: worker 0" in texts[0] for rank in range(communicator.size))


@pytest.mark.mpi(min_size=2)
def test_a_task_on_some_ranks_only_is_one_error(communicator: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    config: dict[str, object] = {"cluster": workers(communicator.size)}
    if communicator.rank == 0:
        config["task"] = {"type": "worker", "index": 0}
    set_tf_config(monkeypatch, config)
    with pytest.raises(LauncherError, match=f"only 1 of {communicator.size} ranks were told their task"):
        place(communicator, detect(communicator))


@pytest.mark.mpi(min_size=2)
def test_tf_config_on_some_ranks_only_is_one_error(
    communicator: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    if communicator.rank == 1:
        set_tf_config(monkeypatch, {"cluster": workers(2), "task": {"type": "worker", "index": 1}})
    with pytest.raises(MismatchError, match="different clusters") as caught:
        place(communicator, detect(communicator))
    assert "rank 0: no task of no cluster" in str(caught.value)
    assert "rank 1: worker 1 of {'worker'" in str(caught.value)


@pytest.mark.mpi(min_size=2)
def test_too_few_ranks_is_one_error(communicator: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    set_tf_config(monkeypatch, {"cluster": workers(9), "task": {"type": "worker", "index": communicator.rank}})
    with pytest.raises(LauncherError, match=r"mpirun -n 9 python"):
        place(communicator, detect(communicator))


@pytest.mark.mpi(min_size=2)
def test_malformed_on_one_rank_is_the_same_error_on_all(
    communicator: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_tf_config(monkeypatch, "{" if communicator.rank == communicator.size - 1 else "{}")
    with pytest.raises(ValueError, match=rf"failed on rank {communicator.size - 1}.*TF_CONFIG must be JSON"):
        detect(communicator)
    assert os.environ["TF_CONFIG"].startswith("{")


@pytest.mark.mpi(min_size=2)
def test_parameter_servers_are_refused(communicator: Communicator) -> None:
    cluster = ClusterSpec({**workers(communicator.size - 1), "ps": ["host:9"]})
    with pytest.raises(ValueError, match=r"parameter servers .* Build that strategy, or take the job out of"):
        place(communicator, SimpleClusterResolver(cluster))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("first", [False, True])
def test_an_evaluator_does_not_train(
    communicator: Communicator, first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the ranks were started in the order of their tasks, so that those that train need no other order."""
    monkeypatch.setattr(first_rank, "_role", first_rank._Role())
    size, rank = communicator.size, communicator.rank
    evaluating = 0 if first else size - 1
    cluster = ClusterSpec({**workers(size - 1), "evaluator": ["host:9"]})
    task_type = "evaluator" if rank == evaluating else "worker"
    resolver = SimpleClusterResolver(cluster, task_type=task_type, task_id=0 if rank == evaluating else rank - first)
    with MultiWorkerMirroredStrategy(resolver) as strategy:
        assert strategy.task_type == task_type
        assert strategy.num_replicas_in_sync == (1 if rank == evaluating else size - 1)
        # The evaluator asks alone: it must not wait for those that train, and its value must not reach them.
        if rank == evaluating:
            assert strategy.reduce("SUM", 1000.0, axis=None) == 1000.0
        else:
            assert strategy.reduce("SUM", 1.0, axis=None) == size - 1
            with strategy.scope():
                variable = mpidist.Variable([0.0])
            mpidist.optimizers.SGD(1.0).apply_gradients([([1.0], variable)])
            assert variable.numpy() == [1.0 - size]


class Unsure(SimpleClusterResolver):
    """A resolver of the program's own that fails on one rank, when it is asked for one thing."""

    def __init__(self, communicator: Communicator, asked: str) -> None:
        super().__init__(ClusterSpec(workers(communicator.size)), task_type="worker", task_id=communicator.rank)
        self._fails = asked if communicator.rank == communicator.size - 1 else ""

    def _answer(self, asked: str) -> None:
        if self._fails == asked:
            raise OSError(f"the {asked} is not known yet")

    def cluster_spec(self) -> ClusterSpec:
        self._answer("cluster")
        return super().cluster_spec()

    @property  # type: ignore[misc]  # it is not set
    def task_type(self) -> str | None:
        self._answer("task type")
        return "worker"

    @property  # type: ignore[misc]
    def task_id(self) -> int | None:
        self._answer("task id")
        return self._task_id


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("asked", ["cluster", "task type", "task id"])
@pytest.mark.parametrize("whole", [False, True])
def test_a_resolver_that_fails_on_one_rank_is_the_same_error_on_all(
    communicator: Communicator, asked: str, whole: bool
) -> None:
    resolver = Unsure(communicator, asked)
    with pytest.raises(OSError, match=f"failed on rank {communicator.size - 1} .*the {asked} is not known") as caught:
        MultiWorkerMirroredStrategy(resolver) if whole else place(communicator, resolver)
    assert len(set(communicator.all_gather_object(str(caught.value)))) == 1
