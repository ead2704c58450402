"""Parameter servers on several hosts, by the launch lines that let ranks live after a death."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.amounts import amount
from tests.helpers.launching import end, find_mpirun, finish, is_open_mpi, run_program
from tests.helpers.waiting import until_exists
from tests.hosts.virtual_hosts import VirtualHosts
from tests.hosts.waits import until_no_rank_is_left
from tests.parallel.serving.test_traffic import Cost, require_bytes_of_the_wire, require_few_bytes

pytestmark = pytest.mark.timeout_seconds(180)

Open = Callable[[int], VirtualHosts]

HEAD = """
import os, signal, sys
import numpy as np
import mpidist
from mpidist.comm.group.opening import open_communicator
from mpidist.coordinator import experimental_get_current_worker_index
from tests.helpers import marks
from tests.helpers.limits import limit

folder, rank = sys.argv[1], open_communicator().rank
marks.put(f"{folder}/{rank}.pid", os.getpid())
resolver = mpidist.cluster_resolver.MPIClusterResolver(num_ps=1)
strategy = mpidist.ParameterServerStrategy(resolver, options=mpidist.ServerOptions(heap_bytes=1 << 24))
coordinator = mpidist.coordinator.ClusterCoordinator(strategy)
with strategy.scope():
    weight = mpidist.Variable(np.zeros(20_000))
    optimizer = mpidist.optimizers.SGD(1.0)
    optimizer.build([weight])
checkpoint = mpidist.Checkpoint(weight=weight, optimizer=optimizer)

def step(dies=False):
    optimizer.apply_gradients([(np.full(weight.shape, -1.0), weight)])
    if dies and experimental_get_current_worker_index() == 1:
        os.kill(os.getpid(), signal.SIGKILL)

def show(what):
    print(what, sorted(set(weight.numpy().tolist())), optimizer.iterations, repr(coordinator), flush=True)
"""
TRAIN = HEAD + """
path = mpidist.latest_checkpoint(folder)
if path is not None:
    checkpoint.restore(path).assert_consumed()
    show("restored")
    sys.exit()
for _ in range(20):
    coordinator.schedule(step)
coordinator.join()
checkpoint.save(folder + "/ckpt")
show("saved")
coordinator.schedule(step, (True,), worker=1)
for _ in range(20):
    coordinator.schedule(step)
coordinator.join()
show("trained")
checkpoint.save(folder + "/ckpt")
sys.exit(3)
"""


def open_hosts(virtual_hosts: Open) -> tuple[VirtualHosts, list[int]]:
    """Hosts for chief, two workers and a server, and the ranks of each: Hydra ends all ranks of a host with one."""
    ranks = [2, 2] if is_open_mpi(find_mpirun()) else [1, 1, 1, 1]
    hosts = virtual_hosts(len(ranks))
    hosts.survivors_live = True
    return hosts, ranks


def test_training_goes_on_after_the_death_of_a_worker_on_another_host(virtual_hosts: Open, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(TRAIN)
    hosts, ranks = open_hosts(virtual_hosts)
    result = hosts.run(ranks, program, tmp_path, timeout_seconds=120)
    text = result.stdout + result.stderr
    assert "saved [20.0] 20 <mpidist.coordinator.ClusterCoordinator of 2 workers>" in text, text
    assert "trained [41.0] 41 <mpidist.coordinator.ClusterCoordinator of 1 workers>" in text, text
    assert (tmp_path / "exit-code").read_text() == "3\n", text
    until_no_rank_is_left(hosts)
    # On one host.
    result = run_program(3, program, tmp_path)
    assert "restored [41.0] 41 " in result.stdout, result.stdout + result.stderr
    assert result.returncode == 0, result.stderr


# Workers 0 and 1 are on one host, each in a function that ends when their host is gone, and worker 2 on another one.
WHOLE_HOST = HEAD + """
import time

def wait(at_work, until):
    optimizer.apply_gradients([(np.full(weight.shape, -1.0), weight)])
    marks.put(at_work)
    while not os.path.exists(until):
        time.sleep(0.01)

at_work = [f"{folder}/work{worker}" for worker in range(2)]
for worker in range(2):
    coordinator.schedule(wait, (at_work[worker], folder + "/gone"), worker=worker)
for _ in range(20):
    coordinator.schedule(step)
while not all(map(os.path.exists, at_work)):
    coordinator.done()
print("at work", flush=True)
while not repr(coordinator).endswith("of 1 workers>"):
    coordinator.done()
marks.put(folder + "/gone")
coordinator.join()
show("trained")
sys.exit(3)
"""


def test_training_goes_on_after_the_death_of_a_host_with_two_workers(virtual_hosts: Open, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(WHOLE_HOST)
    ranks = [1, 2, 2] if is_open_mpi(find_mpirun()) else [1, 2, 1, 1]
    hosts = virtual_hosts(len(ranks))
    hosts.survivors_live = True
    job = hosts.start(ranks, program, tmp_path)
    until_exists(*(tmp_path / f"work{worker}" for worker in range(2)), job=job)
    processes = " ".join((tmp_path / f"{rank}.pid").read_text() for rank in (1, 2))
    killed = finish(hosts.execute(hosts.names[1], f"kill -9 {processes}"), "kill", 60)
    assert killed.returncode == 0, killed.stderr
    result = finish(job, program.name, 90)
    text = result.stdout + result.stderr
    assert "trained [22.0] 22 <mpidist.coordinator.ClusterCoordinator of 1 workers>" in text, text
    until_no_rank_is_left(hosts)


# Worker 1 is behind a cable that is cut while it runs a function: nothing is heard of it, and its time is over.
CUT = HEAD.replace("ClusterCoordinator(strategy)", "ClusterCoordinator(strategy, closure_timeout=limit(3.0))") + """
import time

