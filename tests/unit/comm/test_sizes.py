"""The sizes of the automatic collective, by rules."""

from __future__ import annotations

from mpidist.comm.choice.sizes import NEVER, circulant_begins, sizes_for


def test_ranks_that_outnumber_cores_use_node_memory_for_small_arrays_on_one_node_only() -> None:
    enough = sizes_for(4, 2, 64, is_open_mpi=False)
    one, two = ([sizes_for(4, nodes, 2, is_open_mpi=is_it) for is_it in (False, True)] for nodes in (1, 2))
    assert one[0].node_from == 0 < one[1].node_from < enough.node_from < two[0].node_from < two[1].node_from < NEVER
    assert "more ranks than cores" in one[0].reason


def test_a_circulant_graph_pays_between_nodes() -> None:
    assert circulant_begins(1) == NEVER
    # In powers of two MPI sends as few bytes, and only the pieces pay.
    assert {circulant_begins(count) for count in (2, 4, 8, 1 << 16)} == {1 << 18}
    # It grows with the number of rounds, and not with that of nodes.
    begins = {count: circulant_begins(count) >> 16 for count in (3, 5, 6, 12, 100, 65_535)}
    assert begins == {3: 3, 5: 5, 6: 5, 12: 7, 100: 13, 65_535: 31}
    for cores in (2, 64):
        sizes = {nodes: sizes_for(4, nodes, cores, is_open_mpi=False).circulant_from for nodes in (1, 2, 3)}
        assert sizes == {1: NEVER, 2: 1 << 18, 3: 3 << 16}


def test_two_ranks_always_use_node_memory() -> None:
    sizes = [
        sizes_for(ranks, 1, 64, is_open_mpi=is_it).node_from for ranks in (2, 3) for is_it in (False, True)
    ]
    assert sizes[0] == sizes[1] == 0 < sizes[2] == sizes[3]
