"""Jobs that are killed in a step go on in another layout, from their last checkpoint, to the numbers of one rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mpidist.arrays import AnyArray
from tests.helpers.launching import run_program
from tests.hosts.virtual_hosts import VirtualHosts

pytestmark = pytest.mark.timeout_seconds(180)

PROGRAM = """
import os, signal, sys
from pathlib import Path
import numpy as np
import mpidist
from mpidist.tpu.experimental import DeviceAssignment, initialize_tpu_system

folder, kind, devices, kill_at = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
if kind == "split":
    topology = initialize_tpu_system()
    replicas = sum(topology.node_sizes) // devices
    assignment = DeviceAssignment.build(topology, [1, 1, 1, devices], num_replicas=replicas)
    strategy = mpidist.TPUStrategy(None, assignment)
else:
    strategy = mpidist.MultiWorkerMirroredStrategy(shard_optimizer=True)
ranks = strategy.replicas.everyone
with strategy.scope():
    cut = {"partition_dimensions": [1, devices]} if kind == "split" else {}
    table = mpidist.Variable(np.zeros((40, 16)), **cut)
    bias = mpidist.Variable(np.zeros(300))
    optimizer = mpidist.optimizers.Adam(0.1)
optimizer.build([table, bias])
checkpoint = mpidist.Checkpoint(table=table, bias=bias, optimizer=optimizer)
before = max(folder.glob("*/*.h5"), default=None, key=lambda path: path.stat().st_mtime)
if before is not None:
    checkpoint.restore(before)
# A folder for each job: on virtual hosts the next one cannot see that the one before has died, and would wait.
manager = mpidist.CheckpointManager(checkpoint, folder / str(kill_at), max_to_keep=2)
if ranks.rank == 0:
    print("begins at", optimizer.iterations, flush=True)

def step(number):
    if number == kill_at and ranks.rank == ranks.size - 1:
        # The others are in the step, or come to it.
        os.kill(os.getpid(), signal.SIGKILL)
    share = 1 / strategy.num_replicas_in_sync
    pairs = [(np.sin(number + one.value()) * share, one) for one in (table, bias)]
    optimizer.apply_gradients(pairs)

for number in range(optimizer.iterations, 9):
    strategy.run(step, (number,))
    if number % 2:
        manager.save()
values = [one.numpy() for one in (table, bias, *optimizer.variables)]
if ranks.rank == 0:
    np.savez(folder / "result.npz", *values)
"""


def finish_alone(folder: Path, program: Path, kind: str) -> tuple[list[AnyArray], str]:
    """Go on in one process, to the end: the values, and what was printed."""
    result = run_program(1, program, folder, kind, 1, -1)
    assert result.returncode == 0, result.stdout + result.stderr
    with np.load(folder / "result.npz") as file:
        return [file[name] for name in file.files], result.stdout


@pytest.mark.parametrize("kind", ["split", "sharded"])
def test_what_was_killed_goes_on_in_another_layout(
    virtual_hosts: Callable[[int], VirtualHosts], tmp_path: Path, kind: str
) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    (tmp_path / "alone").mkdir()
    expected, _ = finish_alone(tmp_path / "alone", program, kind)
    if kind == "split":
        # Two replicas of two logical devices, then one of four.
        results = [run_program(4, program, tmp_path, kind, *words) for words in ((2, 3), (4, 6))]
    else:
        # The nodes' shards are halves, then thirds.
        results = [
            virtual_hosts(len(ranks)).run(ranks, program, tmp_path, kind, 1, kill_at)
            for ranks, kill_at in (((2, 1), 3), ((1, 1, 1), 6))
        ]
    for result, begin in zip(results, (0, 2), strict=True):
        assert result.returncode != 0, result.stdout + result.stderr
        assert f"begins at {begin}\n" in result.stdout, result.stdout + result.stderr
    found, text = finish_alone(tmp_path, program, kind)
    assert "begins at 6\n" in text
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-14)
