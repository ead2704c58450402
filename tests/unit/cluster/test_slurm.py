"""The resolver that reads Slurm's variables, in environments of real runs."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

import mpidist
from mpidist.cli.doctor import cluster
from mpidist.cluster.resolvers.slurm import SlurmClusterResolver
from mpidist.cluster.roles.placement import assign_tasks
from mpidist.cluster.roles.server_roles import agree_on_roles
from mpidist.cluster.slurm import idle_tasks
from mpidist.cluster.slurm.step import is_own_step, parse_counts
from mpidist.cluster.spec import Task
from mpidist.comm.group.solo import SoloCommunicator
from mpidist.errors import LauncherError
from tests.helpers.launch_environments import RECORDED, ranks_of

STEPS = [name for name in RECORDED if "SLURM_STEP_NUM_TASKS" in ranks_of(name)[-1] and "in sbatch" not in name]
KNOWN_STEPS = [name for name in STEPS if name != "srun arbitrary"]


def resolver(
    monkeypatch: pytest.MonkeyPatch, environment: Mapping[str, str], **arguments: object
) -> SlurmClusterResolver:
    """The resolver of a process in this environment, and no other variable of Slurm's or MPI's."""
    for name in list(os.environ):
        if name.startswith(("SLURM", "PMI", "OMPI", "PALS", "MPI_LOCAL", "I_MPI", "CUDA_VISIBLE")):
            monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    made = SlurmClusterResolver(**arguments)  # type: ignore[arg-type]
    made.cluster_spec(), made.master()
    assert os.environ == before, "a resolver never writes to the environment"
    return made


def hosts(made: SlurmClusterResolver, job: str = "worker") -> list[str]:
    return [str(address).rpartition(":")[0] for address in made.cluster_spec().job_tasks(job)]


@pytest.mark.parametrize("name", KNOWN_STEPS)
def test_all_tasks_of_a_step_are_told_one_cluster_and_each_its_own_place(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    environments = ranks_of(name)
    made = [resolver(monkeypatch, environment) for environment in environments]
    specs = [one.cluster_spec() for one in made]
    assert all(spec == specs[0] for spec in specs)
    told = [Task(str(one.task_type), int(one.task_id or 0)) for one in made]
    assert assign_tasks([*told], specs[0]) == told
    for one, environment in zip(made, environments, strict=True):
        own = str(one.master(one.task_type, one.task_id, rpc_layer="rpc"))
        node = environment.get("SLURMD_NODENAME", "")
        assert not own or own.startswith(f"rpc://{node}:" if node else "rpc://nid0"), "a task's own host"
    addresses = [spec for job in specs[0].jobs for spec in specs[0].job_tasks(job)]
    assert len(set(addresses)) == len(addresses)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("srun pmi2", "n3 n3 n3 n4 n4"),
        ("srun pmix", "n3 n3 n3 n4 n4"),
        ("srun none", "n3 n3 n3 n4 n4"),
        ("srun cyclic", "n3 n4 n3 n4 n3"),
        ("srun plane", "n3 n3 n4 n4 n3"),
        ("srun part", "n3 n3 n4"),
        ("srun nopack", "n1 n1 n1 n1 n2 n3"),
        ("srun overcommit", "n1 n2 n3 n1 n2 n3 n1 n2 n3 n1 n2 n3 n1 n1"),
        ("array", "n4 n4"),
        ("srun on a Cray", "nid01 nid02"),
    ],
)
def test_tasks_stand_where_the_distribution_deals_them(
    name: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = resolver(monkeypatch, ranks_of(name)[0])
    assert hosts(made) == expected.split()
    assert made.cluster_spec().jobs == ["worker"]


def test_addresses_count_from_the_port_on_each_host(monkeypatch: pytest.MonkeyPatch) -> None:
    made = resolver(monkeypatch, ranks_of("srun cyclic")[3], port_base=7000, rpc_layer=None)
    assert made.cluster_spec().as_dict() == {"worker": ["n3:7000", "n4:7000", "n3:7001", "n4:7001", "n3:7002"]}
    assert (made.task_type, made.task_id, made.get_task_info()) == ("worker", 3, ("worker", 3))
    assert made.master() == "n4:7001"
    assert made.master("worker", 0, "grpc") == "grpc://n3:7000"
    assert resolver(monkeypatch, ranks_of("srun cyclic")[0]).master() == "grpc://n3:8888"
    with pytest.raises(ValueError, match="No task with index 9 in job 'worker'"):
        made.master("worker", 9)


def step(nodes: str, counts: str, rank: int, **more: str) -> dict[str, str]:
    total = sum(parse_counts(counts))
    return {
        "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": str(rank), "SLURM_STEP_NUM_TASKS": str(total),
        "SLURM_STEP_NODELIST": nodes, "SLURM_STEP_TASKS_PER_NODE": counts, **more,
    }


def test_hosts_stand_in_slurms_order_not_by_the_alphabet(monkeypatch: pytest.MonkeyPatch) -> None:
    made = resolver(monkeypatch, step("n[2,9-10]", "1(x3)", 0, SLURM_NODEID="0"))
    assert hosts(made) == ["n2", "n9", "n10"]
    assert made.master(rpc_layer="x") == "x://n2:8888"


def test_jobs_take_the_ranks_in_alphabetical_order(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = {"worker": 2, "ps": 1, "chief": 1}
    made = [resolver(monkeypatch, step("a,b", "3,1", rank), jobs=jobs) for rank in range(4)]
    assert made[0].cluster_spec().as_dict() == {
        "chief": ["a:8888"], "ps": ["a:8889"], "worker": ["a:8890", "b:8888"]
    }
    assert [one.get_task_info() for one in made] == [("chief", 0), ("ps", 0), ("worker", 0), ("worker", 1)]


@pytest.mark.parametrize("tasks_per_node", [2, {"a": 2, "b": 2}])
def test_tasks_per_node_replaces_slurms(tasks_per_node: object, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"SLURM_PROCID": "3", "SLURM_STEP_NODELIST": "a,b"}
    made = resolver(monkeypatch, environment, jobs={"worker": 4}, tasks_per_node=tasks_per_node)
    assert hosts(made) == ["a", "a", "b", "b"]
    assert made.task_id == 3


@pytest.mark.parametrize(
    ("arguments", "error", "expected"),
    [
        ({"jobs": {"worker": 6}}, LauncherError, "Requested 6 tasks but only 5 were assigned"),
        ({"jobs": {"worker": 4}}, LauncherError, "Requested 4 tasks and 5 were assigned.*srun -n 4"),
        ({"jobs": ["worker"]}, TypeError, "`jobs` must be a dict from job to number of tasks"),
        ({"jobs": {"worker": "5"}}, TypeError, r"`jobs\['worker'\]` must be an integer"),
        ({"jobs": {"worker": -5}}, ValueError, r"`jobs\['worker'\]` must .* got -5"),
        ({"port_base": "x"}, TypeError, "`port_base` must be an integer"),
        ({"gpus_per_node": 2, "gpus_per_task": 1}, LauncherError, "Requested more GPUs per node than available"),
        ({"gpus_per_task": 1}, LauncherError, "Expected at most 0 on a node, got 3 tasks with 1 each"),
        ({"gpus_per_node": -1}, ValueError, "`gpus_per_node` must .* got -1"),
        # A cluster of other tasks than the step's would be another one than that of the ranks.
        ({"tasks_per_node": {"n3": 1}}, LauncherError, r"TASKS is 5, and `tasks_per_node` has 1 task\(s\) on n3; exp"),
        ({"tasks_per_node": 3}, LauncherError, r"TASKS is 5, and `tasks_per_node` has 6 task\(s\) on n\[3-4\]; e"),
        ({"tasks_per_node": 0}, ValueError, "`tasks_per_node` must be an integer of at least 1, got 0"),
        ({"tasks_per_node": {3: 5}}, TypeError, r"`tasks_per_node` must be a number, or .* by host.* got \{3: 5\}"),
        ({"tasks_per_node": {"n3": "5"}}, TypeError, r"`tasks_per_node\['n3'\]` must be an integer"),
        ({"tasks_per_node": {}}, TypeError, r"`tasks_per_node` must be .* got \{\}"),
        ({"hosts": ["a"] * 6}, LauncherError, r"TASKS is 5, and `hosts` has 6 task\(s\) on a; expected the same"),
        ({"hosts": "abcde"}, TypeError, "`hosts` must be names of hosts.* got 'abcde'"),
        ({"hosts": [None] * 5}, TypeError, r"`hosts` must be names of hosts.* got \[None, "),
        ({"components": "ps"}, TypeError, "`components` must be names of jobs.* got 'ps'"),
        ({"components": ()}, TypeError, r"`components` must be names of jobs.* got \(\)"),
        ({"jobs": {None: 5}}, TypeError, r"`jobs` must be a dict from job to number of tasks.* got \{None: 5\}"),
        ({"jobs": {}}, TypeError, r"`jobs` must be a dict from job to number of tasks.* got \{\}"),
    ],
)
def test_wrong_arguments(
    arguments: dict[str, object], error: type[Exception], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(error, match=expected):
        resolver(monkeypatch, ranks_of("srun pmi2")[4], **arguments)


@pytest.mark.parametrize(
    ("name", "rank", "expected"),
    [
        ("sbatch script", 0, "SLURM_STEP_NODELIST not found in environment.*Slurm job 5, but in no step of it.*srun"),
        ("salloc", 0, "SLURM_PROCID not found in environment.*Slurm job 8, but in no step"),
        ("het script", 0, "SLURM_STEP_NODELIST not found in environment"),
        ("Hydra", 0, "SLURM_PROCID not found in environment. Not running inside a SLURM step.*no.*part of a Slurm job"),
        ("Open MPI in sbatch", 1, "Open MPI mpirun started this process as rank 1 of 5, and SLURM_PROCID=0 and SLURM_"
                                  r"STEP_NUM_TASKS=\(unset\) are not its own.*MPIClusterResolver"),
        ("Open MPI in sbatch", 0, "SLURM_STEP_NODELIST not found"),
        ("Open MPI in sbatch", 3, "rank 3 of 5, and SLURM_PROCID=0 and SLURM_STEP_NUM_TASKS=1 are not its own"),
        ("Hydra in sbatch", 0, r"MPICH mpirun \(Hydra\) started this process as rank 0 of 5.*NUM_TASKS=2 are not"),
        ("srun arbitrary", 2, r"SLURM_DISTRIBUTION=arbitrary: Slurm does not tell.*Pass hosts="),
    ],
)
def test_a_process_that_is_no_task_of_a_step_is_told_so(
    name: str, rank: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(LauncherError, match=expected):
        resolver(monkeypatch, ranks_of(name)[rank])


@pytest.mark.parametrize(
    ("changed", "error", "expected"),
    [
        ({"SLURM_STEP_NODELIST": "n[3-"}, ValueError, r"SLURM_STEP_NODELIST: malformed host list 'n\[3-'.*character 5"),
        ({"SLURM_STEP_TASKS_PER_NODE": "3x"}, ValueError, r"SLURM_STEP_TASKS_PER_NODE: expected numbers of tasks such"),
        ({"SLURM_STEP_TASKS_PER_NODE": "5"}, LauncherError, r"has 2 node\(s\) \(n\[3-4\]\).*TASKS_PER_NODE=5 1; exp"),
        # The sum is the number of tasks, 5, and each node has one number.
        ({"SLURM_STEP_TASKS_PER_NODE": "4(x2)"}, LauncherError,
         r"SLURM_STEP_NUM_TASKS is 5, and SLURM_STEP_TASKS_PER_NODE=4\(x2\) has 8 task\(s\) on n\[3-4\]; expected the"),
        ({"SLURM_STEP_TASKS_PER_NODE": "3,1"}, LauncherError, "SLURM_STEP_NUM_TASKS is 5, .* has 4 task"),
        ({"SLURM_STEP_NODELIST": "n3,n3"}, LauncherError, "each node of the step once, got SLURM_STEP_NODELIST=n3,n3"),
        ({"SLURM_STEP_TASKS_PER_NODE": "99999999999(x2)"}, LauncherError, "at most 16777216 tasks in a step, got 199"),
        ({"SLURM_STEP_TASKS_PER_NODE": "1(x99999999999)"}, ValueError, r"at most 65536 nodes, got .*'1\(x9{11}\)'"),
        ({"SLURM_STEP_NODELIST": "[" * 2000}, ValueError, "SLURM_STEP_NODELIST: malformed .*got a bracket in 8 others"),
        ({"SLURM_PROCID": "x"}, ValueError, "SLURM_PROCID must be a number from 0, got 'x'"),
        ({"SLURM_DISTRIBUTION": "block"}, LauncherError, "rank 3 runs on node n4 .SLURM_NODEID=1.; expected n3"),
    ],
)
def test_variables_that_contradict_one_another(
    changed: dict[str, str], error: type[Exception], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = {**ranks_of("srun cyclic")[3], "SLURM_STEP_TASKS_PER_NODE": "4,1", **changed}
    with pytest.raises(error, match=expected):
        resolver(monkeypatch, environment)


def test_given_hosts_replace_what_slurm_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    told = ["n2", "n1", "n2", "n1", "n3"]
    made = resolver(monkeypatch, ranks_of("srun arbitrary")[4], hosts=told)
    assert (hosts(made), made.task_id) == (told, 4)
    with pytest.raises(LauncherError, match=r"host of each of the step's 5 tasks, .* got 4 host\(s\)"):
        resolver(monkeypatch, ranks_of("het")[1], hosts=list("abcd"))
    servers = resolver(monkeypatch, ranks_of("het")[1], hosts=list("abcde"))
    assert servers.cluster_spec().as_dict() == {
        "ps": ["a:8888", "b:8888"], "chief": ["c:8888"], "worker": ["d:8888", "e:8888"]
    }


# A process that nobody has started on all tasks.


@pytest.mark.parametrize(("name", "expected"), [
    ("sbatch script", "Slurm job 5 has 5 tasks, and this process runs alone.* Write srun --mpi=pmix"),
    ("salloc", "Slurm job 8 has 4 tasks"),
    ("het script", "has 2 tasks|has [0-9] nodes"),
])
def test_a_process_that_runs_alone_in_a_job_of_several_tasks_is_told_so(name: str, expected: str) -> None:
    text = idle_tasks.idle_tasks_warning(ranks_of(name)[0])
    assert text is not None
    assert re.search(expected, text)


@pytest.mark.parametrize(
    "name", ["srun pmi2", "srun pmix", "srun none", "srun one", "Hydra in sbatch", "Open MPI in sbatch", "array", "het"]
)
def test_ranks_are_not_alone(name: str) -> None:
    assert idle_tasks.idle_tasks_warning(ranks_of(name)[0]) is None
    alone = {"SLURM_JOB_ID": "3", "SLURM_NTASKS": "1", "SLURM_JOB_NUM_NODES": "1"}
    assert idle_tasks.idle_tasks_warning(alone) is None
    assert idle_tasks.idle_tasks_warning({}) is None
    several = idle_tasks.idle_tasks_warning({"SLURM_JOB_ID": "3", "SLURM_JOB_NUM_NODES": "2"})
    assert several is not None
    assert "has 2 nodes" in several


@pytest.mark.parametrize(("counts", "wanted", "most"), [("1(x2)", "4", 1), ("1", "8", 1), ("3,2", "4", 3)])
def test_a_step_with_fewer_tasks_than_the_job_has_on_each_node_is_told_so(counts: str, wanted: str, most: int) -> None:
    total = sum(parse_counts(counts))
    step = {
        "SLURM_JOB_ID": "3", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": str(total), "SLURM_STEP_NODELIST": "n[1-2]",
        "SLURM_STEP_TASKS_PER_NODE": counts, "SLURM_NTASKS_PER_NODE": wanted, "SLURM_LOCALID": "0", "PMIX_RANK": "0",
    }
    text = idle_tasks.idle_tasks_warning(step)
    assert text is not None
    assert f"has --ntasks-per-node={wanted}, and srun has started {total} task(s)" in text
    assert f"give --ntasks-per-node={most} to srun" in text
    # One task says it, and a step that has as many on some node is as it was meant.
    assert idle_tasks.idle_tasks_warning({**step, "SLURM_PROCID": "1"}) is None
    assert idle_tasks.idle_tasks_warning({**step, "SLURM_NTASKS_PER_NODE": str(most)}) is None
    assert idle_tasks.idle_tasks_warning({**step, "SLURM_HET_SIZE": "2"}) is None
    assert idle_tasks.idle_tasks_warning({**step, "SLURM_STEP_TASKS_PER_NODE": "x"}) is None


def test_the_warning_comes_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    for name in list(os.environ):
        if name.startswith(("SLURM_", "PMI", "OMPI_", "MPI_LOCAL")):
            monkeypatch.delenv(name)
    for name, value in ranks_of("salloc")[0].items():
        monkeypatch.setenv(name, value)
    idle_tasks.warn_about_idle_tasks.cache_clear()
    for kind in (mpidist.MultiWorkerMirroredStrategy, mpidist.MirroredStrategy):
        kind()
    agree_on_roles(SoloCommunicator())
    idle_tasks.warn_about_idle_tasks.cache_clear()
    assert [record.message[:12] for record in caplog.records] == ["Slurm job 8 "]
    (ok, note) = cluster.look_at_cluster()
    assert (ok.state, note.state) == ("ok", "note")
    assert note.fix.startswith("Write srun --mpi=pmix (Open MPI)")


# Heterogeneous jobs.


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # Component 0 serves, component 1 works; its first task is the chief.
        ("het", {"ps": ["n1", "n1"], "chief": ["n2"], "worker": ["n2", "n3"]}),
        ("het part", {"ps": ["n1"], "chief": ["n2"], "worker": ["n3"]}),
        ("het srun", {"ps": ["n1"], "chief": ["n2"], "worker": ["n2", "n3"]}),
        # A step in one component is as in any other job.
        ("het one", {"worker": ["n2", "n2", "n3"]}),
        ("het without group", {"worker": ["n1", "n1"]}),
        # Ranks count through the components, while SLURM_STEP_NODELIST is sorted: rank 0 is on n3.
        ("het named", {"ps": ["n3"], "worker": ["n1", "n1", "n2"], "chief": ["n4"]}),
        ("het named part", {"ps": ["n3"], "chief": ["n1"], "worker": ["n1", "n2"]}),
    ],
)
def test_a_component_of_a_heterogeneous_job_is_a_job_of_the_cluster(
    name: str, expected: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for environment in ranks_of(name):
        made = resolver(monkeypatch, environment)
        assert {job: hosts(made, job) for job in made.cluster_spec().jobs} == expected


@pytest.mark.parametrize(
    ("components", "expected"),
    [
        (("worker",), {"worker": 5}),
        (("worker", "ps"), {"chief": 1, "worker": 1, "ps": 3}),
        (("chief", "ps", "worker"), {"chief": 2, "ps": 3}),
        (["evaluator", "worker"], {"evaluator": 2, "worker": 3}),
    ],
)
def test_components_can_be_named(
    components: object, expected: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = resolver(monkeypatch, ranks_of("het")[0], components=components).cluster_spec()
    assert {job: spec.num_tasks(job) for job in spec.jobs} == expected


@pytest.mark.parametrize("components", ["ps", ()])
def test_components_must_be_names(components: object, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match="`components` must be names of jobs"):
        resolver(monkeypatch, ranks_of("het")[0], components=components)


def test_components_need_nodes_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = {**ranks_of("het")[0], "SLURM_JOB_NODELIST_HET_GROUP_0": "n[1-2]"}
    with pytest.raises(LauncherError, match=r"expected each node of the step \(n\[1-3\]\) in one component.*n\[1-2\]"):
        resolver(monkeypatch, shared)


# GPUs.


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("srun pmi2", {}, 0),
        ("srun pmi2", {"gpus_per_node": 0}, 0),
        ("srun pmi2", {"gpus_per_node": 4}, 1),
        ("srun pmi2", {"gpus_per_node": 7, "gpus_per_task": 2}, 2),
        ("gpus per node", {}, 1),
        ("gpus per node", {"gpus_per_task": 0}, 0),
        # Each task sees its own GPU only, and the node has two.
        ("gpus per task", {}, 1),
        ("gpus per task", {"gpus_per_task": 1}, 1),
    ],
)
def test_gpus_of_a_task(
    name: str, arguments: dict[str, int], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = resolver(monkeypatch, {"CUDA_VISIBLE_DEVICES": "", **ranks_of(name)[1]}, **arguments)
    assert made.num_accelerators() == ({"GPU": expected} if expected else {})


@pytest.mark.parametrize("hidden", ["", "-1", "-1,0"])
def test_hidden_gpus_are_none(hidden: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = resolver(monkeypatch, {**ranks_of("srun pmi2")[0], "CUDA_VISIBLE_DEVICES": hidden})
    assert made.num_accelerators() == {}


# The numbers of tasks.


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(1, 4)), min_size=1, max_size=8))
def test_numbers_of_tasks_are_read(runs: list[tuple[int, int]]) -> None:
    text = ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in runs)
    assert parse_counts(text) == [count for count, times in runs for _ in range(times)]


@pytest.mark.parametrize("text", ["", "2(x)", "2(3)", "-1", "2,,1", "x", "\u0661", "9" * 30])
def test_malformed_numbers_of_tasks(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected numbers of tasks such as '2\(x3\),1', got"):
        parse_counts(text)


@pytest.mark.parametrize("name", RECORDED)
def test_only_tasks_that_srun_started_are_in_a_step_of_their_own(name: str) -> None:
    environments = ranks_of(name)
    assert [is_own_step(environment) for environment in environments] == [name in STEPS] * len(environments)
