"""Ranks are killed while a checkpoint is saved, and while they read data that ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.helpers.amounts import amount
from tests.helpers.carrier import wait_for_end
from tests.helpers.launching import run_program
from tests.helpers.leftovers import files_left_behind
from tests.helpers.waiting import until, until_exists, until_state

pytestmark = pytest.mark.timeout_seconds(120)

HEAD = """
import os, signal, sys, time
import numpy as np
import mpidist
from mpidist.comm.group.opening import open_communicator

folder = sys.argv[1]
ranks = open_communicator()
open(f"{folder}/{ranks.rank}.pid", "w").write(f"{os.getpid()} {os.getppid()}")
resolver = mpidist.cluster_resolver.MPIClusterResolver(num_ps=2 if ranks.size > 3 else 1)
strategy = mpidist.ParameterServerStrategy(resolver, options=mpidist.ServerOptions(heap_bytes=1 << 24))
coordinator = mpidist.coordinator.ClusterCoordinator(strategy)
"""
# The second server is stopped when the second checkpoint begins: it is not complete when somebody dies.
SAVES = HEAD + """
with strategy.scope():
    weights = [mpidist.Variable(np.zeros(100_000)) for _ in range(2)]
checkpoint = mpidist.Checkpoint(weights=weights)
path = mpidist.latest_checkpoint(folder)

def grow():
    for weight in weights:
        weight.assign_add(np.ones(weight.shape))

if path is None:
    coordinator.schedule(grow).fetch()
    checkpoint.save(folder + "/ckpt")
    coordinator.schedule(grow).fetch()
    server = strategy.roles.group.processes[strategy.roles.servers[1]].number
    os.kill(server, signal.SIGSTOP)
    checkpoint.save(folder + "/ckpt")
    for _ in range(10):
        coordinator.schedule(grow)
    coordinator.join()
else:
    checkpoint.restore(path).assert_consumed()
print(os.path.basename(str(path)), [set(weight.numpy().tolist()) for weight in weights], flush=True)
"""


@pytest.mark.parametrize("dying", ["chief 0", "worker 0", "ps 1"])
def test_a_kill_while_a_checkpoint_is_saved(tmp_path: Path, dying: str) -> None:
    """The last good checkpoint can be read. Without chief or server the job ends, without a worker it goes on."""
    program = tmp_path / "program.py"
    program.write_text(SAVES)
    # Chief, two workers, two servers.
    rank, server = {"chief 0": 0, "worker 0": 1, "ps 1": 4}[dying], 4

    def kill(job: subprocess.Popen[str]) -> None:
        until_exists(tmp_path / "ckpt-1.h5", job=job)
        until(lambda: list(tmp_path.glob(".ckpt-2.*.tmp")), "a second checkpoint has begun", job=job)
        processes = {one: [*map(int, (tmp_path / f"{one}.pid").read_text().split())] for one in (rank, server)}
        until_state(processes[server][0], "T")
        os.kill(processes[rank][0], signal.SIGKILL)
        wait_for_end(*processes[rank])
        assert not (tmp_path / "ckpt-2.h5").exists()
        if rank != server:
            os.kill(processes[server][0], signal.SIGCONT)

    result = run_program(5, program, tmp_path, kills=True, meanwhile=kill)
    text = result.stdout + result.stderr
    if dying == "worker 0":
        assert "None [{12.0}, {12.0}]" in text, text
        assert (tmp_path / "exit-code").read_text() == "0\n", text
        good, value = "ckpt-2", "2.0"
    else:
        assert "None [" not in text, text
        assert re.search(rf"{dying} \(rank {rank}\) has died|rank {rank} of 5 \(process .*\) terminated", text), text
        good, value = "ckpt-1", "1.0"
    # On another number of servers.
    result = run_program(3, program, tmp_path)
    text = result.stdout + result.stderr
    assert f"{good}.h5 [{{{value}}}, {{{value}}}]" in text, text
    assert result.returncode == 0, text
    assert files_left_behind() == []


# Each worker has ten numbers; the first one dies when it has taken its fourth, and has pushed an update for it.
FINITE = HEAD + """
from mpidist.coordinator import experimental_get_current_worker_index
with strategy.scope():
    # Of each server, by worker and number.
    counts = [mpidist.Variable(np.zeros((2, 10), "int64")) for _ in range(2)]

def take(numbers):
    worker, number = experimental_get_current_worker_index(), int(next(numbers))
    one = np.zeros((2, 10), "int64")
    one[worker, number] = 1
    for count in counts:
        count.assign_add(one)
    if (worker, number) == (0, 3):
        os.kill(os.getpid(), signal.SIGKILL)
    return worker, number

numbers = iter(coordinator.create_per_worker_dataset(mpidist.data.Dataset.range(10)))
# All of them take a part before the death.
for worker in (0, 1, 0, 1, 0):
    coordinator.schedule(take, (numbers,), worker=worker).fetch()
values = []
while not numbers.is_at_end:
    values += [coordinator.schedule(take, (numbers,), worker=0 if not values else None) for _ in range(4)]
    coordinator.join()
taken = sorted(value.fetch() for value in values if not value.is_at_end)
print("taken", taken)
for count in counts:
    print("counted", count.numpy().tolist())
print(repr(coordinator), flush=True)
"""


@pytest.mark.parametrize("way", [pytest.param("RMA", marks=pytest.mark.long_on_mpich), "SOCKETS"])
def test_a_killed_worker_had_data_that_ends(tmp_path: Path, way: str) -> None:
    """What it had taken counts once, or not at all; others run its functions with data of their own, to their end."""
    program = tmp_path / "program.py"
    program.write_text(FINITE)
    result = run_program(5, program, tmp_path, timeout_seconds=90, kills=True, MPIDIST_WINDOW=way)
    text = result.stdout + result.stderr
    assert f"taken {[(1, number) for number in range(2, 10)]}\n" in text, text
    # Of the dead worker's the three that were applied before its death, of the other one's all.
    assert text.count(f"counted {[[1] * 3 + [0] * 7, [1] * 10]}\n") == 2, text
    assert "ClusterCoordinator of 1 workers" in text, text
    assert files_left_behind() == []


# The first worker dies a moment after it has begun to send its result.
LARGE = HEAD + """
import threading
from mpidist.coordinator import experimental_get_current_worker_index

def make():
    array = np.ones(10_000_000)
    if experimental_get_current_worker_index() == 0:
        threading.Timer(float(sys.argv[2]), os.kill, (os.getpid(), signal.SIGKILL)).start()
    return array

values = [coordinator.schedule(make, worker=worker) for worker in (0, 1)]
values.append(coordinator.schedule(make))
coordinator.join()
print("sums", [int(value.fetch().sum()) for value in values], repr(coordinator), flush=True)
"""


@pytest.mark.parametrize("way", [pytest.param("RMA", marks=pytest.mark.long_on_mpich), "SOCKETS"])
@pytest.mark.parametrize("number", range(amount(1, 10)))
def test_a_worker_is_killed_while_it_sends_a_large_result(tmp_path: Path, number: int, way: str) -> None:
    """The chief may be reading the result out of its memory."""
    program = tmp_path / "program.py"
    program.write_text(LARGE)
    result = run_program(
        5, program, tmp_path, 0.18 + 0.01 * number, timeout_seconds=90, kills=True, MPIDIST_WINDOW=way
    )
    text = result.stdout + result.stderr
    assert f"sums {[10_000_000] * 3} <mpidist.coordinator.ClusterCoordinator of 1 workers" in text, text
    assert files_left_behind() == []
