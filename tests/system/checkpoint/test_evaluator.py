"""An evaluator beside the training: it follows the checkpoints, and ends with the job."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.launching import run_program
from tests.hosts.virtual_hosts import VirtualHosts

pytestmark = pytest.mark.timeout_seconds(120)

SYNCHRONOUS = """
import sys
import mpidist
from tests.helpers import marks

resolver = mpidist.cluster_resolver.MPIClusterResolver(num_evaluators=1)
strategy = mpidist.MultiWorkerMirroredStrategy(resolver)
with strategy.scope():
    step = mpidist.Variable(0)
checkpoint = mpidist.Checkpoint(step=step)
if strategy.task_type == "evaluator":
    for path in mpidist.checkpoints_iterator(sys.argv[1]):
        checkpoint.restore(path)
        print("evaluated", int(step.value()), flush=True)
        marks.put(f"{sys.argv[1]}-{int(step.value())}")
    print("no more", flush=True)
else:
    for number in range(1, 4):
        step.assign(number)
        checkpoint.save(f"{sys.argv[1]}/c")
        marks.read(f"{sys.argv[1]}-{number}")
    step.assign(100)
    checkpoint.save(f"{sys.argv[1]}/c")
"""

NOT_ITERATING = SYNCHRONOUS.replace("for path in mpidist.checkpoints_iterator(sys.argv[1])", "for path in ()").replace(
    'marks.read(f"{sys.argv[1]}-{number}")', "pass"
)

# The evaluator fails at the first checkpoint, and the others train on.
FAILING = """
import sys
import mpidist
from tests.helpers.waiting import let_pass, until_has_ended

resolver = mpidist.cluster_resolver.MPIClusterResolver(num_evaluators=1)
strategy = mpidist.MultiWorkerMirroredStrategy(resolver)
with strategy.scope():
    step = mpidist.Variable(0)
checkpoint = mpidist.Checkpoint(step=step)
if strategy.task_type == "evaluator":
    for path in mpidist.checkpoints_iterator(sys.argv[1], restore=checkpoint):
        FAILURE
checkpoint.save(f"{sys.argv[1]}/c")
until_has_ended(2)
let_pass(3)
for _ in range(3):
    strategy.reduce("SUM", 1, axis=None)
checkpoint.save(f"{sys.argv[1]}/c")
print("trained to the end", flush=True)
"""

# What a strategy with parameter servers does: all ranks tolerate deaths, and the chief trains on. On other hosts its
# window tells it and the server who has died.
SERVERS = """
import os, signal, sys
import mpidist
from mpidist.cluster.roles.server_roles import agree_on_roles
from mpidist.comm.group.opening import open_communicator
from mpidist.failures.deaths import WATCH
from mpidist.failures.ending import tolerate_deaths
from tests.helpers import marks

folder = sys.argv[1]
ranks = open_communicator()
roles = agree_on_roles(ranks, mpidist.cluster_resolver.MPIClusterResolver(num_ps=1, num_evaluators=1))
tolerate_deaths()
step = mpidist.Variable(0)
checkpoint = mpidist.Checkpoint(step=step)
if roles.task_type == "evaluator":
    for path in mpidist.checkpoints_iterator(sys.argv[1]):
        checkpoint.restore(path)
        print("evaluated", int(step.value()), flush=True)
        marks.put(f"{sys.argv[1]}-{int(step.value())}")
    print("no more", flush=True)
elif roles.task_type == "worker":
    marks.hold(folder + "-worker")
    marks.read(folder + "-1")
    os.kill(os.getpid(), signal.SIGKILL)
elif roles.task_type == "chief":
    for number in (1, 2, 3, 4, 100):
        step.assign(number)
        checkpoint.save(folder + "/c")
        if number < 100:
            # The evaluator follows after the death as before.
            marks.read(f"{folder}-{number}")
            marks.until_released(folder + "-worker")
    marks.put(folder + "-chief")
else:
    # It is there as long as the chief trains.
    marks.read(folder + "-chief")
if roles.task_type != "evaluator":
    WATCH.note(ranks.processes[1], "rank 1 of 4")
"""

# The chief signals all processes of the job, the evaluator first, as Slurm does.
SIGNALLED = """
import os, signal, sys
from pathlib import Path
import mpidist
from tests.helpers import marks
from tests.helpers.waiting import let_pass
from mpidist.experimental import PreemptionCheckpointHandler, TerminationConfig

folder, name, kind, has_handler = Path(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4] == "handler"

def tell():
    # Called while it waits for a checkpoint.
    if (signal.getsignal(signal.SIGTERM) != signal.SIG_DFL) == has_handler:
        marks.put(folder / "ready", os.getpid())

resolver = mpidist.cluster_resolver.MPIClusterResolver(num_ps=int(kind == "servers"), num_evaluators=1)
marks.put(folder / f"rank-{resolver.task_type}-{resolver.task_id}", os.getpid())
if kind == "servers":
    options = mpidist.ServerOptions(heap_bytes=1 << 20)
    strategy = mpidist.ParameterServerStrategy(resolver, options=options)
else:
    strategy = mpidist.MultiWorkerMirroredStrategy(resolver)
with strategy.scope():
    step = mpidist.Variable(0, aggregation=mpidist.VariableAggregation.ONLY_FIRST_REPLICA)
checkpoint = mpidist.Checkpoint(step=step)

