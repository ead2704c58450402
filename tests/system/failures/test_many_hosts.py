"""Many hosts of some ranks: the start, steps, a save, the bytes of the busiest host, and the loss of a host."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.amounts import amount
from tests.helpers.launching import finish
from tests.helpers.waiting import until_exists
from tests.hosts.virtual_hosts import VirtualHosts
from tests.hosts.waits import until_no_rank_is_left

Open = Callable[[int], VirtualHosts]

HOSTS, RANKS = amount(4, 32), amount(3, 4)
SECONDS = amount(100, 1000)
pytestmark = pytest.mark.timeout_seconds(SECONDS + 60)

COUNT, STEPS = 1 << 18, 4
PROGRAM = f"""
import itertools, json, socket, sys
from pathlib import Path
import numpy as np
import mpidist

folder = Path(sys.argv[1])
strategy = mpidist.MultiWorkerMirroredStrategy()
communicator = strategy.communicator
rank = communicator.rank

def sent():
    # All have arrived, and no step is under way.
    communicator.barrier()
    found = int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())
    communicator.barrier()
    return found

with strategy.scope():
    weight = mpidist.Variable(np.zeros({COUNT}, np.float32))
    optimizer = mpidist.optimizers.SGD(1.0)
gradient = np.full({COUNT}, rank + 1, np.float32)
step = lambda: strategy.run(optimizer.apply_gradients, ([(gradient, weight)],))
step()
before = sent()
for _ in range({STEPS}):
    step()
told = communicator.all_gather_object((socket.gethostname(), sent() - before))
checkpoint = mpidist.Checkpoint(weight=weight, optimizer=optimizer)
path = checkpoint.save(folder / "checkpoint")
value = float(weight.numpy()[-1])
weight.assign(np.zeros({COUNT}, np.float32))
checkpoint.restore(path)
restored = strategy.gather(np.array([weight.numpy()[-1]]), axis=0)
if rank == 0:
    figures = {{"sent": dict(told), "nodes": communicator.node_sizes, "value": value, "restored": restored.tolist()}}
    (folder / "figures.json").write_text(json.dumps(figures))
(folder / f"{{rank}}.trains").touch()
while True:
    step()
"""


def test_hosts_send_no_more_than_a_ring_and_end_with_one_of_them(virtual_hosts: Open, tmp_path: Path) -> None:
    hosts = virtual_hosts(HOSTS)
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    size = HOSTS * RANKS
    job = hosts.start([RANKS] * HOSTS, program, tmp_path)
    until_exists(*(tmp_path / f"{rank}.trains" for rank in range(size)), job=job, seconds=SECONDS)
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["nodes"] == [RANKS] * HOSTS
    assert figures["value"] == -(STEPS + 1) * size * (size + 1) / 2
    assert figures["restored"] == [figures["value"]] * size
    least = 2 * (HOSTS - 1) / HOSTS * 4 * COUNT
    # Beside the array itself: what frames it in packets, and the rounds in which ranks agree.
    assert max(figures["sent"].values()) / STEPS < 1.1 * least, figures["sent"]
    finish(hosts.execute(hosts.names[-1], "kill -9 -1"), "kill", 60)
    until_no_rank_is_left(hosts)
    # Its code says nothing: Open MPI's is 0 where a host is gone.
    finish(job, "the job", 60)
