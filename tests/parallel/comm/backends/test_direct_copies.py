"""Direct copies between a node's ranks: the contract, uneven nodes, the bits of blocks, and what forbids them."""

from __future__ import annotations

import logging
import os
import time

import numpy as np
import pytest

from mpidist.comm.backends import direct_copies
from mpidist.comm.backends.node import NodeCollective
from mpidist.comm.choice import selection
from mpidist.comm.collective import Collective
from mpidist.comm.communicator import Communicator
from mpidist.comm.memory import peer_memory
from mpidist.comm.memory.node_memory import NodeMemory
from mpidist.comm.memory.peer_memory import PeerMemory, open_peer_memory
from mpidist.errors import MismatchError
from mpidist.options import CommunicationImplementation, CommunicationOptions, ReduceOp
from mpidist.testing.contract import CollectiveContract
from tests.parallel.layouts import copy_directly, lay_out

pytestmark = pytest.mark.mpi(min_size=2)

# Pieces so small that the arrays here go in several.
SIZES = [size for size, _, _ in direct_copies.TRIALS]
LIMITS = [*(limit for _, limit, _ in direct_copies.TRIALS), direct_copies.ALWAYS_FROM]
NODE = CommunicationOptions(implementation="NODE", bytes_per_pack=256)


def open_node(communicator: Communicator, direct_from: int, options: CommunicationOptions = NODE) -> NodeCollective:
    """The node collective, which copies arrays from so many bytes on directly."""
    collective = selection.choose(communicator, options)
    assert isinstance(collective, NodeCollective)
    if collective._direct is not None:
        copy_directly(collective, direct_from)
    return collective


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
        return open_node(laid_out, 0)


@pytest.mark.parametrize("dtype", ["float32", "float16", "complex64"])
@pytest.mark.parametrize("in_place", [False, True])
def test_the_bits_are_those_of_blocks(communicator: Communicator, dtype: str, in_place: bool) -> None:
    """Which of them is faster is measured: the result must not depend on it."""
    mine = np.random.default_rng(communicator.rank).standard_normal(5_003).astype(dtype)
    results = []
    for direct_from in (0, 1 << 62):
        array = mine.copy()
        collective = open_node(communicator, direct_from)
        results.append(collective.all_reduce(array, in_place=in_place))
        np.testing.assert_array_equal(array, results[-1] if in_place else mine)
    np.testing.assert_array_equal(results[0], results[1])
    sums = communicator.all_gather_object(results[0].tobytes())
    assert len(set(sums)) == 1


def test_no_rank_writes_beyond_anothers_array(communicator: Communicator) -> None:
    """Shapes are compared in the first calls, and then now and then only."""
    collective = open_node(communicator, 0)
    for _ in range(20):
        collective.all_reduce(np.ones(10))
    with pytest.raises(MismatchError, match=r"must be of one size on all ranks, got \["):
        collective.all_reduce(np.ones(1_000 + communicator.rank))
    assert (collective.all_reduce(np.ones(10)) == communicator.size).all()


