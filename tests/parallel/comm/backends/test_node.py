"""The node collective: buffers of its own, many calls in a row, and its barrier."""

from __future__ import annotations

import gc
import time
from typing import Any

import numpy as np
import pytest

from mpidist.comm.arithmetic.combine import named_dtype
from mpidist.comm.backends.node import NodeBackend
from mpidist.comm.calls.signature_page import PAGE_BYTES, CallPage
from mpidist.comm.choice.sizes import DIRECT_FROM
from mpidist.comm.front.front import CollectiveFront
from mpidist.comm.group.communicator import Communicator
from mpidist.comm.memory.node_barrier import NodeBarrier
from mpidist.comm.memory.node_memory import NodeMemory
from mpidist.comm.memory.show_calls import open_node_barrier
from mpidist.failures.watchdog import WATCHDOG
from mpidist.options import CommunicationOptions, ReduceOp
from mpidist.recorder.calls import NEXT
from tests.helpers.amounts import amount
from tests.helpers.leftovers import mapped_node_memory
from tests.parallel.layouts import lay_out, open_node

pytestmark = pytest.mark.mpi(min_size=2)

# Ranks of one node, of several even and uneven ones.
LAYOUTS = ["node", "pairs", "first", "last"]


def open_layout(
    communicator: Communicator, layout: str, *, bytes_per_pack: int = 0, direct_from: int = DIRECT_FROM
) -> CollectiveFront:
    laid_out = lay_out(communicator, layout)
    if max(laid_out.node_sizes) == 1:
        pytest.skip("no two ranks share a node in this layout")
    return open_node(laid_out, CommunicationOptions(bytes_per_pack=bytes_per_pack), direct_from)


