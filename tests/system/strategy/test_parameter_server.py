"""Programs with parameter servers: they end in good order, and a worker may be killed in the middle."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.helpers.launching import run_program
from tests.helpers.markdown import ROOT, blocks_of
from tests.helpers.waiting import until_exists

pytestmark = pytest.mark.timeout_seconds(180)

HEAD = """
import os, signal, sys, time
import numpy as np
import mpidist
"""
PLAIN = HEAD + """
resolver = mpidist.cluster_resolver.MPIClusterResolver(num_ps=2)
strategy = mpidist.ParameterServerStrategy(resolver, options=mpidist.ServerOptions(heap_bytes=1 << 22))
coordinator = mpidist.coordinator.ClusterCoordinator(strategy)
with strategy.scope():
    counts = [mpidist.Variable(0) for _ in range(4)]
print([count.device[18:24] for count in counts])
for count in counts:
    coordinator.schedule(lambda count: count.assign_add(2), (count,))
coordinator.join()
print("counts", [int(count) for count in counts])

# Workers have not come to these lines.
class Pair(tuple):
    pass

class OwnError(Exception):
    pass

def turn(pair):
    if pair[0] == pair[1]:
        raise OwnError(pair)
    return Pair(reversed(pair))

turned = coordinator.schedule(turn, (Pair((1, 2)),)).fetch()
print("turned", turned, type(turned) is Pair)
try:
    coordinator.schedule(turn, (Pair((3, 3)),), on_error="keep").fetch()
except OwnError as error:
    print("caught", error)
for build in (
    lambda: mpidist.ParameterServerStrategy(resolver), mpidist.MultiWorkerMirroredStrategy, mpidist.MirroredStrategy,
    mpidist.cluster_resolver.MPIClusterResolver, mpidist.data.Dataset.from_tensor_slices(np.arange(4)).shared,
):
    try:
        build()
    except RuntimeError as error:
        print(error)
"""


def test_a_program_ends_in_good_order_on_all_ranks(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PLAIN)
    result = run_program(4, program)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "counts [2, 2, 2, 2]" in result.stdout
    assert "turned (2, 1) True\ncaught (3, 3)\n" in result.stdout
    assert result.stdout.count("the other ranks are serving it and will not reach") == 5, result.stdout
    assert result.stdout.count("counts") == 1, "only the chief goes on"
    assert "task:0', 'task:1', 'task:0', 'task:1" in result.stdout, result.stdout


# The branches of tf.distribute's documentation.
BRANCHES = HEAD + """
cluster_resolver = mpidist.cluster_resolver.MPIClusterResolver(num_ps=1, num_evaluators=int(sys.argv[1]))
if cluster_resolver.task_type == "chief":
    options = mpidist.ServerOptions(heap_bytes=1 << 22)
    strategy = mpidist.ParameterServerStrategy(cluster_resolver, options=options)
    coordinator = mpidist.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        counts = [mpidist.Variable(np.full(1000, float(number))) for number in range(4)]
    for count in counts:
        for _ in range(5):
            coordinator.schedule(lambda count: count.assign_add(np.ones(1000)), (count,))
    coordinator.join()
    print("counts", [set(count.numpy().tolist()) for count in counts])
elif cluster_resolver.task_type in ("worker", "ps"):
    server = mpidist.Server(
        cluster_resolver.cluster_spec(),
        job_name=cluster_resolver.task_type,
        task_index=cluster_resolver.task_id,
        protocol="grpc")
    server.join()
    print("joined")
else:
    strategy = mpidist.ParameterServerStrategy(cluster_resolver)
    print("evaluator alone:", strategy.communicator.size, strategy.options.heap_bytes)
