"""Parameter servers on hosts whose cable is cut, or whose server is stopped: who is behind it has a name."""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.launching import end, finish
from tests.helpers.waiting import until, until_exists
from tests.hosts.virtual_hosts import VirtualHosts
from tests.hosts.waits import until_no_rank_is_left

pytestmark = pytest.mark.timeout_seconds(180)

Open = Callable[[int], VirtualHosts]

SILENCE_SECONDS = 2
# The rank.
SERVER = 3
PROGRAM = f"""
import logging, os, sys
import numpy as np
import mpidist
from mpidist.comm.group.opening import open_communicator
from mpidist.coordinator import experimental_get_current_worker_index
from tests.helpers import marks

logging.basicConfig(format="%(message)s")
folder, rank = sys.argv[1], open_communicator().rank
# What a host says behind a cut cable does not come to the launcher.
sys.stderr = open(f"{{folder}}/{{rank}}.log", "w", buffering=1)
os.dup2(sys.stderr.fileno(), 2)
logging.getLogger().handlers[0].setStream(sys.stderr)
options = mpidist.ServerOptions(
    heap_bytes=1 << 22, window=mpidist.WindowOptions(silence_seconds={SILENCE_SECONDS})
)
strategy = mpidist.ParameterServerStrategy(mpidist.cluster_resolver.MPIClusterResolver(num_ps=1), options=options)
coordinator = mpidist.coordinator.ClusterCoordinator(strategy)
with strategy.scope():
    count = mpidist.Variable(np.zeros(1000, np.int64))

def step():
    count.assign_add(np.ones(1000, np.int64))
    return experimental_get_current_worker_index()

steps = 0
def train(until=lambda: True):
    global steps
    while True:
        found = coordinator.fetch([coordinator.schedule(step) for _ in range(10)])
        steps += len(found)
        if until():
            return

def begin():
    marks.put(f"{{folder}}/trains", strategy.roles.group.processes[strategy.roles.servers[0]].number)
"""
CUT = PROGRAM + """
train(until=lambda: {0, 1} <= set(coordinator.fetch([coordinator.schedule(step, worker=one) for one in (0, 1)])))
steps = int(count.numpy()[0])
begin()
train(until=lambda: len(repr(coordinator)) and "of 1 workers" in repr(coordinator))
for _ in range(20):
    train()
marks.put(f"{folder}/trained", f"{set(count.numpy().tolist()) == {steps}} {coordinator!r}")
"""


DEAD = PROGRAM + """
train()
begin()
if sys.argv[2] == "nap":
    # The chief is in no call.
    marks.stay()
train(until=lambda: False)
"""


def start(
    hosts: VirtualHosts, folder: Path, text: str, *arguments: object, **environment: str
) -> subprocess.Popen[str]:
    """Start chief, two workers and a server on a host each; returns when they train."""
    program = folder / "program.py"
    program.write_text(text)
    hosts.survivors_live = True
    job = hosts.start([1] * 4, program, folder, *arguments, **environment)
    until_exists(folder / "trains", job=job)
    return job


def test_training_goes_on_without_the_worker_behind_a_cut(virtual_hosts: Open, tmp_path: Path) -> None:
    hosts = virtual_hosts(4)
    job = start(hosts, tmp_path, CUT)
    hosts.cut("n3")
    try:
        # What the worker had is done again by the other one, or nobody would train on.
        until_exists(tmp_path / "trained", job=job)
        # Those that go on, and the one that is behind the cut.
        until_no_rank_is_left(hosts, hosts.names[1:])
    finally:
        # The launcher waits for the host that is gone.
        hosts.close()
        end(job)
    said = [(tmp_path / f"{rank}.log").read_text() for rank in range(4)]
    every = "".join(said)
    assert (tmp_path / "trained").read_text() == "True <mpidist.coordinator.ClusterCoordinator of 1 workers>", every
    assert re.search(r"worker 1 \(rank 2, process \d+ on n3\) is lost; its work goes to the other 1 ", said[0]), every
    assert re.search(r"rank 2 of 4 .* cannot continue: .*rank [03] of 4 \(process \d+ on \S+ cannot be", said[2]), every


