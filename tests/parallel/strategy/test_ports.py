"""The synchronous strategies open no port: on many sites nothing may listen but what MPI needs."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist.comm.group.mpi_communicator import MpiCommunicator

pytestmark = pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="reads Linux's tables of sockets")

_LISTENS = "0A"


def open_ports() -> set[str]:
    """The sockets of this process that wait for others: TCP that listens, and all of UDP."""
    found = set()
    for name in ("tcp", "tcp6", "udp", "udp6"):
        table = Path("/proc/self/net", name)
        lines = [line.split() for line in table.read_text().splitlines()[1:]] if table.exists() else []
        found |= {f"socket:[{words[9]}]" for words in lines if name.startswith("udp") or words[3] == _LISTENS}
    mine = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            mine.add(str(descriptor.readlink()))
        except OSError:
            # The listing's own.
            continue
    return found & mine


def test_a_port_is_seen_where_one_is_open() -> None:
    before = open_ports()
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert open_ports() - before == {os.readlink(f"/proc/self/fd/{server.fileno()}")}


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kind", [mpidist.MultiWorkerMirroredStrategy, mpidist.MirroredStrategy])
def test_a_synchronous_strategy_opens_none(communicator: MpiCommunicator, kind: Any) -> None:
    # What the library keeps for a communicator of the program goes with it.
    own = communicator.mpi.Dup()
    before = open_ports()
    with kind(communicator=own) as strategy:
        with strategy.scope():
            variable = mpidist.Variable(np.zeros(100_000, np.float32))
            optimizer = mpidist.optimizers.SGD(1.0)
            optimizer.build([variable])
        strategy.run(lambda: optimizer.apply_gradients([(np.ones(100_000, np.float32), variable)]))
        assert strategy.reduce("sum", 1.0, axis=None) == strategy.num_replicas_in_sync
        assert open_ports() == before
    own.Free()