"""


@pytest.mark.parametrize(("ranks", "evaluators"), [(1, 0), (4, 0), (4, 1)])
def test_a_program_that_branches_by_role(tmp_path: Path, ranks: int, evaluators: int) -> None:
    program = tmp_path / "program.py"
    program.write_text(BRANCHES)
    result = run_program(ranks, program, evaluators)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "counts [{5.0}, {6.0}, {7.0}, {8.0}]" in result.stdout, result.stdout + result.stderr
    assert "joined" not in result.stdout, "a server leaves the program"
    assert result.stdout.count("evaluator alone: 1 268435456") == evaluators
    # As it was started, this job ends with any of its ranks.
    warning = f"the death of ranks 0-{ranks - 1} ends the whole job; to let the other ranks survive, launch it by: "
    assert result.stderr.count(warning) == (1 if ranks > 1 else 0), result.stderr


def test_the_options_of_the_chief_count(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(HEAD + """
resolver = mpidist.cluster_resolver.MPIClusterResolver(num_ps=1)
is_chief = resolver.task_type == "chief"
options = mpidist.ServerOptions(heap_bytes=1 << 22) if is_chief else None
strategy = mpidist.ParameterServerStrategy(resolver, serve=False, options=options)
os.write(1, f"{resolver.task_type} {strategy.options.heap_bytes}\\n".encode())
strategy.close() if is_chief else strategy.serve()
""")
    result = run_program(3, program)
    assert result.returncode == 0, result.stdout + result.stderr
    assert sorted(result.stdout.split("\n")) == ["", "chief 4194304", "ps 4194304", "worker 4194304"]


@pytest.mark.parametrize("ranks", [1, 4])
def test_the_program_of_the_guide(tmp_path: Path, ranks: int) -> None:
    page = ROOT / "docs" / "parameter-servers.md"
    blocks = [block.text for block in blocks_of(page.read_text()) if "coordinator.schedule(" in block.text]
    # The last block goes on with what the first one has made.
    assert ["import mpidist" in block for block in blocks] == [True, True, False]
    # One task with a number of its own for each rank.
    jobs = {"chief": ["a:1"], "worker": ["a:2", "a:3"], "ps": ["a:4"]}
    config = json.dumps({"cluster": jobs}) if ranks > 1 else ""
    for text, printed in (
        (f"{blocks[0]}\n{blocks[2]}", "[2. 2. 2.] 80\n200\n"), (blocks[1], "[1. 1.] [0. 0.] [(500, 8), (500, 8)]\n")
    ):
        program = tmp_path / "program.py"
        program.write_text(text)
        result = run_program(ranks, program, TF_CONFIG=config)
        assert result.returncode == 0, result.stdout + result.stderr
        assert result.stdout == printed, result.stdout + result.stderr


def run_to_the_end(ranks: int, program: Path, *arguments: object, killed: Path) -> str:
    """What a program writes whose ranks live on after a death, and a process of which is killed that a file names."""

    def kill(job: subprocess.Popen[str]) -> None:
        until_exists(killed, job=job)
        os.kill(int(killed.read_text()), signal.SIGKILL)

    # The launcher's code says nothing after a death.
    result = run_program(ranks, program, *arguments, kills=True, timeout_seconds=100, meanwhile=kill)
    return result.stdout + result.stderr


@pytest.mark.parametrize(("rank", "name"), [(0, "chief 0"), (3, "ps 1")])
def test_the_death_of_the_chief_or_of_a_server_ends_all_ranks(tmp_path: Path, rank: int, name: str) -> None:
    program = tmp_path / "program.py"
    note = (
        "from mpidist.comm.group.opening import open_communicator\n"
        f"pid = os.getpid() if open_communicator().rank == {rank} else 0\n"
    )
    wait = (
        "\nimport itertools\n"
        "for number in itertools.count():\n    coordinator.schedule(lambda: None)\n    coordinator.join()\n"
        "    if number == 100:\n        marks.put(sys.argv[1] + '/pid', marks.read(sys.argv[1] + '/me'))\n"
    )
    write = "from tests.helpers import marks\nif pid:\n    marks.put(sys.argv[1] + '/me', pid)\n"
    program.write_text(PLAIN.replace("resolver = ", note + write + "resolver = ", 1) + wait)
    text = run_to_the_end(4, program, tmp_path, killed=tmp_path / "pid")
    assert f"DeadRankError: {name} (rank {rank}) has died; training cannot continue without it" in text, text


@pytest.mark.parametrize(("how", "code", "why"), [
    ("sys.exit(7)", 7, r"rank 0 of 4 on \S+ exited with 7, the job ends"),
    ("raise ValueError('of mine')", 1, r"(?s)rank 0 of 4 on \S+ failed, the job ends.*ValueError: of mine"),
])
def test_the_code_of_a_chief_that_fails_is_the_launchers(tmp_path: Path, how: str, code: int, why: str) -> None:
    """Also where the launcher lets the others live: nobody has died, and nobody waits."""
    program = tmp_path / "program.py"
    program.write_text(f"{PLAIN}\nprint('trained', flush=True)\n{how}\n")
    result = run_program(4, program, kills=True)
    text = result.stdout + result.stderr
    assert result.returncode == code, text
    assert "trained" in text, text
    assert len(re.findall(why, text)) == 1, text
    assert "DeadRankError" not in text, text


AFTER_A_DEATH = HEAD + """
from mpidist.coordinator import experimental_get_current_worker_index
resolver = mpidist.cluster_resolver.MPIClusterResolver(num_ps=1)
strategy = mpidist.ParameterServerStrategy(resolver, options=mpidist.ServerOptions(heap_bytes=1 << 22))
coordinator = mpidist.coordinator.ClusterCoordinator(strategy)
with strategy.scope():
    count = mpidist.Variable(0)

