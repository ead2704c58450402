"""Clusters across ranks: every rank comes to the same placement, or raises the same error."""

from __future__ import annotations

import json
import os

import pytest

from mpidist.cluster.detect import detect
from mpidist.cluster.mpi import MPIClusterResolver
from mpidist.cluster.placement import EVALUATOR_GROUP, SYNCHRONOUS_GROUP, place
from mpidist.cluster.simple import SimpleClusterResolver
from mpidist.cluster.spec import ClusterSpec
from mpidist.comm.communicator import Communicator
from mpidist.errors import LauncherError, MismatchError
from mpidist.testing import fake_nodes

pytestmark = pytest.mark.mpi


def workers(count: int) -> dict[str, list[str]]:
    return {"worker": [f"host:{index}" for index in range(count)]}


def set_tf_config(monkeypatch: pytest.MonkeyPatch, config: object) -> None:
    monkeypatch.setenv("TF_CONFIG", config if isinstance(config, str) else json.dumps(config))


def test_ranks_are_the_cluster(communicator: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    resolver = detect(communicator)
    assert isinstance(resolver, MPIClusterResolver)
    assert resolver.cluster_spec().num_tasks("worker") == communicator.size
    assert resolver.cluster_spec().task_address("worker", communicator.rank).endswith(f":{communicator.rank}")
    assert resolver.task_id == communicator.rank
    placement = place(communicator, resolver)
    assert (placement.group, placement.replica_key) == (SYNCHRONOUS_GROUP, communicator.rank)
    assert placement.as_launched


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
    with pytest.raises(ValueError, match="Use ParameterServerStrategy"):
        place(communicator, SimpleClusterResolver(cluster))
