"""Synchronous updates with workers that are stopped and woken, and that die while their update waits for others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.launching import run_program

pytestmark = pytest.mark.timeout_seconds(120)

BEGIN = """
import json, os, signal, sys
import numpy as np
import mpidist
from mpidist.recorder.recorder import RECORDER
from tests.helpers.waiting import until_state

resolver = mpidist.cluster_resolver.MPIClusterResolver(num_ps=2)
strategy = mpidist.ParameterServerStrategy(
    resolver, options=mpidist.ServerOptions(heap_bytes=1 << 22), synchronous=True, backup_workers=int(sys.argv[1])
)
coordinator = mpidist.coordinator.ClusterCoordinator(strategy)
with strategy.scope():
    # They lie on different servers.
    weights = [mpidist.Variable(np.zeros(3)) for _ in range(2)]
    count = mpidist.Variable(0)
    optimizer = mpidist.optimizers.SGD(1.0)
optimizer.build(weights)

def step(power, stops=False):
    read = [float(weight.value()[0]) for weight in weights]
    count.assign_add(1)
    if stops:
        os.kill(os.getpid(), signal.SIGSTOP)
    optimizer.apply_gradients([(np.full(3, -float(4**power)), weight) for weight in weights])
    return read

def step_once(power, pid):
    return step(power, stops=os.getpid() == pid)
"""

STOPPED = BEGIN + """
pid = coordinator.schedule(os.getpid, worker=1).fetch()
late = coordinator.schedule(step, (12, True), worker=1)
until_state(pid, "T")
values = [coordinator.schedule(step, (power // 2,)) for power in range(12)]
while optimizer.iterations < 6:
    coordinator.done()
os.kill(pid, signal.SIGCONT)
coordinator.join()
# The means of two, of four powers in each round; the late one has changed the count alone.
assert [one.numpy().tolist() for one in weights] == [[float(sum(4**power for power in range(6)))] * 3] * 2, weights
assert (int(count), optimizer.iterations, coordinator.late_updates) == (13, 6, 1)
assert late.fetch() == [0.0, 0.0]
seen = [value.fetch() for value in values]
assert all(one == two for one, two in seen), seen
print("updates " + json.dumps([tuple(one) for one in RECORDER.updates]), flush=True)
"""

KILLED = BEGIN + """
def lose(pid):
    left = len(coordinator._queue.workers) - 1
    os.kill(pid, signal.SIGKILL)
    while len(coordinator._queue.workers) > left:
        coordinator.done()

pids = [coordinator.schedule(os.getpid, worker=worker).fetch() for worker in range(3)]
# It waits in the round of three; the third one is stopped until the first is dead.
first = coordinator.schedule(step, (0,), worker=0)
coordinator.schedule(step, (1,), worker=1)
coordinator.schedule(step, (2, True), worker=2)
until_state(pids[2], "T")
while len(coordinator._queue.versions._open) < 2:
    coordinator.done()
lose(pids[0])
assert optimizer.iterations == 0
os.kill(pids[2], signal.SIGCONT)
coordinator.join()
# The others have made a round of what two workers can, and the first function has run again.
wanted = (4 + 16) / 2 + 1
assert [one.numpy().tolist() for one in weights] == [[wanted] * 3] * 2, (weights, RECORDER.updates)
assert (first.fetch(), int(count), optimizer.iterations) == ([10.0, 10.0], 3, 2)
# The death of a worker makes the round of another one whole.
coordinator.schedule(step, (0,), worker=1)
again = coordinator.schedule(step_once, (1, pids[2]), worker=2)
until_state(pids[2], "T")
while len(coordinator._queue.versions._open) < 1:
    coordinator.done()
lose(pids[2])
coordinator.join()
assert [one.numpy().tolist() for one in weights] == [[wanted + 1 + 4] * 3] * 2
assert (again.fetch(), int(count), optimizer.iterations) == ([wanted + 1] * 2, 5, 4)
assert coordinator.late_updates == 0
print("updates " + json.dumps([tuple(one) for one in RECORDER.updates]), flush=True)
"""


def updates_in(output: str) -> list[list[int]]:
    found: list[list[int]] = json.loads(output.partition("updates ")[2].splitlines()[0])
    return found


def test_a_backup_worker_that_was_stopped_and_woken_is_late(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(STOPPED)
    result = run_program(6, program, "1", timeout_seconds=100)
    assert result.returncode == 0, result.stdout + result.stderr
    updates = updates_in(result.stdout)
    assert [before - read for *_, read, before, is_late in updates if not is_late] == [0] * 12
    assert [update[3:] for update in updates if update[-1]] == [[0, 6, True]]


@pytest.mark.parametrize("way", [pytest.param("RMA", marks=pytest.mark.long_on_mpich), "SOCKETS"])
def test_a_worker_that_dies_in_a_round_leaves_it_and_its_function_counts_once(tmp_path: Path, way: str) -> None:
    program = tmp_path / "program.py"
    program.write_text(KILLED)
    result = run_program(6, program, "0", timeout_seconds=100, kills=True, MPIDIST_WINDOW=way)
    assert "updates " in result.stdout, result.stdout + result.stderr
    updates = updates_in(result.stdout)
    assert sorted(update[0] for update in updates) == list(range(4, 9))
    assert all(read == before and not is_late for *_, read, before, is_late in updates)
    assert {update[0]: update[1] for update in updates} == {4: 2, 5: 1, 6: 1, 7: 1, 8: 2}