def wait(at_work, until):
    optimizer.apply_gradients([(np.full(weight.shape, -1.0), weight)])
    marks.put(at_work)
    while experimental_get_current_worker_index() == 1 and not os.path.exists(until):
        time.sleep(0.01)

coordinator.schedule(wait, (folder + "/work", folder + "/end"), worker=1)
for _ in range(20):
    coordinator.schedule(step)
coordinator.join()
show("trained")
marks.put(folder + "/trained", f"{weight.numpy()[0]} {optimizer.iterations} {coordinator!r}")
"""


def test_a_worker_behind_a_cut_cable_is_given_up_when_its_time_is_over(
    virtual_hosts: Open, tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text(CUT)
    # The chief and the server are on the first side of the cut.
    hosts = virtual_hosts(4)
    hosts.survivors_live = True
    job = hosts.start([1, 1, 1, 1], program, tmp_path)
    try:
        until_exists(tmp_path / "work", job=job)
        hosts.cut(hosts.names[2])
        until_exists(tmp_path / "trained", job=job, seconds=60)
    finally:
        # The launcher may wait for the host that is gone.
        hosts.close()
        end(job)
    told = (tmp_path / "trained").read_text()
    assert told == "21.0 21 <mpidist.coordinator.ClusterCoordinator of 1 workers>", told


ENDS = """
import mpidist

strategy = mpidist.ParameterServerStrategy(mpidist.cluster_resolver.MPIClusterResolver(num_ps=1))
mpidist.coordinator.ClusterCoordinator(strategy)
"""


def test_the_launcher_outlives_hosts_that_end_at_once(virtual_hosts: Open, tmp_path: Path) -> None:
    """Hydra may die of SIGPIPE where its proxies end while it tells them of ends; most hosts do not see its options."""
    program = tmp_path / "program.py"
    program.write_text(ENDS)
    hosts, ranks = open_hosts(virtual_hosts)
    for _ in range(amount(3, 30)):
        result = hosts.run(ranks, program, timeout_seconds=60)
        assert result.returncode == 0, result.stdout + result.stderr


TRAFFIC = """
import json, sys
from mpidist.comm.group.opening import open_communicator
from tests.parallel.serving.test_traffic import cost_of_closures

communicator = open_communicator()
cost = cost_of_closures(communicator, int(sys.argv[2]), int(sys.argv[3]))
if communicator.rank == 0:
    json.dump({**cost._asdict(), "nodes": communicator.node_sizes}, open(sys.argv[1], "w"))
"""


@pytest.mark.parametrize(("servers", "steps"), [
    (2, 1), (7, 1), pytest.param(3, 1, marks=pytest.mark.long), pytest.param(5, 2, marks=pytest.mark.long),
])
def test_a_closure_takes_few_bytes_between_hosts(
    virtual_hosts: Open, tmp_path: Path, servers: int, steps: int
) -> None:
    program, out = tmp_path / "program.py", tmp_path / "cost.json"
    program.write_text(TRAFFIC)
    result = virtual_hosts(2).run([2, servers], program, out, servers, steps)
    assert result.returncode == 0, result.stdout + result.stderr
    cost = json.loads(out.read_text())
    # Chief and worker are on the one, all servers on the other.
    assert cost.pop("nodes") == [2, servers]
    require_bytes_of_the_wire(Cost(**cost), servers, steps)
    if servers <= 3:
        # With the result, too.
        require_few_bytes(Cost(**cost), servers)


BUSY = HEAD + """
def compute(path):
    # In NumPy for most of the time, with the interpreter at hand now and then.
    marks.put(path)
    while True:
        np.ones((100, 100)) @ np.ones((100, 100))

coordinator.schedule(step, worker=0)
coordinator.schedule(compute, (folder + "/computes",), worker=1)
coordinator.join()
"""


@pytest.mark.parametrize("dying", ["chief 0", "ps 0"])
def test_a_death_ends_a_worker_on_another_host_that_computes(
    virtual_hosts: Open, tmp_path: Path, dying: str
) -> None:
    program = tmp_path / "program.py"
    program.write_text(BUSY)
    hosts, ranks = open_hosts(virtual_hosts)
    job = hosts.start(ranks, program, tmp_path)
    until_exists(tmp_path / "computes", job=job)
    rank = 0 if dying == "chief 0" else 3
    # Each host numbers its own processes.
    host = hosts.names[0 if rank == 0 else -1]
    killed = finish(hosts.execute(host, f"kill -9 {(tmp_path / f'{rank}.pid').read_text()}"), "kill", 60)
    assert killed.returncode == 0, killed.stderr
    result = finish(job, program.name, 60)
    text = result.stdout + result.stderr
    # The worker would compute for ever.
    until_no_rank_is_left(hosts)
    seen = rf"rank {rank} of 4 \(process \d+ on {host}\) terminated|{dying} \(rank {rank}\) has died"
    assert re.search(seen, text), text
