"""Who is which task, and who trains together: the rules, without ranks."""

from __future__ import annotations

import pytest

from mpidist.cluster.detect import detect
from mpidist.cluster.resolvers.mpi import MPIClusterResolver
from mpidist.cluster.resolvers.simple import SimpleClusterResolver
from mpidist.cluster.resolvers.tf_config import TFConfigClusterResolver
from mpidist.cluster.roles.placement import (
    EVALUATOR_GROUP,
    TRAINING_GROUP,
    Placement,
    assign_tasks,
    place,
    placements,
)
from mpidist.cluster.spec import ClusterSpec, Task
from mpidist.comm.group.solo import SoloCommunicator
from mpidist.errors import LauncherError

CHIEF, FIRST, SECOND = Task("chief", 0), Task("worker", 0), Task("worker", 1)
PS, EVALUATOR = Task("ps", 0), Task("evaluator", 0)
SPEC = ClusterSpec({"worker": ["b:1", "c:1"], "chief": ["a:1"]})
TF_CONFIG = '{"cluster": {"chief": ["a:1"], "worker": ["b:1", "c:1"]}, "task": {"type": "chief", "index": 0}}'


def test_told_tasks_are_kept_in_any_order() -> None:
    assert assign_tasks([SECOND, CHIEF, FIRST], SPEC) == [SECOND, CHIEF, FIRST]


def test_untold_tasks_are_dealt_in_cluster_order() -> None:
    spec = ClusterSpec({"evaluator": ["e:1"], "ps": ["d:1"], "worker": ["b:1", "c:1"], "chief": ["a:1"]})
    assert assign_tasks([None] * 5, spec) == [CHIEF, FIRST, SECOND, PS, EVALUATOR]


def test_an_empty_cluster_is_workers() -> None:
    assert assign_tasks([None, None], ClusterSpec({})) == [FIRST, SECOND]


def test_an_evaluator_need_not_be_listed() -> None:
    assert assign_tasks([CHIEF, FIRST, SECOND, EVALUATOR], SPEC) == [CHIEF, FIRST, SECOND, EVALUATOR]


@pytest.mark.parametrize(
    ("tasks", "problem"),
    [
        ([CHIEF, FIRST, FIRST], r"several ranks were told the same task \(worker 0\)"),
        ([CHIEF, FIRST], r"the cluster has 3 task\(s\) and the program 2 rank\(s\)"),
        ([None, None], r"the cluster has 3 task\(s\) and the program 2 rank\(s\)"),
        ([None] * 4, r"the cluster has 3 task\(s\) and the program 4 rank\(s\)"),
        ([CHIEF, FIRST, None], "only 2 of 3 ranks were told their task"),
        ([CHIEF, FIRST, Task("worker", 7)], r"tasks are not in the cluster \(worker 7\)"),
        ([CHIEF, FIRST, Task("evaluator", 1)], r"tasks are not in the cluster \(evaluator 1\)\. Expected"),
        ([Task("master", 0), FIRST, SECOND], r"\(master 0\)\. Did you mean 'chief' by 'master'\? Expected one rank"),
        ([CHIEF, FIRST, Task("Worker", 1)], r"\(Worker 1\)\. Did you mean 'worker' by 'Worker'\? Expected"),
        ([CHIEF, FIRST, Task("evalutor", 0)], r"Did you mean 'evaluator' by 'evalutor'\?"),
    ],
)
def test_what_does_not_fit_lists_all_ranks_and_the_way_out(tasks: list[Task | None], problem: str) -> None:
    with pytest.raises(LauncherError, match=problem) as caught:
        assign_tasks(tasks, SPEC)
    text = str(caught.value)
    for rank, task in enumerate(tasks):
        assert f"rank {rank}: {task or 'no task'}" in text
    assert "mpirun -n 3 python" in text


def test_a_job_of_the_cluster_that_is_not_spelled_as_the_tasks_is_named() -> None:
    with pytest.raises(LauncherError, match=r"\(worker 0, worker 1\)\. Did you mean 'worker' by 'wroker'\?"):
        assign_tasks([FIRST, SECOND], ClusterSpec({"wroker": ["a:1", "b:1"]}))


def test_several_tasks_and_no_launcher_prints_the_command() -> None:
    with pytest.raises(LauncherError, match="no launcher started this program") as caught:
        assign_tasks([CHIEF], SPEC, launched=False)
    assert "mpirun -n 3 python" in str(caught.value)


@pytest.mark.parametrize("tasks", [[None], [FIRST], [None, None]])
def test_a_cluster_without_tasks_is_named(tasks: list[Task | None]) -> None:
    with pytest.raises(LauncherError, match=r"got \{'worker': \[\]\}, whose jobs have none. List an address") as caught:
        assign_tasks(tasks, ClusterSpec({"worker": []}), launched=False)
    assert "-n 0" not in str(caught.value)