@pytest.mark.parametrize("copies", [None, 0, 900], ids=["blocks", "direct", "both"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_many_calls_of_all_kinds_in_a_row(communicator: Communicator, layout: str, copies: int | None) -> None:
    """Blocks are used again while other ranks may still read them: an error in that order shows as a wrong number.

    So are the tables that say where arrays lie; `copies` is the size from which on arrays are copied directly.
    """
    collective = open_layout(
        communicator, layout, bytes_per_pack=256, direct_from=1 << 62 if copies is None else copies
    )
    backend = collective.backend
    assert isinstance(backend, NodeBackend)
    if copies is not None and backend.direct_from is None:
        pytest.skip("this system does not let processes read one another")
    rank, size = communicator.rank, communicator.size
    random = np.random.default_rng(0)
    owned = collective.allocate((80_000,))
    for step in range(amount(150, 20_000)):
        count = int(random.integers(1, 400))
        # Ranks get out of step on purpose. All of them draw the same.
        late, seconds = int(random.integers(10)), 0.0005 * random.random()
        if late == rank:
            time.sleep(seconds)  # any moment: the others may be ahead by any part of a call
        mine = np.arange(count) * (rank + 1) + step
        total = np.arange(count) * (size * (size + 1) // 2) + step * size
        kind = int(random.integers(6))
        if kind == 0:
            np.testing.assert_array_equal(collective.all_reduce(mine), total)
        elif kind == 1:
            result = collective.reduce_scatter(mine)
            np.testing.assert_array_equal(result, np.array_split(total, size)[rank])
        elif kind == 2:
            root = int(random.integers(size))
            np.testing.assert_array_equal(collective.broadcast(mine, root), np.arange(count) * (root + 1) + step)
        elif kind == 3:
            gathered = collective.all_gather(np.full(rank * 3 + step % 4, rank))
            expected = np.concatenate([np.full(other * 3 + step % 4, other) for other in range(size)])
            np.testing.assert_array_equal(gathered, expected)
        elif kind == 4:
            owned[...] = rank + step
            collective.all_reduce(owned, in_place=True)
            assert (owned == size * (size - 1) // 2 + step * size).all()
        else:
            assert collective.all_reduce(mine, ReduceOp.MAX).tolist() == (np.arange(count) * size + step).tolist()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["float32", "float16", "int64", "complex128", "bool"])
def test_an_allocated_array_is_combined_where_it_lies(communicator: Communicator, layout: str, dtype: str) -> None:
    collective = open_layout(communicator, layout)
    rank, size = communicator.rank, communicator.size
    mine = collective.allocate((600, 500), dtype)
    assert mine.shape == (600, 500)
    assert not mine.any()
    op = ReduceOp.MAX if dtype == "bool" else ReduceOp.SUM
    mine[...] = rank == 1 if dtype == "bool" else rank + 1
    assert collective.all_reduce(mine, op, in_place=True) is mine
    assert (mine == (True if dtype == "bool" else size * (size + 1) // 2)).all()
    # A slice of it, and out of place, where it is an array like any other.
    mine[...] = 1
    part = mine[100:]
    collective.all_reduce(part, op, in_place=True)
    assert (part == (1 if dtype == "bool" else size)).all()
    assert (mine[:100] == 1).all()
    again = collective.all_reduce(mine, ReduceOp.MAX if dtype != "complex128" else ReduceOp.SUM)
    assert not np.shares_memory(again, mine)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64"])
def test_the_mean_of_an_allocated_array_is_its_sum_divided(
    communicator: Communicator, layout: str, dtype: str
) -> None:
    """Bit by bit, though it is divided block by block: here two blocks, and a rest."""
    collective = open_layout(communicator, layout)
    mine = collective.allocate((140_001,), dtype)
    own = np.random.default_rng(communicator.rank).standard_normal(mine.size).astype(dtype)
    for part in (slice(None), slice(7, None)):
        mine[...] = own
        expected = collective.all_reduce(mine[part], in_place=True) / communicator.size
        mine[...] = own
        collective.all_reduce(mine[part], ReduceOp.MEAN, in_place=True)
        np.testing.assert_array_equal(mine[part], expected)
    mine[...] = own
    mean = collective.all_reduce(mine, ReduceOp.MEAN)
    np.testing.assert_allclose(mean, collective.all_reduce(own) / communicator.size, rtol=1e-5, atol=1e-6)
    assert not np.shares_memory(mean, mine)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("count", [3, 100_000], ids=["at once", "in blocks"])
@pytest.mark.parametrize("reproducible", [False, True])
def test_a_sum_of_halves_is_rounded_once(
    communicator: Communicator, dtype: str, count: int, reproducible: bool
) -> None:
    """In half precision the ones would be lost, one after another."""
    collective = open_node(communicator, CommunicationOptions(reproducible=reproducible))
    large = 2048 if dtype == "float16" else 256
    mine = np.full(count, large if communicator.rank == 0 else 1).astype(named_dtype(dtype))
    expected = np.array(large + communicator.size - 1, np.float32).astype(mine.dtype)
    np.testing.assert_array_equal(collective.all_reduce(mine), expected)


def test_ranks_with_different_arrays_agree_on_the_way(communicator: Communicator) -> None:
    collective = open_layout(communicator, "node")
    rank, size = communicator.rank, communicator.size
    owned = collective.allocate((100_000,))
    other = collective.allocate((120_000,))
    private = np.zeros(100_000, np.float32)
    cases: list[list[Any]] = [
        [owned if rank == 0 else private, "only rank 0 has it in a buffer"],
        [owned if rank == 0 else other[:100_000], "in different buffers"],
        [(other[:100_000] if rank else other[20_000:]), "at different places"],
    ]
    for array, why in cases:
        array[...] = rank + 1
        collective.all_reduce(array, in_place=True)
        assert (array == size * (size + 1) // 2).all(), why


def test_a_buffer_lives_as_long_as_an_array_over_it(communicator: Communicator) -> None:
    collective = open_layout(communicator, "node")
    view = collective.allocate((100_000,))[10_000:90_000]
    gc.collect()
    view[...] = 1
    collective.all_reduce(view, in_place=True)
    assert (view == communicator.size).all()

    before = mapped_node_memory()
    kept = [collective.allocate((40_000,)) for _ in range(3)]
    new = mapped_node_memory() - before
    assert new
    del kept
    gc.collect()
    assert not new & mapped_node_memory()


def test_a_closed_collective_holds_no_memory(communicator: Communicator) -> None:
    """Though somebody keeps it, and it kept its way for small arrays."""
    before = mapped_node_memory()
    collective = open_layout(communicator, "node")
    for size in (3, 5):
        assert (collective.all_reduce(np.ones(size)) == communicator.size).all()
    new = mapped_node_memory() - before
    assert new
    collective.close()
    gc.collect()
    assert not new & mapped_node_memory()
    with pytest.raises(RuntimeError, match="closed"):
        collective.all_reduce(np.ones(3))


def test_mpi_goes_on_while_a_rank_waits(communicator: Communicator) -> None:
    """Rank 1 waits in MPI until rank 0, which waits for it in node memory, takes its message."""
    collective = open_layout(communicator, "node")
    for _ in range(20):  # the first calls compare what the ranks do, by MPI
        collective.all_reduce(np.ones(3))
    # Nobody is in a call any more.
    communicator.mpi.Barrier()
    message = np.full(3, communicator.rank)
    request = communicator.mpi.Irecv(message, 1, tag=77) if communicator.rank == 0 else None
    if communicator.rank == 1:
        (first,) = [peer for peer in WATCHDOG.peers() if tuple(peer.key) == tuple(communicator.processes[0])]
        while not (first.state(collective.communicator.order.identity) or 0) % NEXT:
            time.sleep(1e-3)
        communicator.mpi.Ssend(message, 0, tag=77)
    assert (collective.all_reduce(np.ones(3)) == communicator.size).all()
    if request is not None:
        request.Wait()
        assert (message == 1).all()


def test_the_barrier_keeps_everyone_until_the_last(communicator: Communicator) -> None:
    node = communicator.node
    counters = NodeMemory(communicator, 8 * node.size).bytes.view(np.int64)
    page = CallPage(NodeMemory(communicator, PAGE_BYTES * node.size).bytes.data.cast("B"), range(node.size), node.rank)
    random = np.random.default_rng(node.rank)
    for barrier in (NodeBarrier(node, page, communicator.order, 1), open_node_barrier(communicator)):
        for step in range(200):
            if step % 50 == node.rank:
                time.sleep(0.004 * random.random())  # any moment: the others must not be ahead
            counters[node.rank] += 1
            barrier()
            assert (counters == counters[node.rank]).all()
            barrier()
