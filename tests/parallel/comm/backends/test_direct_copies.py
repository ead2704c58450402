"""Direct copies between a node's ranks: the contract, uneven nodes, the bits of blocks, and what forbids them."""

from __future__ import annotations

import logging
import os

import numpy as np
import pytest

from mpidist.arrays import AnyArray
from mpidist.comm.backends.node import NodeBackend
from mpidist.comm.choice import selection
from mpidist.comm.choice.sizes import DIRECT_FROM, NEVER, Sizes
from mpidist.comm.collective import Collective
from mpidist.comm.front.front import CollectiveFront
from mpidist.comm.group.communicator import Communicator
from mpidist.comm.memory import peer_memory
from mpidist.comm.memory.node_memory import NodeMemory
from mpidist.comm.memory.peer_memory import PeerMemory, open_peer_memory
from mpidist.errors import MismatchError
from mpidist.options import CommunicationOptions, ReduceOp
from mpidist.testing.contract import CollectiveContract
from tests.parallel.layouts import lay_out, open_node

pytestmark = pytest.mark.mpi(min_size=2)

# Pieces so small that the arrays here need several.
IN_PIECES = CommunicationOptions(bytes_per_pack=256)


def direct_from(collective: CollectiveFront) -> int | None:
    assert isinstance(collective.backend, NodeBackend)
    return collective.backend.direct_from


def open_table(communicator: Communicator) -> tuple[PeerMemory | None, str]:
    node = communicator.node
    table = NodeMemory(communicator, 24 * node.size).bytes.view(np.int64).reshape(-1, 3)
    return open_peer_memory(communicator, table, node.barrier)


@pytest.fixture(autouse=True)
def _peers_can_be_reached(communicator: Communicator) -> None:
    peers, why = open_table(communicator)
    if peers is None:
        pytest.skip(f"this system does not let processes read one another: {why}")


class TestContract(CollectiveContract):
    large = 3001

    @pytest.fixture(params=["node", "first"])
    def collective(self, request: pytest.FixtureRequest, communicator: Communicator) -> Collective:
        laid_out = lay_out(communicator, request.param)
        if max(laid_out.node_sizes) == 1:
            pytest.skip("no two ranks share a node in this layout")
        return open_node(laid_out, IN_PIECES, 0)


@pytest.mark.parametrize("dtype", ["float32", "float16", "complex64"])
@pytest.mark.parametrize("in_place", [False, True])
def test_the_bits_are_those_of_blocks(communicator: Communicator, dtype: str, in_place: bool) -> None:
    """The size from which arrays are copied directly may be measured: the result must not depend on it."""
    mine = np.random.default_rng(communicator.rank).standard_normal(5_003).astype(dtype)
    results = []
    for limit in (0, NEVER):
        array = mine.copy()
        collective = open_node(communicator, IN_PIECES, limit)
        results.append(collective.all_reduce(array, in_place=in_place))
        np.testing.assert_array_equal(array, results[-1] if in_place else mine)
    np.testing.assert_array_equal(results[0], results[1])
    sums = communicator.all_gather_object(results[0].tobytes())
    assert len(set(sums)) == 1


def test_no_rank_writes_beyond_anothers_array(communicator: Communicator) -> None:
    """Calls are compared before a rank touches another one's memory."""
    collective = open_node(communicator, IN_PIECES, 0)
    for _ in range(20):
        collective.all_reduce(np.ones(10))
    with pytest.raises(MismatchError, match=r"must be the same on all ranks, got .*float64 \(1000,\)"):
        collective.all_reduce(np.ones(1_000 + communicator.rank))
    assert (collective.all_reduce(np.ones(10)) == communicator.size).all()


