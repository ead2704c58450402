"""Large arrays between nodes whose number is no power of two: a ring, so that no node sends more than the others."""

from __future__ import annotations

import numpy as np
import pytest

from mpidist.comm.backends.automatic import AutomaticBackend
from mpidist.comm.backends.large_ring import LargeRing
from mpidist.comm.backends.node import NodeBackend
from mpidist.comm.backends.ring import RingBackend
from mpidist.comm.choice import selection
from mpidist.comm.choice.sizes import ring_begins
from mpidist.comm.collective import Collective
from mpidist.comm.group.communicator import Communicator
from mpidist.options import CommunicationOptions
from mpidist.testing.contract import CollectiveContract
from tests.parallel.layouts import lay_out, open_node

NEVER = 1 << 62


@pytest.mark.mpi(min_size=4)
class TestContract(CollectiveContract):
    """Two ranks on one of three nodes."""

    large = 3001

    @pytest.fixture(params=[0, NEVER], ids=["direct", "blocks"])
    def collective(self, request: pytest.FixtureRequest, communicator: Communicator) -> Collective:
        options = CommunicationOptions(bytes_per_pack=512)
        return open_node(lay_out(communicator, "uneven"), options, request.param, ring_from=64)


@pytest.mark.mpi(min_size=4)
@pytest.mark.parametrize("is_allocated", [False, True], ids=["any array", "allocated"])
def test_each_node_sends_the_same(communicator: Communicator, is_allocated: bool) -> None:
    laid_out = lay_out(communicator, "uneven")
    nodes, count = len(laid_out.node_sizes), 1_500_000
    assert nodes & (nodes - 1), "a power of two: MPI's own algorithms are as good"
    collective = open_node(laid_out, CommunicationOptions(), ring_from=ring_begins(nodes))
    mine = collective.allocate((count,)) if is_allocated else np.empty(count, np.float32)
    mine[...] = np.random.default_rng(communicator.rank).integers(-99, 99, count)
    expected = np.sum(communicator.all_gather_object(mine.copy()), axis=0)
    collective.all_reduce(mine, in_place=True)
    np.testing.assert_array_equal(mine, expected)
    assert isinstance(collective.backend, NodeBackend)
    lane = collective.backend._lane
    assert lane is not None
    ring = lane._ring
    # One rank of each node has the lane.
    assert (ring is None) == (laid_out.open_lane() is None)
    if ring is not None:
        share = 2 * (nodes - 1) / nodes
        # The rest of a last piece is small, and MPI's.
        assert 0.9 * share * mine.nbytes < ring.traffic.sent_between_nodes <= share * mine.nbytes + 64


@pytest.mark.mpi(min_size=3)
def test_auto_sends_large_arrays_around_a_ring(communicator: Communicator) -> None:
    laid_out = lay_out(communicator, "each")
    size, rank = communicator.size, communicator.rank
    limit = ring_begins(size)
    collective = selection.choose(laid_out, CommunicationOptions())
    backend = collective.backend
    assert isinstance(backend, AutomaticBackend)
    random = np.random.default_rng(rank).standard_normal(500_000).astype(np.float32)
    total = collective.all_reduce(random)
    np.testing.assert_allclose(total, np.sum(communicator.all_gather_object(random), axis=0), rtol=1e-4, atol=1e-4)
    # Not only equal to rounding: the same bits everywhere.
    assert len(set(communicator.all_gather_object(total.tobytes()))) == 1
    large = backend.backend(random, random.nbytes)
    if size == 4:
        assert not isinstance(large, RingBackend)
        return
    assert isinstance(large, LargeRing)
    sent = large.traffic.sent
    assert sent == pytest.approx(2 * (size - 1) / size * random.nbytes, rel=1e-3)
    collective.all_reduce(random[: limit // 4 - 1])
    everyones = collective.broadcast(random, 1)
    assert large.traffic.sent == sent
    assert len(set(communicator.all_gather_object(everyones.tobytes()))) == 1
    collective.all_reduce(random[: limit // 4])
    assert large.traffic.sent > sent