if strategy.cluster_resolver.task_type == "evaluator":
    seen = []
    for path in mpidist.checkpoints_iterator(folder / "checkpoints", timeout=0.05, timeout_fn=tell, restore=checkpoint):
        seen.append(int(step.value()))
    print("the evaluator ends by itself after", seen, flush=True)
else:
    config = TerminationConfig(exit_code=75)
    manager = mpidist.CheckpointManager(checkpoint, folder / "checkpoints", max_to_keep=3)
    handler = PreemptionCheckpointHandler(None, manager, termination_config=config) if has_handler else None
    if resolver.task_type == "chief":
        evaluator = int(marks.read(folder / "ready"))
        others = {int(path.read_text()) for path in folder.glob("rank-*")} - {evaluator, os.getpid()}
        for process in (evaluator, *others, os.getpid()):
            os.kill(process, getattr(signal, name))
    # Until a signal ends it.
    while True:
        if handler is not None:
            handler.run(step.assign_add, 1)
        let_pass(0.01)
"""


def evaluated(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"evaluated (\d+)", text)]


@pytest.mark.parametrize("hosts", [1, 2])
def test_an_evaluator_follows_and_ends_with_the_job(
    tmp_path: Path, hosts: int, request: pytest.FixtureRequest
) -> None:
    program = tmp_path / "program.py"
    program.write_text(SYNCHRONOUS)
    if hosts == 1:
        result = run_program(3, program, tmp_path / "run")
    else:
        # The evaluator alone on a host, from which it sees no process of the others.
        result = request.getfixturevalue("virtual_hosts")(hosts).run((2, 1), program, tmp_path / "run")
    text = result.stdout + result.stderr
    assert result.returncode == 0, text
    assert evaluated(text) == [1, 2, 3, 100], text
    assert text.count("no more") == 1, text


def test_an_evaluator_that_follows_nothing_ends_as_before(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(NOT_ITERATING)
    result = run_program(3, program, tmp_path / "run")
    text = result.stdout + result.stderr
    assert result.returncode == 0, text
    assert "mpidist:" not in text
    assert text.count("no more") == 1, text


@pytest.mark.parametrize(("failure", "code"), [("raise KeyError('one of its own')", 1), ("sys.exit(3)", 3)])
def test_an_error_of_an_evaluator_does_not_end_the_training(tmp_path: Path, failure: str, code: int) -> None:
    program = tmp_path / "program.py"
    program.write_text(FAILING.replace("FAILURE", failure))
    result = run_program(3, program, tmp_path / "run")
    text = result.stdout + result.stderr
    assert text.count("trained to the end") == 2, text
    assert result.returncode == code, text
    assert ("failed; the training continues" in text) == ("KeyError: 'one of its own'" in text) == (code == 1), text
    assert "the job ends" not in text, text


def test_the_death_of_an_evaluator_does_not_end_the_training(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    kill = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    program.write_text(FAILING.replace("FAILURE", kill).replace("until_has_ended", "until_has_died"))
    result = run_program(3, program, tmp_path / "run", kills=True)
    text = result.stdout + result.stderr
    assert text.count("trained to the end") == 2, text
    assert text.count("the evaluator, has died; the training continues") == 1, text
    assert "cannot continue" not in text, text
    assert "has ended without" not in text, text


def test_an_evaluator_ends_with_the_job_after_a_workers_death(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(SERVERS)
    # The launcher's exit code is that of the dead rank.
    result = run_program(4, program, tmp_path / "run", kills=True)
    text = result.stdout + result.stderr
    assert evaluated(text) == [1, 2, 3, 4, 100], text
    assert text.count("no more") == 1, text
    assert "Traceback" not in text


def test_an_evaluator_on_another_host_ends_after_a_workers_death(
    tmp_path: Path, virtual_hosts: Callable[[int], VirtualHosts]
) -> None:
    program = tmp_path / "program.py"
    program.write_text(SERVERS)
    hosts = virtual_hosts(4)
    hosts.survivors_live = True
    # The evaluator sees nobody's process, and the launcher may end the ranks of a host together.
    result = hosts.run((1, 1, 1, 1), program, tmp_path / "run")
    text = result.stdout + result.stderr
    assert evaluated(text) == [1, 2, 3, 4, 100], text
    assert text.count("no more") == 1, text
    assert "Traceback" not in text


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("all", "SIGTERM"), ("servers", "SIGUSR1"),
        pytest.param("all", "SIGUSR1", marks=pytest.mark.long),
        pytest.param("servers", "SIGTERM", marks=pytest.mark.long),
    ],
)
def test_an_evaluator_lives_on_at_signals_until_the_chief_has_saved(tmp_path: Path, kind: str, name: str) -> None:
    program = tmp_path / "program.py"
    program.write_text(SIGNALLED)
    result = run_program(4 if kind == "servers" else 3, program, tmp_path, name, kind, "handler")
    text = result.stdout + result.stderr
    assert result.returncode == 75, text
    assert f"the job is about to end ({name}): saved" in text, text
    assert "the job ends" not in text, text
    steps = int(re.findall(r"after (\d+) steps", text)[0])
    # It has seen what the chief has saved last.
    found = re.findall(r"the evaluator ends by itself after \[([0-9, ]+)\]", text)
    assert [int(one) for one in found[0].split(",")] == [steps], text


def test_without_a_handler_signals_end_an_evaluator_as_any_rank(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(SIGNALLED)
    result = run_program(3, program, tmp_path, "SIGTERM", "all", "none")
    assert "ends by itself" not in result.stdout, result.stdout + result.stderr
    assert result.returncode not in (0, 75), result.stdout + result.stderr