def test_pieces_are_never_below_an_element(communicator: Communicator) -> None:
    options = CommunicationOptions(implementation="NODE", bytes_per_pack=1)
    array = np.full(50, communicator.rank + 1, np.clongdouble)
    total = open_node(communicator, 0, options).all_reduce(array)
    assert (total == communicator.size * (communicator.size + 1) // 2).all()


def test_what_a_tree_combines_leaves_the_arrays_alone(communicator: Communicator) -> None:
    options = CommunicationOptions(reproducible=True, bytes_per_pack=256)
    collective = selection.open_backend(CommunicationImplementation.NODE, communicator, options)
    assert isinstance(collective, NodeCollective)
    assert collective._direct is not None
    copy_directly(collective, 0)
    mine = np.random.default_rng(communicator.rank).standard_normal(1_001).astype(np.float32)
    kept = mine.copy()
    total = collective.all_reduce(mine)
    np.testing.assert_array_equal(mine, kept)
    np.testing.assert_allclose(total, np.sum(communicator.all_gather_object(mine), axis=0), rtol=1e-5, atol=1e-5)


def test_the_way_is_chosen_by_a_trial_and_told(
    communicator: Communicator, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "mpidist"):
        collective = selection.choose(communicator, CommunicationOptions(implementation="NODE"))
        assert ("are copied directly between processes" in caplog.text) == (communicator.rank == 0)
        assert isinstance(collective, NodeCollective)
        assert collective._direct is not None
        collective._direct.limit = -1
        array = np.full(direct_copies.TRIALS[-1][0] // 4, communicator.rank + 1, np.float32)
        assert (collective.all_reduce(array, ReduceOp.MAX) == communicator.size).all()
    assert collective._direct.limit in LIMITS
    assert len(set(communicator.all_gather_object(collective._direct.limit))) == 1
    told = f"arrays from {collective._direct.limit} bytes on are copied directly, by a trial"
    assert (told in caplog.text) == (communicator.rank == 0)


@pytest.mark.parametrize("slower", range(len(SIZES) + 1))
def test_direct_copies_are_taken_from_the_size_from_which_on_they_are_faster(
    communicator: Communicator, slower: int
) -> None:
    """The `slower` smallest of the sizes that are tried take longer by direct copies."""
    collective = selection.choose(communicator, CommunicationOptions(implementation="NODE"))
    assert isinstance(collective, NodeCollective)
    direct = collective._direct
    assert direct is not None
    tried: list[int] = []

    def all_reduce(array: np.ndarray, total: np.ndarray, op: ReduceOp) -> None:
        is_direct = array.nbytes >= direct.limit
        # One rank suffices: the slowest counts.
        if communicator.rank == communicator.size - 1:
            time.sleep(0.002 if is_direct == (array.nbytes in SIZES[:slower]) else 0)
        tried.append(array.nbytes)

    direct.compare_with_blocks(all_reduce)
    large = np.ones(SIZES[0], np.uint8)
    direct.takes(large, large, large.nbytes)
    assert direct.limit == LIMITS[slower]
    assert set(tried) == set(SIZES[: slower + 1])
    communicator.barrier()


def test_it_is_tried_again_after_some_time(communicator: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_copies, "TRIED_AGAIN_BYTES", 10 << 20)
    collective = selection.choose(communicator, CommunicationOptions(implementation="NODE"))
    assert isinstance(collective, NodeCollective)
    assert collective._direct is not None
    array = np.ones(1 << 18, np.float32)
    assert (collective.all_reduce(array) == communicator.size).all()
    assert collective._direct.limit in LIMITS
    collective._direct.limit = -1
    for _ in range(9):
        assert (collective.all_reduce(array) == communicator.size).all()
    assert collective._direct.limit == -1
    for _ in range(3):
        assert (collective.all_reduce(array) == communicator.size).all()
    assert collective._direct.limit in LIMITS
    assert len(set(communicator.all_gather_object(collective._direct.limit))) == 1


def test_without_the_right_to_it_blocks_are_used(
    communicator: Communicator, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # One rank is enough.
    if communicator.rank == communicator.size - 1:
        monkeypatch.setenv(peer_memory.SWITCH, "0")
    with caplog.at_level(logging.INFO, "mpidist"):
        collective = open_node(communicator, 0)
    assert collective._direct is None
    if communicator.rank == 0:
        assert "collective NODE: all arrays go through shared blocks: " in caplog.text
    assert (collective.all_reduce(np.ones(5_000, np.float32)) == communicator.size).all()


@pytest.mark.parametrize("layout", ["node", "first"])
def test_memory_that_cannot_be_reached_goes_through_blocks(
    communicator: Communicator, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    laid_out = lay_out(communicator, layout)
    if max(laid_out.node_sizes) == 1:
        pytest.skip("no two ranks share a node in this layout")
    collective = open_node(laid_out, 0)
    if communicator.rank == communicator.size - 1:
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
