"""The cores of a node's ranks, and what they decide: whether a rank that waits keeps its core."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from mpidist.comm.calls.signature_page import PAGE_BYTES, CallPage
from mpidist.comm.cores import node_cores, own_cores
from mpidist.comm.group.communicator import Communicator
from mpidist.comm.memory.node_barrier import NodeBarrier
from mpidist.comm.memory.node_memory import NodeMemory

pytestmark = pytest.mark.mpi


@pytest.fixture
def allowed() -> Iterator[list[int]]:
    """The cores of this process, which a test may bind to some of them."""
    before = os.sched_getaffinity(0)
    yield sorted(before)
    os.sched_setaffinity(0, before)


def test_cores_are_counted_together(communicator: Communicator, allowed: list[int]) -> None:
    os.sched_setaffinity(0, {allowed[communicator.rank % len(allowed)]})
    quota = own_cores().quota
    expected = min(communicator.size, len(allowed))
    assert node_cores(communicator.node) == (expected if quota is None else max(1, min(expected, int(quota.cores))))
    os.sched_setaffinity(0, {allowed[0]})
    assert node_cores(communicator.node) == 1


@pytest.mark.mpi(min_size=2)
def test_ranks_on_one_core_give_it_away_at_once(communicator: Communicator, allowed: list[int]) -> None:
    """Else each of them looks for the others' counters for as long as the system lets it, and they cannot count."""
    node = communicator.node
    memory = NodeMemory(communicator, PAGE_BYTES * node.size)
    page = CallPage(memory.bytes.data.cast("B"), range(node.size), node.rank)
    os.sched_setaffinity(0, {allowed[0]})
    barrier = NodeBarrier(node, page, communicator.order, node_cores(node))
    assert barrier._spins == 0
    barrier()
    # On a machine with enough cores they are not given away.
    os.sched_setaffinity(0, set(allowed))
    count = node_cores(node)
    assert (NodeBarrier(node, page, communicator.order, count)._spins > 0) == (count >= node.size)
