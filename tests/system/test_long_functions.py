"""Functions that run for long on workers: they are not lost, and who waits for them says where they are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.hosts.virtual_hosts import VirtualHosts

pytestmark = pytest.mark.timeout_seconds(180)

# Chief and a worker are on the first host, a worker and the server on the second one.
HOLD = """
import ctypes, sys, time
import mpidist

options = mpidist.ServerOptions(heap_bytes=1 << 22, window=mpidist.WindowOptions(silence_seconds=3))
strategy = mpidist.ParameterServerStrategy(mpidist.cluster_resolver.MPIClusterResolver(num_ps=1), options=options)
coordinator = mpidist.coordinator.ClusterCoordinator(strategy)
with strategy.scope():
    held, others = mpidist.Variable(0), mpidist.Variable(0)

def hold(path):
    with open(path, "a") as file:
        file.write("begun\\n")
    # In C, with the interpreter's lock held, for more than twice as long as a host may be silent.
    ctypes.PyDLL(None).sleep(7)
    held.assign_add(1)

value = coordinator.schedule(hold, (sys.argv[1],), worker=1)
for _ in range(20):
    coordinator.schedule(others.assign_add, (1,), worker=0)
coordinator.join()
value.fetch()
print("applied", int(held), int(others), repr(coordinator))
"""


def test_a_worker_that_holds_the_interpreter_is_not_lost(
    virtual_hosts: Callable[[int], VirtualHosts], tmp_path: Path
) -> None:
    program, begun = tmp_path / "program.py", tmp_path / "begun"
    program.write_text(HOLD)
    hosts = virtual_hosts(2)
    hosts.survivors_live = True
    result = hosts.run([2, 2], program, begun, timeout_seconds=120)
    text = result.stdout + result.stderr
    assert "applied 1 20 <mpidist.coordinator.ClusterCoordinator of 2 workers>" in text, text
    assert begun.read_text() == "begun\n", text
    assert result.returncode == 0, text