def test_replicas_are_in_the_order_of_tasks() -> None:
    assert placements([SECOND, CHIEF, FIRST]) == [
        Placement("worker", 1, TRAINING_GROUP, 2, as_launched=False),
        Placement("chief", 0, TRAINING_GROUP, 0, as_launched=False),
        Placement("worker", 0, TRAINING_GROUP, 1, as_launched=False),
    ]
    assert all(placement.as_launched for placement in placements([CHIEF, FIRST, SECOND]))


def test_an_evaluator_is_a_group_of_its_own() -> None:
    placed = placements([EVALUATOR, FIRST, SECOND])
    assert [placement.group for placement in placed] == [EVALUATOR_GROUP, TRAINING_GROUP, TRAINING_GROUP]
    assert not any(placement.as_launched for placement in placed)


@pytest.mark.parametrize(
    ("tasks", "text"),
    [
        ([FIRST, PS], "only a ParameterServerStrategy uses. Build that strategy"),
        ([FIRST, Task("foobar", 0)], r"the cluster has \['foobar'\]"),
        ([CHIEF, Task("chief", 1)], "at most one chief"),
        ([EVALUATOR], "a chief or a worker"),
        ([FIRST, Task("master", 0)], r"the cluster has \['master'\]. Did you mean 'chief' by 'master'\?$"),
        ([Task("wroker", 0), Task("Worker", 0)], "Did you mean 'worker' by 'Worker', and 'worker' by 'wroker'"),
    ],
)
def test_synchronous_strategies_refuse_other_jobs(tasks: list[Task], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        placements(tasks)


@pytest.mark.parametrize("text", [None, "", "{}", '{"cluster": {}}'])
def test_without_tf_config_the_ranks_are_the_cluster(monkeypatch: pytest.MonkeyPatch, text: str | None) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    if text is not None:
        monkeypatch.setenv("TF_CONFIG", text)
    communicator = SoloCommunicator()
    resolver = detect(communicator)
    assert isinstance(resolver, MPIClusterResolver)
    assert place(communicator, resolver) == Placement("worker", 0, TRAINING_GROUP, 0, as_launched=True)


def test_tf_config_of_several_tasks_alone_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", TF_CONFIG)
    communicator = SoloCommunicator()
    resolver = detect(communicator)
    assert isinstance(resolver, TFConfigClusterResolver)
    with pytest.raises(LauncherError, match="mpirun -n 3 python"):
        place(communicator, resolver)


@pytest.mark.parametrize(("text", "question"), [
    ('{"clutser": {"worker": ["a:1"]}}', "got the key 'clutser'. Did you mean 'cluster'"),
    ('{"cluster": {"worker": ["a:1"]}, "tasks": {"type": "worker", "index": 0}}', "'tasks'. Did you mean 'task'"),
    ('{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "indx": 0}}', "'indx'. Did you mean 'index'"),
])
def test_a_key_of_tf_config_that_misses_a_letter_is_named(
    monkeypatch: pytest.MonkeyPatch, text: str, question: str
) -> None:
    monkeypatch.setenv("TF_CONFIG", text)
    with pytest.raises(ValueError, match=question):
        detect(SoloCommunicator())


def test_keys_of_others_in_tf_config_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    task = '"task": {"type": "worker", "index": 0, "trial": "1"}, "tasks": 1'
    others = '"environment": "cloud", "job": {}'
    monkeypatch.setenv("TF_CONFIG", f'{{"cluster": {{"worker": ["a:1"]}}, {task}, {others}}}')
    assert place(SoloCommunicator(), detect(SoloCommunicator())).task_type == "worker"


def test_malformed_tf_config_is_said_at_detection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", "{")
    with pytest.raises(ValueError, match="TF_CONFIG must be JSON"):
        detect(SoloCommunicator())


def test_a_resolver_of_one_task_places_one_rank() -> None:
    resolver = SimpleClusterResolver(ClusterSpec({"chief": ["a:1"]}), task_type="chief", task_id=0)
    assert place(SoloCommunicator(), resolver) == Placement("chief", 0, TRAINING_GROUP, 0, as_launched=True)


def test_the_work_grows_with_the_number_of_ranks_not_with_its_square(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = 200
    tasks: list[Task | None] = [Task("worker", rank) for rank in reversed(range(ranks))]
    spec = ClusterSpec({"worker": [f"host:{rank}" for rank in range(ranks)]})
    compared = 0
    is_equal = Task.__eq__

    def count(self: Task, other: object) -> bool:
        nonlocal compared
        compared += 1
        return is_equal(self, other)

    monkeypatch.setattr(Task, "__eq__", count)
    placed = placements(assign_tasks(tasks, spec))
    assert [placement.replica_key for placement in placed] == list(reversed(range(ranks)))
    assert 0 < compared <= 8 * ranks
