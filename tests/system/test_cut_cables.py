"""Parameter servers on hosts whose cable is cut, or whose server is stopped: who is behind it has a name."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from tests.hosts.virtual_hosts import VirtualHosts
from tests.launching import end, finish
from tests.waiting import until, until_exists

pytestmark = pytest.mark.timeout_seconds(180)

Open = Callable[[int], VirtualHosts]

SILENCE_SECONDS = 2
PROGRAM = f"""
import logging, os, sys, threading, time
import numpy as np
import mpidist
from mpidist.comm.communicator import open_communicator
from mpidist.coordinator import experimental_get_current_worker_index
from tests.waiting import until_exists

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

def tell(name, *what):
    with open(f"{{folder}}/{{name}}.new", "w") as file:
        print(*what, file=file)
    os.rename(file.name, f"{{folder}}/{{name}}")

steps = 0
def train(seconds=0.0, until=lambda: True):
    global steps
    end = time.monotonic() + seconds
    while True:
        found = coordinator.fetch([coordinator.schedule(step) for _ in range(10)])
        steps += len(found)
        if until() and time.monotonic() > end:
            return found
"""
CUT = PROGRAM + """
train(until=lambda: {0, 1} <= set(coordinator.fetch([coordinator.schedule(step, worker=one) for one in (0, 1)])))
steps = int(count.numpy()[0])
tell("trains", strategy.roles.group.processes[strategy.roles.servers[0]].number)
train(until=lambda: len(repr(coordinator)) and "of 1 workers" in repr(coordinator))
train(0.5)
tell("trained", set(count.numpy().tolist()) == {steps}, repr(coordinator))
"""


def said_in(folder: Path) -> dict[str, str]:
    """What the ranks have said."""
    return {one.name: one.read_text() for one in sorted(folder.glob("*.log"))}


def wait_for(name: str, folder: Path, job: subprocess.Popen[str]) -> str:
    """The text of a file that a rank writes."""
    try:
        until_exists(folder / name, job=job)
    except AssertionError as error:
        raise AssertionError(said_in(folder)) from error
    return (folder / name).read_text()


DEAD = PROGRAM + """
train()
tell("trains", strategy.roles.group.processes[strategy.roles.servers[0]].number)
if sys.argv[2] == "nap":
    # The chief is in no call.
    threading.Event().wait()   # the nap
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
    wait_for("trains", folder, job)
    return job


def wait_until_empty(hosts: VirtualHosts, names: Iterable[str]) -> None:
    """Return when no rank is left on some hosts."""
    program = re.compile(r"\S+python .*/program.py")
    until(lambda: not any(program.match(line) for one in names for line in hosts.processes(one)), "no rank is left")


def test_training_goes_on_without_the_worker_behind_a_cut(virtual_hosts: Open, tmp_path: Path) -> None:
    hosts = virtual_hosts(4)
    job = start(hosts, tmp_path, CUT)
    hosts.cut("n3")
    try:
        trained = wait_for("trained", tmp_path, job)
        # Those that go on, and the one that is behind the cut.
        wait_until_empty(hosts, hosts.names[1:])
    finally:
        # The launcher waits for the host that is gone.
        hosts.close()
        end(job)
    said = [(tmp_path / f"{rank}.log").read_text() for rank in range(4)]
    assert trained == "True <mpidist.coordinator.ClusterCoordinator of 1 workers>\n", said
    assert re.search(r"worker 1 \(rank 2, process \d+ on n3\) is lost; its work goes to the other 1 ", said[0]), said
    assert re.search(r"rank 2 of 4 on n3 cannot go on: .*rank [03] of 4 \(process \d+ on \S+ cannot be", said[2]), said


@pytest.mark.parametrize("chief", ["fetch", "nap"])
def test_a_server_behind_a_cut_ends_the_job(virtual_hosts: Open, tmp_path: Path, chief: str) -> None:
    hosts = virtual_hosts(4)
    job = start(hosts, tmp_path, DEAD, chief)
    hosts.cut("n4")
    try:
        # Each by itself: the launcher waits for the host that is gone.
        wait_until_empty(hosts, hosts.names)
    finally:
        hosts.close()
        end(job)
    said = [(tmp_path / f"{rank}.log").read_text() for rank in range(4)]
    assert re.search(r"rank 0 of 4 on n1 cannot go on: rank 3 of 4 \(process \d+ on n4\) cannot be", said[0]), said
    for rank in (1, 2):
        # The chief may have ended before this rank has noticed.
        assert re.search(rf"rank {rank} of 4 on n{rank + 1} cannot go on: .*rank [03] of 4 \(", said[rank]), said
    if chief == "fetch":
        # From whatever it waits for.
        who = r"(ps 0 \(rank 3\)|rank 3 of 4 \(process \d+ on n4\))"
        assert re.search(rf"DeadRankError: {who} cannot be reached\W+\w+ host says nothing any more", said[0]), said
    else:
        assert "# the nap" in said[0], said
    assert re.search(r"rank 3 of 4 on n4 cannot go on: rank 0 of 4 \(process \d+ on n1\) cannot be", said[3]), said


STOPPED = PROGRAM + """
train()
tell("trains", strategy.roles.group.processes[strategy.roles.servers[0]].number)
until_exists(f"{folder}/stopped")
train()
tell("trained", set(count.numpy().tolist()) == {steps})
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
    process = int((tmp_path / "trains").read_text())
    signal_on(hosts, "STOP", process)
    (tmp_path / "stopped").touch()
    where = rf"  ps 0 is process {process} on n4:\n  (.*)\n  Nothing goes on without a server"
    waits = r"rank 0 of 4 on n1 has waited \d+ s for functions of workers\n  worker 0 has run"
    # Worker and chief each look by themselves.
    until(
        lambda: re.search(where, (tmp_path / "1.log").read_text())
        and re.search(waits, (tmp_path / "0.log").read_text()),
        "both have said so", job=job,
    )
    found = re.search(where, (tmp_path / "1.log").read_text())
    signal_on(hosts, "CONT", process)
    result = finish(job, "the job", 60)
    said = [(tmp_path / f"{rank}.log").read_text() for rank in range(4)]
    assert found is not None, said
    assert ("MPIDIST_JOB_DIR=DIRECTORY" in found[1]) == (not sees), said
    assert re.search(r"has shown nothing for \d+ s: it may be stopped", found[1]) or not sees, said
    # The chief names the functions that do not come back.
    assert re.search(waits, said[0]), said
    assert (tmp_path / "trained").read_text() == "True\n", said
    assert not any("lost" in one for one in said), said
    assert result.returncode == 0, result.stdout + result.stderr


def signal_on(hosts: VirtualHosts, name: str, process: int) -> None:
    """Send a signal to the server."""
    killed = finish(hosts.execute("n4", f"kill -{name} {process}"), "kill", 60)
    assert killed.returncode == 0, killed.stderr
