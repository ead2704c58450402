"""A bound on the updates between what a function reads and its own update, with a worker that is stopped and woken."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.launching import run_program

pytestmark = pytest.mark.timeout_seconds(120)

# So many updates are there before the worker stops.
BEFORE = 4
OTHERS = 20
PROGRAM = f"""
import json, os, signal, sys
import mpidist
from mpidist.recorder.recorder import RECORDER
from tests.helpers.waiting import until_state

staleness = json.loads(sys.argv[1])
resolver = mpidist.cluster_resolver.MPIClusterResolver(num_ps=1)
strategy = mpidist.ParameterServerStrategy(
    resolver, options=mpidist.ServerOptions(heap_bytes=1 << 22), staleness=staleness
)
coordinator = mpidist.coordinator.ClusterCoordinator(strategy)
with strategy.scope():
    version = mpidist.Variable(0)

def update(stops=False):
    read = int(version)
    version.assign_add(1)
    if stops:
        os.kill(os.getpid(), signal.SIGSTOP)
    return read

pid = coordinator.schedule(os.getpid, worker=1).fetch()
values = [coordinator.schedule(update) for _ in range({BEFORE})]
coordinator.join()
values.append(coordinator.schedule(update, (True,), worker=1))
until_state(pid, "T")
values += [coordinator.schedule(update) for _ in range({OTHERS})]
wanted = {BEFORE} + min({OTHERS}, {OTHERS} if staleness is None else staleness)
while int(version) < wanted:
    coordinator.done()
os.kill(pid, signal.SIGCONT)
coordinator.join()
assert int(version) == len(values)
updates = {{one.closure: one for one in RECORDER.updates}}
# The first function has the number 1, and changes nothing.
found = [(value.fetch(), updates[number].read, updates[number].before) for number, value in enumerate(values, 2)]
print("lags " + json.dumps(found), flush=True)
"""


@pytest.mark.parametrize("staleness", [None, 0, 2])
def test_an_update_counts_within_the_bound_though_its_worker_was_stopped(
    tmp_path: Path, staleness: int | None
) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    result = run_program(4, program, json.dumps(staleness), timeout_seconds=100)
    assert result.returncode == 0, result.stdout + result.stderr
    found = json.loads(result.stdout.partition("lags ")[2].splitlines()[0])
    assert sorted(before for _, _, before in found) == list(range(BEFORE + 1 + OTHERS))
    bound = OTHERS if staleness is None else staleness
    for read, least, before in found:
        assert least <= read <= before <= read + bound
    read, _, before = found[BEFORE]
    assert before - read == bound, "others count as far as they may while it is stopped"
