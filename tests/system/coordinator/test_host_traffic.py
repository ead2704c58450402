"""The bytes that hosts send in an all-reduce and in a step of training, counted on their interfaces."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.hosts.virtual_hosts import VirtualHosts

pytestmark = pytest.mark.timeout_seconds(120)

PROGRAM = '''
import json, sys
import numpy as np
import mpidist
from mpidist.experimental import CommunicationOptions

STEPS, COUNT = 3, 2 << 20
SHAPES = [(1500, 1000), (7,), (COUNT - 1_500_007,)]

def sent():
    with open("/sys/class/net/eth0/statistics/tx_bytes") as file:
        return int(file.read())

def share_of(function):
    """The bytes that this host sends for each byte of a rank's gradient."""
    for _ in range(2):
        strategy.run(function)
    communicator.barrier()
    before = sent()
    # No rank sends more before the others of its host have read.
    communicator.barrier()
    for _ in range(STEPS):
        strategy.run(function)
    communicator.barrier()
    return (sent() - before) / STEPS / (4 * COUNT)

shares = {}
for name, options in [("", {}), ("half ", {"wire_dtype": "float16"})]:
    strategy = mpidist.MultiWorkerMirroredStrategy(communication_options=CommunicationOptions(**options))
    communicator = strategy.communicator
    rank, size = communicator.rank, communicator.size
    with strategy.scope():
        weights = [mpidist.Variable(np.zeros(shape, np.float32)) for shape in SHAPES]
        optimizer = mpidist.optimizers.SGD(1.0)
    gradients = [np.full(weight.shape, -1.0 - rank, np.float32) for weight in weights]
    array = np.arange(COUNT, dtype=np.float32) % 1000 + rank
    shares[name + "step"] = share_of(lambda: optimizer.apply_gradients(zip(gradients, weights)))
    steps = size * (size + 1) / 2 * (STEPS + 2)
    assert all((weight.numpy() == steps).all() for weight in weights), (name, steps)

def all_reduce():
    total = mpidist.get_replica_context().all_reduce("SUM", array)
    assert np.array_equal(total, np.arange(COUNT) % 1000 * size + size * (size - 1) / 2)

strategy = mpidist.MultiWorkerMirroredStrategy()
shares["all_reduce"] = share_of(all_reduce)
everyone = communicator.all_gather_object((communicator.node_index, shares))
if rank == 0:
    with open(sys.argv[1], "w") as file:
        json.dump(everyone, file)
'''


@pytest.mark.parametrize("ranks", [(2, 2), (1, 1, 1), (2, 1, 1)], ids=["2+2", "1+1+1", "2+1+1"])
def test_the_busiest_host_sends_no_more_than_it_must(
    virtual_hosts: Callable[[int], VirtualHosts], tmp_path: Path, ranks: tuple[int, ...]
) -> None:
    """A sum over m hosts takes 2(m - 1)/m of the gradient from each, whatever the number of its ranks."""
    program, out = tmp_path / "program.py", tmp_path / "shares.json"
    program.write_text(PROGRAM)
    result = virtual_hosts(len(ranks)).run(ranks, program, out)
    assert result.returncode == 0, result.stdout + result.stderr
    everyone = json.loads(out.read_text())
    assert [node for node, _ in everyone] == [node for node, count in enumerate(ranks) for _ in range(count)]
    least = 2 * (len(ranks) - 1) / len(ranks)
    # What the program did not send, it could not have summed: the interface is the right one.
    for _, shares in everyone:
        for name, share in shares.items():
            must = least / 2 if name.startswith("half") else least
            assert 0.95 * must < share <= 1.1 * must, (name, everyone)