@pytest.mark.parametrize("chief", ["fetch", "nap"])
def test_a_server_behind_a_cut_ends_the_job(virtual_hosts: Open, tmp_path: Path, chief: str) -> None:
    hosts = virtual_hosts(4)
    job = start(hosts, tmp_path, DEAD, chief)
    hosts.cut("n4")
    try:
        # Each by itself: the launcher waits for the host that is gone.
        until_no_rank_is_left(hosts)
    finally:
        hosts.close()
        end(job)
    said = [(tmp_path / f"{rank}.log").read_text() for rank in range(4)]
    every = "".join(said)
    assert re.search(r"rank 0 of 4 on n1 cannot continue: rank 3 of 4 \(process \d+ on n4\) cannot be", said[0]), every
    for rank in (1, 2):
        # The chief may have ended before this rank has noticed.
        assert re.search(rf"rank {rank} of 4 on n{rank + 1} cannot continue: .*rank [03] of 4 \(", said[rank]), every
    if chief == "fetch":
        # From whatever it waits for.
        who = r"(ps 0 \(rank 3\)|rank 3 of 4 \(process \d+ on n4\))"
        assert re.search(rf"DeadRankError: {who} cannot be reached\W+\w+ host does not respond", said[0]), every
    else:
        assert "marks.stay()" in said[0], every
    assert re.search(r"rank 3 of 4 on n4 cannot continue: rank 0 of 4 \(process \d+ on n1\) cannot be", said[3]), every


STOPPED = PROGRAM + """
train()
begin()
marks.read(f"{folder}/stopped")
train()
marks.put(f"{folder}/trained", set(count.numpy().tolist()) == {steps})
"""


@pytest.mark.parametrize("sees", [False, pytest.param(True, marks=pytest.mark.long)], ids=["nothing", "job directory"])
def test_a_server_that_is_stopped_on_another_host_is_named(virtual_hosts: Open, tmp_path: Path, sees: bool) -> None:
    """For longer than a host may be silent: the host is not, and nobody is lost."""
    jobs = tmp_path / "jobs"
    jobs.mkdir()
    hosts = virtual_hosts(4)
    # A rank that waits for nobody writes into the directory once in 10 s.
    variables = {"MPIDIST_WARN_SECONDS": "15" if sees else "3", "MPIDIST_JOB_DIR": str(jobs) if sees else ""}
    job = start(hosts, tmp_path, STOPPED, **variables)
    process = (tmp_path / "trains").read_text()
    hosts.kill(SERVER, signal.SIGSTOP)
    (tmp_path / "stopped").touch()
    where = re.compile(rf"  ps 0 is process {process} on n4:\n  (.*)\n  Training cannot continue without a server")
    waits = re.compile(r"rank 0 of 4 on n1 has waited \d+ s for functions of workers\n  worker 0 has run")
    chief, worker = tmp_path / "0.log", tmp_path / "1.log"
    # The chief names the functions that do not come back. Worker and chief each look by themselves.
    until(
        lambda: where.search(worker.read_text()) and waits.search(chief.read_text()), "both have told where they wait",
        job=job,
    )
    hosts.kill(SERVER, signal.SIGCONT)
    result = finish(job, "the job", 60)
    said = [(tmp_path / f"{rank}.log").read_text() for rank in range(4)]
    every = "".join(said)
    found = where.findall(said[1])
    assert ("MPIDIST_JOB_DIR=DIRECTORY" in found[0]) == (not sees), every
    assert re.search(r"has not updated its file for \d+ s: it may be stopped", found[0]) or not sees, every
    assert (tmp_path / "trained").read_text() == "True", every
    assert not any(re.search(r"\b(is|are|was|were|has) lost\b", one) for one in said), every
    assert result.returncode == 0, result.stdout + result.stderr