def test_pieces_are_never_below_an_element(communicator: Communicator) -> None:
    options = CommunicationOptions(bytes_per_pack=1)
    array = np.full(50, communicator.rank + 1, np.clongdouble)
    total = open_node(communicator, options, 0).all_reduce(array)
    assert (total == communicator.size * (communicator.size + 1) // 2).all()


def test_what_a_tree_combines_leaves_the_arrays_alone(communicator: Communicator) -> None:
    options = CommunicationOptions(reproducible=True, bytes_per_pack=256)
    collective = open_node(communicator, options, 0)
    assert direct_from(collective) == 0
    mine = np.random.default_rng(communicator.rank).standard_normal(1_001).astype(np.float32)
    kept = mine.copy()
    total = collective.all_reduce(mine)
    np.testing.assert_array_equal(mine, kept)
    np.testing.assert_allclose(total, np.sum(communicator.all_gather_object(mine), axis=0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("begins", [1 << 16, DIRECT_FROM, NEVER])
def test_the_size_from_which_arrays_are_copied_directly_is_told(
    communicator: Communicator, begins: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selection, "find_sizes", lambda *_: Sizes(direct_from=begins))
    with caplog.at_level(logging.INFO, "mpidist"):
        collective = selection.choose(communicator, CommunicationOptions(implementation="NODE"))
    assert direct_from(collective) == begins
    told = f"arrays of {begins} bytes and above are copied directly between processes"
    assert (told in caplog.text) == (communicator.rank == 0)
    shown: list[int] = []
    show = PeerMemory.show

    def noted(self: PeerMemory, source: AnyArray, target: AnyArray, byte_count: int) -> bool:
        shown.append(byte_count)
        return show(self, source, target, byte_count)

    monkeypatch.setattr(PeerMemory, "show", noted)
    sizes = [1 << power for power in (15, 16, 18, 20, 21)]
    for size in sizes:
        array = np.full(size // 4, communicator.rank + 1, np.float32)
        assert (collective.all_reduce(array, ReduceOp.MAX) == communicator.size).all()
    assert shown == [size for size in sizes if size >= begins]


def test_addresses_are_looked_up_only_where_a_driver_may_have_mapped_them(
    communicator: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []
    reaches = PeerMemory._reaches

    def noted(self: PeerMemory, address: int) -> bool:
        looks.append(address)
        return reaches(self, address)

    monkeypatch.setattr(PeerMemory, "_reaches", noted)
    collective = open_node(communicator, IN_PIECES, 0)
    for drivers, expected in ((frozenset[str](), 0), (frozenset(("sys",)), 1)):
        monkeypatch.setattr(peer_memory, "_DRIVERS", drivers)
        looks.clear()
        collective.all_reduce(np.ones(300), in_place=True)
        assert len(looks) == expected


def test_without_the_right_to_it_blocks_are_used(
    communicator: Communicator, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # One rank is enough.
    if communicator.rank == communicator.size - 1:
        monkeypatch.setenv(peer_memory.SWITCH, "0")
    with caplog.at_level(logging.INFO, "mpidist"):
        collective = open_node(communicator, IN_PIECES, 0)
    assert direct_from(collective) is None
    if communicator.rank == 0:
        assert "backend NODE: all arrays pass through shared blocks: " in caplog.text
    assert (collective.all_reduce(np.ones(5_000, np.float32)) == communicator.size).all()


@pytest.mark.parametrize("layout", ["node", "first"])
def test_memory_that_cannot_be_reached_goes_through_blocks(
    communicator: Communicator, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    laid_out = lay_out(communicator, layout)
    if max(laid_out.node_sizes) == 1:
        pytest.skip("no two ranks share a node in this layout")
    collective = open_node(laid_out, IN_PIECES, 0)
    if communicator.rank == communicator.size - 1:
        monkeypatch.setattr(peer_memory, "_DRIVERS", frozenset(("sys",)))
        monkeypatch.setattr(PeerMemory, "_reaches", lambda self, address: False)
    array = np.full(5_000, communicator.rank + 1.0)
    total = communicator.size * (communicator.size + 1) // 2
    assert (collective.all_reduce(array) == total).all()
    assert (collective.broadcast(array, 1) == 2).all()
    assert (collective.reduce_scatter(array) == total).all()
    assert collective.all_gather(array).sum() == 5_000 * total


def test_another_process_under_the_same_number_is_noticed(
    communicator: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in containers that number their processes apart."""
    number = os.getpid() if communicator.rank else os.getppid()
    monkeypatch.setattr(os, "getpid", lambda: number)
    peers, why = open_table(communicator)
    assert peers is None
    assert why
