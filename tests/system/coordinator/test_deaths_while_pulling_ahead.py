"""Workers die, or are stopped and given up and woken, while a thread of theirs pulls for the next function."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.launching import run_program
from tests.helpers.leftovers import files_left_behind

PROGRAM = """
import os, signal, sys, threading, time
from pathlib import Path
import numpy as np
import mpidist
from mpidist.strategy.parameter_server import strategy as parameter_server
from tests.helpers.carrier import wait_for_end
from tests.helpers.limits import limit

folder, size = Path(sys.argv[1]), 600_000
# By rank: the first worker is killed, and the second one is stopped.
signals = {1: signal.SIGKILL, 2: signal.SIGSTOP}
open_window = parameter_server.open_window

class Carrier:
    def __init__(self, window):
        self.window = window

    def __getattr__(self, name):
        return getattr(self.window, name)

    def get(self, rank, offset, into):
        # In the middle of the variable.
        is_ahead = threading.current_thread().name == "mpidist-ahead"
        self.window.get(rank, offset, into)
        if is_ahead and into.nbytes > 16 and self.window.rank in signals:
            (folder / f"{self.window.rank}.ahead").touch()
            os.kill(os.getpid(), signals.pop(self.window.rank))

def open_carrier(group, *arguments):
    (folder / f"{group.rank}.pid").write_text(f"{os.getpid()} {os.getppid()}")
    return Carrier(open_window(group, *arguments))

parameter_server.open_window = open_carrier
strategy = mpidist.ParameterServerStrategy(
    mpidist.cluster_resolver.MPIClusterResolver(num_ps=1),
    options=mpidist.ServerOptions(heap_bytes=1 << 27, slot_bytes=1 << 23),
)
with strategy.scope():
    weight, count = mpidist.Variable(np.zeros(size)), mpidist.Variable(np.zeros(3, "int64"))
    optimizer = mpidist.optimizers.SGD(1.0)
optimizer.build([weight])
coordinator = mpidist.coordinator.ClusterCoordinator(strategy, closure_timeout=limit(1.0), prefetch=True)

def update(number):
    value = weight.value()
    assert (value == value[0]).all()
    count.assign_add(np.ones(3, "int64"))
    # The thread may pull for the next function meanwhile.
    time.sleep(0.02)  # simulates work: an update is computed
    optimizer.apply_gradients([(np.full(size, -1.0), weight)])
    return number

number = 0
for worker in (0, 1, 2):
    values = [coordinator.schedule(update, (number + one,), worker=worker) for one in range(12)]
    assert coordinator.fetch(values) == list(range(number, number + 12))
    number += 12
    if worker < 2:
        assert (folder / f"{worker + 1}.ahead").exists()
        process, starter = map(int, (folder / f"{worker + 1}.pid").read_text().split())
        if worker == 1:
            os.kill(process, signal.SIGCONT)
        wait_for_end(process, starter)
coordinator.join()
right = (weight.numpy() == number).all() and count.numpy().tolist() == [number] * 3
print("all right" if right else "wrong", repr(coordinator), flush=True)
"""


@pytest.mark.parametrize("way", [pytest.param("RMA", marks=pytest.mark.long_on_mpich), "SOCKETS"])
def test_each_update_counts_once(tmp_path: Path, way: str) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    result = run_program(5, program, tmp_path, timeout_seconds=60, kills=True, MPIDIST_WINDOW=way)
    text = result.stdout + result.stderr
    assert "all right <mpidist.coordinator.ClusterCoordinator of 1 workers>" in text, text
    assert text.count("lost (`closure_timeout` exceeded, or its connection lost)") == 1, text
    assert files_left_behind() == []
