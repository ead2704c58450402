"""Large arrays between nodes: a circulant graph, so that all nodes send the same, in pieces."""

from __future__ import annotations

import numpy as np
import pytest

from mpidist import arrays
from mpidist.comm.backends.automatic import AutomaticBackend
from mpidist.comm.backends.circulant import CirculantBackend
from mpidist.comm.backends.mpi import MpiBackend
from mpidist.comm.backends.node import NodeBackend
from mpidist.comm.choice import selection
from mpidist.comm.choice.sizes import circulant_begins
from mpidist.comm.collective import Collective
from mpidist.comm.front.front import CollectiveFront
from mpidist.comm.group.communicator import Communicator
from mpidist.options import CommunicationOptions, ReduceOp
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
        return open_node(lay_out(communicator, "uneven"), options, request.param, circulant_from=64)


@pytest.mark.mpi(min_size=4)
@pytest.mark.parametrize("is_allocated", [False, True], ids=["any array", "allocated"])
def test_each_node_sends_the_same(communicator: Communicator, is_allocated: bool) -> None:
    laid_out = lay_out(communicator, "uneven")
    nodes, count = len(laid_out.node_sizes), 1_500_000
    assert nodes & (nodes - 1), "a power of two: MPI's own algorithms send as few bytes"
    collective = open_node(laid_out, CommunicationOptions(), circulant_from=circulant_begins(nodes))
    mine = collective.allocate((count,)) if is_allocated else np.empty(count, np.float32)
    mine[...] = np.random.default_rng(communicator.rank).integers(-99, 99, count)
    expected = np.sum(communicator.all_gather_object(mine.copy()), axis=0)
    collective.all_reduce(mine, in_place=True)
    np.testing.assert_array_equal(mine, expected)
    assert isinstance(collective.backend, NodeBackend)
    lane = collective.backend._lane
    assert lane is not None
    circulant = lane._circulant
    # One rank of each node has the lane.
    assert (circulant is None) == (laid_out.open_lane() is None)
    if circulant is not None:
        share = 2 * (nodes - 1) / nodes
        # The rest of a last piece is small, and MPI's.
        assert 0.9 * share * mine.nbytes < circulant.traffic.sent_between_nodes <= share * mine.nbytes + 64


@pytest.mark.mpi(min_size=2)
class TestCirculantContract(CollectiveContract):
    """Every rank is a node of its own."""

    large = 3001

    @pytest.fixture
    def collective(self, communicator: Communicator) -> Collective:
        laid_out, options = lay_out(communicator, "each"), CommunicationOptions(bytes_per_pack=512)
        return CollectiveFront(CirculantBackend(laid_out, options, MpiBackend(laid_out, options)), options)


@pytest.mark.parametrize("least", [1, pytest.param(9, marks=pytest.mark.mpi(min_size=9))])
@pytest.mark.mpi(min_size=3)
def test_any_number_of_ranks_sends_the_same_in_few_rounds(communicator: Communicator, least: int) -> None:
    laid_out = lay_out(communicator, "each")
    for size in range(2, communicator.size + 1):
        part = laid_out.split(int(communicator.rank < size))
        if communicator.rank < size:
            options = CommunicationOptions(bytes_per_pack=1 << 30)
            backend = CirculantBackend(part, options, MpiBackend(part, options))
            # Blocks of three elements and of two; then all of two.
            for count in (2 * size + 1, 2 * size):
                before = backend.traffic.sent
                mine = np.random.default_rng((1, part.rank)).integers(0, 1 << 40, count)
                total = np.empty_like(mine)
                backend.all_reduce(mine, total, ReduceOp.SUM)
                np.testing.assert_array_equal(total, np.sum(part.all_gather_object(mine), axis=0))
            assert backend.traffic.sent - before == 2 * (size - 1) * 2 * 8
            counts = [(number * 7) % 4 for number in range(size)]
            gathered = np.empty(sum(counts), np.int64)
            own = np.full(counts[part.rank], part.rank)
            backend.all_gather(arrays.as_bytes(own), arrays.as_bytes(gathered), [8 * count for count in counts])
            np.testing.assert_array_equal(gathered, np.repeat(np.arange(size), counts))
            scattered = np.empty(counts[part.rank], np.int64)
            backend.reduce_scatter(gathered, scattered, counts, ReduceOp.SUM)
            np.testing.assert_array_equal(scattered, size * own)
        part.close()


@pytest.mark.mpi(min_size=2)
def test_auto_sends_large_arrays_over_a_circulant_graph(communicator: Communicator) -> None:
    laid_out = lay_out(communicator, "each")
    size, rank = communicator.size, communicator.rank
    limit = circulant_begins(size)
    collective = selection.choose(laid_out, CommunicationOptions())
    backend = collective.backend
    assert isinstance(backend, AutomaticBackend)
    random = np.random.default_rng(rank).standard_normal(500_000).astype(np.float32)
    total = collective.all_reduce(random)
    np.testing.assert_allclose(total, np.sum(communicator.all_gather_object(random), axis=0), rtol=1e-4, atol=1e-4)
    # Not only equal to rounding: the same bits everywhere.
    assert len(set(communicator.all_gather_object(total.tobytes()))) == 1
    large = backend.backend(random, random.nbytes)
    assert isinstance(large, CirculantBackend)
    sent = large.traffic.sent
    assert sent == pytest.approx(2 * (size - 1) / size * random.nbytes, rel=1e-3)
    collective.all_reduce(random[: limit // 4 - 1])
    everyones = collective.broadcast(random, 1)
    assert large.traffic.sent == sent
    assert len(set(communicator.all_gather_object(everyones.tobytes()))) == 1
    collective.all_reduce(random[: limit // 4])
    assert large.traffic.sent > sent
