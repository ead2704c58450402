"""An evaluator beside the training: it follows the checkpoints, and ends with the job."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.hosts.virtual_hosts import VirtualHosts
from tests.launching import launch_environment, run_program
from tests.system.test_deaths import survivors_live

pytestmark = pytest.mark.timeout_seconds(120)

ROOT = str(Path(__file__).resolve().parent.parent.parent)

SYNCHRONOUS = """
import sys, time
import mpidist

resolver = mpidist.cluster_resolver.MPIClusterResolver(num_evaluators=1)
strategy = mpidist.MultiWorkerMirroredStrategy(resolver)
with strategy.scope():
    step = mpidist.Variable(0)
checkpoint = mpidist.Checkpoint(step=step)
if strategy.task_type == "evaluator":
    for path in mpidist.checkpoints_iterator(sys.argv[1]):
        checkpoint.restore(path)
        print("evaluated", int(step.value()), flush=True)
    print("no more", flush=True)
else:
    for number in range(1, 4):
        step.assign(number)
        checkpoint.save(f"{sys.argv[1]}/c")
        time.sleep(1.2)
    step.assign(100)
    checkpoint.save(f"{sys.argv[1]}/c")
"""

NOT_ITERATING = SYNCHRONOUS.replace("for path in mpidist.checkpoints_iterator(sys.argv[1])", "for path in ()")

# What a strategy with parameter servers does: all ranks tolerate deaths, and the chief trains on. On other hosts its
# window tells it and the server who has died.
SERVERS = """
import os, signal, sys, time
import mpidist
from mpidist.cluster.server_roles import agree_on_roles
from mpidist.comm.communicator import open_communicator
from mpidist.comm.deaths import WATCH
from mpidist.comm.ending import tolerate_deaths

ranks = open_communicator()
roles = agree_on_roles(ranks, mpidist.cluster_resolver.MPIClusterResolver(num_ps=1, num_evaluators=1))
tolerate_deaths()
step = mpidist.Variable(0)
checkpoint = mpidist.Checkpoint(step=step)
if roles.task_type == "evaluator":
    for path in mpidist.checkpoints_iterator(sys.argv[1]):
        checkpoint.restore(path)
        print("evaluated", int(step.value()), flush=True)
    print("no more", flush=True)
elif roles.task_type == "worker":
    time.sleep(1)
    os.kill(os.getpid(), signal.SIGKILL)
elif roles.task_type == "chief":
    for number in (1, 2, 3, 4, 100):
        step.assign(number)
        checkpoint.save(f"{sys.argv[1]}/c")
        time.sleep(1.2 if number < 100 else 0)
else:
    time.sleep(4)
if roles.task_type != "evaluator":
    WATCH.note(ranks.processes[1], "rank 1 of 4")
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
    found = evaluated(text)
    assert len(found) >= 2, text
    assert found == sorted(set(found)), text
    assert found[-1] == 100, text
    assert text.count("no more") == 1, text


def test_an_evaluator_that_follows_nothing_ends_as_before(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(NOT_ITERATING)
    result = run_program(3, program, tmp_path / "run")
    text = result.stdout + result.stderr
    assert result.returncode == 0, text
    assert "mpidist:" not in text
    assert text.count("no more") == 1, text


def test_an_evaluator_ends_with_the_job_after_a_workers_death(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(SERVERS)
    begin = time.monotonic()
    # The launcher's exit code is that of the dead rank.
    result = subprocess.run(
        [*survivors_live(4), sys.executable, str(program), str(tmp_path / "run")],
        env={**launch_environment(), "PYTHONPATH": ROOT}, capture_output=True, text=True, timeout=60, check=False,
    )
    text = result.stdout + result.stderr
    assert evaluated(text)[-1] == 100, text
    assert text.count("no more") == 1, text
    assert time.monotonic() - begin < 40
    assert "Traceback" not in text


def test_an_evaluator_on_another_host_ends_after_a_workers_death(
    tmp_path: Path, virtual_hosts: Callable[[int], VirtualHosts]
) -> None:
    program = tmp_path / "program.py"
    program.write_text(SERVERS)
    hosts = virtual_hosts(4)
    hosts.survivors_live = True
    begin = time.monotonic()
    # The evaluator sees nobody's process, and the launcher may end the ranks of a host together.
    result = hosts.run((1, 1, 1, 1), program, tmp_path / "run")
    text = result.stdout + result.stderr
    assert evaluated(text)[-1] == 100, text
    assert text.count("no more") == 1, text
    assert time.monotonic() - begin < 50
    assert "Traceback" not in text
