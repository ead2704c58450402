"""TF_CONFIG and cluster resolvers: the examples of the guide and of the references."""

from __future__ import annotations

import json
import os

import pytest

import mpidist
from mpidist.comm.group.communicator import Communicator
from mpidist.errors import LauncherError

pytestmark = pytest.mark.mpi


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """The examples set the variable for good; a test must not."""
    monkeypatch.setenv("TF_CONFIG", "")


def require_one_error(communicator: Communicator, expected: type[Exception], words: str) -> None:
    """MultiWorkerMirroredStrategy fails with the same text on every rank."""
    with pytest.raises(expected, match=words) as caught:
        mpidist.experimental.MultiWorkerMirroredStrategy()
    assert len(set(communicator.all_gather_object(str(caught.value)))) == 1


def test_task_of_a_cluster_with_a_chief() -> None:
    os.environ["TF_CONFIG"] = """
{
  "cluster": {
    "chief": ["chief.example.com:2222"],
    "ps": ["ps0.example.com:2222", "ps1.example.com:2222"],
    "worker": ["worker0.example.com:2222", "worker1.example.com:2222",
               "worker2.example.com:2222"]
  },
  "task": {
    "type": "ps",
    "index": 1
  }
}
"""
    cluster_resolver = mpidist.cluster_resolver.TFConfigClusterResolver()
    # "A cluster with 1 chief, 2 parameter servers, and 3 workers", and the second parameter server of it.
    assert (cluster_resolver.task_type, cluster_resolver.task_id) == ("ps", 1)
    cluster_spec = cluster_resolver.cluster_spec()
    assert {job: cluster_spec.num_tasks(job) for job in cluster_spec.jobs} == {"chief": 1, "ps": 2, "worker": 3}
    assert cluster_spec.task_address("ps", 1) == "ps1.example.com:2222"
    # The document's branch by role.
    assert cluster_resolver.task_type != "chief"
    assert cluster_resolver.task_type in ("worker", "ps")


def test_three_workers_and_two_parameter_servers(communicator: Communicator) -> None:
    os.environ["TF_CONFIG"] = json.dumps({
        "cluster": {
            "worker": ["host1:port", "host2:port", "host3:port"],
            "ps": ["host4:port", "host5:port"]
        },
        "task": {"type": "worker", "index": 1}
    })
    cluster_resolver = mpidist.cluster_resolver.TFConfigClusterResolver()
    cluster_spec = cluster_resolver.cluster_spec()
    assert (cluster_spec.num_tasks("worker"), cluster_spec.num_tasks("ps")) == (3, 2)
    assert (cluster_resolver.task_type, cluster_resolver.task_id) == ("worker", 1)
    assert cluster_spec.task_address("worker", 1) == "host2:port"
    # "There should be no 'ps' job except when using ParameterServerStrategy": a synchronous one says so first.
    require_one_error(communicator, ValueError, "ParameterServerStrategy")
    # Without it, the same text on every rank is no job: each would be worker 1.
    config = json.loads(os.environ["TF_CONFIG"])
    del config["cluster"]["ps"]
    os.environ["TF_CONFIG"] = json.dumps(config)
    require_one_error(communicator, LauncherError, "mpirun -n 3 python" if communicator.size > 1 else "3 task")


@pytest.mark.mpi(min_size=2)
def test_parameter_servers_want_another_strategy(communicator: Communicator) -> None:
    # "There should be no 'ps' job except when using ParameterServerStrategy", says the guide.
    workers = [f"localhost:{12345 + rank}" for rank in range(communicator.size - 1)]
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers, "ps": ["localhost:34567"]}})
    require_one_error(communicator, ValueError, "ParameterServerStrategy")


@pytest.mark.parametrize("is_told", [True, False], ids=["each rank is told its task", "tasks are dealt"])
def test_the_resolver_of_a_strategy(communicator: Communicator, is_told: bool) -> None:
    config: dict[str, object] = {
        "cluster": {
            "worker": [f"localhost:{12345 + rank}" for rank in range(communicator.size)],
        },
    }
    if is_told:
        config["task"] = {"type": "worker", "index": communicator.rank}
    os.environ["TF_CONFIG"] = json.dumps(config)

    # This implicitly uses TF_CONFIG for the cluster and current task info.
    strategy = mpidist.experimental.MultiWorkerMirroredStrategy()

    assert strategy.num_replicas_in_sync == communicator.size
    assert isinstance(strategy.cluster_resolver, mpidist.cluster_resolver.TFConfigClusterResolver)
    ran_on = None
    if strategy.cluster_resolver.task_type == "worker":
        # Perform something that's only applicable on workers.
        ran_on = "worker"
    elif strategy.cluster_resolver.task_type == "ps":
        # Perform something that's only applicable on parameter servers.
        ran_on = "ps"
    assert ran_on == "worker"
    assert strategy.cluster_resolver.task_id == communicator.rank


def test_replicas_are_in_the_order_of_the_tasks(communicator: Communicator) -> None:
    task_id = communicator.size - 1 - communicator.rank
    os.environ["TF_CONFIG"] = json.dumps({
        "cluster": {"worker": [f"localhost:{12345 + rank}" for rank in range(communicator.size)]},
        "task": {"type": "worker", "index": task_id},
    })
    strategy = mpidist.experimental.MultiWorkerMirroredStrategy()
    context = strategy.run(mpidist.get_replica_context)
    assert context is not None
    assert context.replica_id_in_sync_group == task_id


def test_a_resolver_given_to_the_strategy(communicator: Communicator) -> None:
    cluster_spec = mpidist.ClusterSpec({"worker": [f"localhost:{12345 + rank}" for rank in range(communicator.size)]})
    resolver = mpidist.cluster_resolver.SimpleClusterResolver(
        cluster_spec, task_type="worker", task_id=communicator.rank
    )
    strategy = mpidist.experimental.MultiWorkerMirroredStrategy(cluster_resolver=resolver)
    # "If the user provides one in __init__, that instance is returned."
    assert strategy.cluster_resolver is resolver
    assert strategy.num_replicas_in_sync == communicator.size
