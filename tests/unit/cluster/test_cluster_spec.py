"""ClusterSpec and the resolvers that do not communicate, as tf.distribute documents them."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest

from mpidist.cluster.resolvers.tf_config import read_tf_config
from mpidist.cluster.spec import ClusterSpec, Task
from mpidist.cluster_resolver import (
    ClusterResolver,
    MPIClusterResolver,
    SimpleClusterResolver,
    TFConfigClusterResolver,
    UnionResolver,
)

CLUSTER = {"worker": ["a:1", "b:1"], "ps": ["c:1"]}


def set_tf_config(monkeypatch: pytest.MonkeyPatch, **config: object) -> None:
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))


def test_spec_gives_jobs_and_addresses() -> None:
    spec = ClusterSpec(CLUSTER)
    assert spec.jobs == ["worker", "ps"]
    assert spec.as_dict() == CLUSTER
    assert spec.num_tasks("worker") == 2
    assert spec.task_indices("worker") == [0, 1]
    assert spec.task_address("worker", 1) == "b:1"
    assert spec.job_tasks("worker") == ["a:1", "b:1"]
    assert spec.tasks == [Task("worker", 0), Task("worker", 1), Task("ps", 0)]


def test_spec_with_holes_keeps_indices() -> None:
    spec = ClusterSpec({"worker": {"3": "d:1", "1": "b:1"}})
    assert spec.as_dict() == {"worker": {1: "b:1", 3: "d:1"}}
    assert spec.task_indices("worker") == [1, 3]
    assert spec.job_tasks("worker") == [None, "b:1", None, "d:1"]


def test_spec_with_dense_mapping_is_a_list() -> None:
    assert ClusterSpec({"worker": {1: "b:1", 0: "a:1"}}).as_dict() == {"worker": ["a:1", "b:1"]}


def test_spec_of_an_empty_job_has_no_tasks() -> None:
    spec = ClusterSpec({"worker": []})
    assert spec.as_dict() == {"worker": []}
    assert spec.job_tasks("worker") == []


def test_spec_truth_equality_and_repr() -> None:
    spec = ClusterSpec(CLUSTER)
    assert spec
    assert not ClusterSpec({})
    assert spec == ClusterSpec(spec)
    assert spec == {"worker": {0: "a:1", 1: "b:1"}, "ps": {0: "c:1"}}
    assert spec != ClusterSpec({"worker": ["a:1"]})
    assert repr(spec) == "ClusterSpec({'ps': ['c:1'], 'worker': ['a:1', 'b:1']})"


@pytest.mark.parametrize(
    ("cluster", "text"),
    [
        (3, "must be a dict"),
        ({"worker": "a:1"}, "job 'worker' of a cluster must be a list"),
        ({"worker": [1]}, "address of task 0 of job 'worker' must be a string, got int: 1"),
        ({1: ["a:1"]}, "names of a cluster's jobs must be strings, got int: 1"),
        *(
            ({"worker": {key: "a:1"}}, f"must be task indices, such as 0 .*got {re.escape(repr(key))}$")
            for key in ("x", "1_0", " 1", "+1", "\u0661", "")
        ),
    ],
)
def test_spec_refuses_other_types(cluster: object, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        ClusterSpec(cluster)  # type: ignore[arg-type]  # the point of the test


@pytest.mark.parametrize(
    ("tasks", "text"),
    [
        ({"0": "a:1", "00": "b:1"}, "each index of job 'worker' .* once, got 0 for 'a:1' and, as '00', for 'b:1'"),
        ({1: "a:1", "1": "b:1"}, "got 1 for 'a:1' and, as '1', for 'b:1'"),
        ({"-1": "a:1"}, "must not be negative, got -1"),
    ],
)
def test_spec_refuses_other_indices(tasks: dict[int, str] | dict[str, str], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        ClusterSpec({"worker": tasks})


def test_spec_names_what_is_missing() -> None:
    spec = ClusterSpec(CLUSTER)
    with pytest.raises(ValueError, match="No such job in cluster: 'x'"):
        spec.num_tasks("x")
    with pytest.raises(ValueError, match="No task with index 7 in job 'ps'"):
        spec.task_address("ps", 7)


def test_resolver_is_abstract_and_needs_two_methods_only() -> None:
    with pytest.raises(TypeError, match="abstract"):
        ClusterResolver()  # type: ignore[abstract]  # the point of the test

    class Own(ClusterResolver):
        def cluster_spec(self) -> ClusterSpec:
            return ClusterSpec({})

        def master(
            self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None
        ) -> str:
            return ""

    own = Own()
    assert (own.task_type, own.task_id, own.environment, own.rpc_layer) == (None, None, "", None)
    own.task_type, own.task_id = "worker", 0
    assert (own.task_type, own.task_id) == ("worker", 0)


def test_simple_resolver_says_what_it_was_told() -> None:
    spec = ClusterSpec(CLUSTER)
    resolver = SimpleClusterResolver(
        spec, master="m:1", task_type="ps", task_id=0, environment="here", num_accelerators={"GPU": 2}, rpc_layer="grpc"
    )
    assert resolver.cluster_spec() == spec
    assert resolver.master() == "grpc://m:1"
    assert resolver.master("worker", 1) == "grpc://b:1"
    assert resolver.master("worker", 0, rpc_layer="mpi") == "mpi://a:1"
    assert resolver.num_accelerators() == {"GPU": 2}
    assert (resolver.task_type, resolver.task_id, resolver.environment) == ("ps", 0, "here")
    assert SimpleClusterResolver(spec).num_accelerators() == {}


def test_simple_resolver_refuses_a_dict() -> None:
    with pytest.raises(TypeError, match=r"Wrap a dict: ClusterSpec"):
        SimpleClusterResolver(CLUSTER)  # type: ignore[arg-type]  # the point of the test
    with pytest.raises(TypeError, match="`master` must be a string"):
        SimpleClusterResolver(ClusterSpec({}), master=1)  # type: ignore[arg-type]  # the point of the test


def test_a_task_has_a_name_and_a_number() -> None:
    # A program that asks for `task_id == 0` would have no first task.
    number: Any = np.int64(0)
    resolver = SimpleClusterResolver(ClusterSpec({"worker": ["a:1"]}), task_type="worker", task_id=number)
    assert type(resolver.task_id) is int
    wrong: Any
    for wrong, kind in (("0", TypeError), (0.0, TypeError), (True, TypeError), (-1, ValueError)):
        for build in (SimpleClusterResolver, lambda _, task_id: UnionResolver(resolver, task_id=task_id)):
            with pytest.raises(kind, match="`task_id` must be an integer of at least 0, got"):
                build(ClusterSpec({}), task_id=wrong)
        with pytest.raises(kind, match="`task_id`"):
            resolver.task_id = wrong
    with pytest.raises(TypeError, match="`task_type` must be the name of a job, or None, got 3 of type int"):
        resolver.task_type = 3  # type: ignore[assignment]


def test_tf_config_is_read_at_every_access(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    resolver = TFConfigClusterResolver()
    assert not resolver.cluster_spec()
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer, resolver.environment) == (None,) * 4
    assert resolver.master() == ""
    set_tf_config(monkeypatch, cluster=CLUSTER, task={"type": "worker", "index": "1"}, rpc_layer="grpc")
    assert resolver.cluster_spec().as_dict() == CLUSTER
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == ("worker", 1, "grpc")
    assert resolver.master() == "grpc://b:1"
    assert resolver.master("ps", 0) == "grpc://c:1"
    resolver.task_id = 0
    assert resolver.master() == "grpc://a:1"


def test_the_number_of_a_task_in_tf_config_may_be_spelled() -> None:
    spelled: Any = " 1"
    resolver = TFConfigClusterResolver(task_id=spelled)
    assert resolver.task_id == 1
    wrong: Any
    for wrong, kind in ((1.7, TypeError), (True, TypeError), ("x", TypeError), ("1_0", TypeError), (-1, ValueError)):
        with pytest.raises(kind, match="`task_id` must be an integer of at least 0, got"):
            TFConfigClusterResolver(task_id=wrong)
        with pytest.raises(kind, match="`task_id`"):
            resolver.task_id = wrong


def test_tf_config_may_have_keys_of_other_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    task = {"type": "worker", "index": 1, "trial": "7", "cloud": "a"}
    set_tf_config(monkeypatch, cluster=CLUSTER, task=task, environment="cloud", job={"TYPE": 1})
    assert TFConfigClusterResolver().task_id == 1


def test_tf_config_master(monkeypatch: pytest.MonkeyPatch) -> None:
    set_tf_config(monkeypatch, cluster={"worker": ["a:1"]}, task={"type": "worker", "index": 0})
    assert TFConfigClusterResolver().master() == ""
    set_tf_config(monkeypatch, cluster=CLUSTER)
    with pytest.raises(ValueError, match="No such job in cluster: None"):
        TFConfigClusterResolver().master()
    with pytest.raises(ValueError, match="No task with index 5"):
        TFConfigClusterResolver("worker", 5).master()
    set_tf_config(monkeypatch, cluster=CLUSTER, session_master="s:1")
    assert TFConfigClusterResolver().master() == "s:1"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "TF_CONFIG must be JSON of the form"),
        ("[1]", "TF_CONFIG must be a JSON object"),
        ("[" * 100_000, "TF_CONFIG must be JSON .* and 99000 more: "),
        ('{"cluster": {"worker": {"0": "a:1", "0": "b:1"}}}', "expected each key of an object once, got '0' twice"),
        ('{"cluster": {"worker": {"0": "a:1", "00": "b:1"}}}', "must have the form .*got 0 for 'a:1' and, as '00'"),
        ('{"cluster": ["a:1"]}', '"cluster" in TF_CONFIG must have the form'),
        ('{"cluster": {"worker": "a:1"}}', "job 'worker' of a cluster must be a list"),
        ('{"task": "worker"}', '"task" in TF_CONFIG must be'),
        # These would be left out.
        ('{"Cluster": {"worker": ["a:1"]}}', "with keys in small letters, got the key 'Cluster'"),
        ('{"task": {"Type": "worker", "index": 0}}', "with keys in small letters, got the key 'Type'"),
        ('{"task": {"name": "worker", "id": 0}}', '"task" in TF_CONFIG must be .* got {.name'),
        ('{"task": {"type": "worker", "index": "x"}}', "must be an integer from 0, got 'x'"),
        ('{"task": {"type": "worker", "index": -1}}', "must be an integer from 0, got -1"),
        ('{"task": {"type": "worker", "index": 1.7}}', "must be an integer from 0, got 1.7"),
        ('{"task": {"type": "worker", "index": true}}', "must be an integer from 0, got True"),
    ],
)
def test_tf_config_says_what_is_wrong(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_tf_config({"TF_CONFIG": text})


@pytest.mark.parametrize("text", ["", "  ", "{}", '{"cluster": {}}', '{"cluster": null, "task": null}'])
def test_tf_config_may_be_empty(text: str) -> None:
    config = read_tf_config({"TF_CONFIG": text})
    assert not config.cluster
    assert config.task_id is None


def test_union_joins_lists_in_order_and_mappings_by_index() -> None:
    first = SimpleClusterResolver(ClusterSpec({"worker": ["a:1"]}), task_type="worker", task_id=3)
    second = SimpleClusterResolver(ClusterSpec({"worker": ["b:1"], "ps": ["c:1"]}))
    assert UnionResolver(first, second).cluster_spec().as_dict() == CLUSTER
    sparse = SimpleClusterResolver(ClusterSpec({"worker": {5: "x:1"}}))
    assert UnionResolver(first, sparse).cluster_spec().as_dict() == {"worker": {0: "a:1", 5: "x:1"}}
    with pytest.raises(KeyError, match="task 5 of job 'worker' is in two"):
        UnionResolver(sparse, sparse).cluster_spec()


def test_union_takes_who_it_is_from_the_first_unless_overridden() -> None:
    first = SimpleClusterResolver(
        ClusterSpec(CLUSTER), "m:1", "worker", 3, rpc_layer="grpc", num_accelerators={"GPU": 1}
    )
    union = UnionResolver(first)
    assert (union.task_type, union.task_id, union.rpc_layer) == ("worker", 3, "grpc")
    assert union.num_accelerators() == {"GPU": 1}
    assert union.master() == "grpc://m:1"
    assert union.master("worker", 1) == "grpc://b:1"
    # tf.distribute loses a 0 here.
    assert UnionResolver(first, task_id=0).task_id == 0


def test_union_refuses_nothing_and_strangers() -> None:
    with pytest.raises(ValueError, match="at least one"):
        UnionResolver()
    with pytest.raises(TypeError, match="joins ClusterResolvers, got ClusterSpec"):
        UnionResolver(ClusterSpec({}))  # type: ignore[arg-type]  # the point of the test


def test_mpi_resolver_alone_is_one_worker() -> None:
    resolver = MPIClusterResolver()
    assert resolver.cluster_spec().num_tasks("worker") == 1
    assert (resolver.task_type, resolver.task_id, resolver.master()) == ("worker", 0, "")
    assert (resolver.node_index, resolver.node_rank, resolver.node_sizes) == (0, 0, (1,))