def die_first():
    if experimental_get_current_worker_index() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    count.assign_add(1)
    return experimental_get_current_worker_index()

kept = coordinator.schedule(lambda: "of the dead", worker=0)
coordinator.join()
# What is bound to a worker goes to another one when it has died; what is bound to the other one stays there.
values = [coordinator.schedule(die_first, worker=worker) for worker in (0, 1, 0)]
print("workers", coordinator.fetch(values), int(count), kept.fetch())
mpidist.Checkpoint(count=count).save(sys.argv[1] + "/ckpt")
print("saved", flush=True)
"""


@pytest.mark.parametrize(("end", "code"), [
    ("", 0), ("sys.exit()", 0), ("sys.exit(7)", 7), ("raise ValueError('of mine')", 1),
    ("raise SystemExit(7)", 7), pytest.param("raise SystemExit(0)", 0, marks=pytest.mark.long),
    pytest.param("raise KeyboardInterrupt", 130, marks=pytest.mark.long),
], ids=["end", "exit", "exit with 7", "error", "SystemExit", "SystemExit with 0", "interrupt"])
def test_the_code_of_the_chief_is_in_a_file_after_a_death(tmp_path: Path, end: str, code: int) -> None:
    program = tmp_path / "program.py"
    program.write_text(AFTER_A_DEATH + end)
    result = run_program(4, program, tmp_path, kills=True, timeout_seconds=100)
    text = result.stdout + result.stderr
    assert "workers [1, 1, 1] 3 of the dead" in text, text
    assert (tmp_path / "exit-code").read_text() == f"{code}\n", text


# The chief and the worker do something else for long when a server or the chief dies.
BUSY = HEAD + """
from mpidist.comm.group.opening import open_communicator
from tests.helpers import marks
folder, dying = sys.argv[1], int(sys.argv[2])
pid = os.getpid() if open_communicator().rank == dying else 0
if pid:
    marks.put(folder + "/me", pid)
resolver = mpidist.cluster_resolver.MPIClusterResolver(num_ps=int(sys.argv[3]))
strategy = mpidist.ParameterServerStrategy(resolver, options=mpidist.ServerOptions(heap_bytes=1 << 22))
coordinator = mpidist.coordinator.ClusterCoordinator(strategy)
with strategy.scope():
    weights = [mpidist.Variable(np.zeros(7), name=f"weight {number}") for number in range(3)]
checkpoint = mpidist.Checkpoint(weights=weights)
path = mpidist.latest_checkpoint(folder)
if path is None:
    for number, weight in enumerate(weights):
        coordinator.schedule(lambda weight, number: weight.assign_add(np.full(7, number + 1.0)), (weight, number))
    coordinator.join()
    checkpoint.save(folder + "/ckpt")
    coordinator.schedule(lambda: (marks.put(folder + "/pid", marks.read(folder + "/me")), marks.stay()))
    marks.stay()
checkpoint.restore(path).assert_consumed()
print("restored", [set(weight.numpy().tolist()) for weight in weights])
"""


@pytest.mark.parametrize("dying", [0, 3])
def test_a_death_ends_ranks_that_do_something_else_and_a_checkpoint_goes_on(tmp_path: Path, dying: int) -> None:
    program = tmp_path / "program.py"
    program.write_text(BUSY)
    # They would stay where they are for ever.
    text = run_to_the_end(4, program, tmp_path, dying, 2, killed=tmp_path / "pid")
    told = set(re.findall(rf"mpidist: rank (\d) of 4 on \S+ cannot continue: .*rank {dying} of 4 \(process ", text))
    assert told == {"0", "1", "2", "3"} - {str(dying)}, text
    assert (tmp_path / "exit-code").exists() == (dying != 0)
    result = run_program(3, program, tmp_path, -1, 1)
    assert "restored [{1.0}, {2.0}, {3.0}]" in result.stdout, result.stdout + result.stderr
    assert result.returncode == 0, result.stderr
