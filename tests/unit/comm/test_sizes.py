"""The sizes of the automatic collective, by rules."""

from __future__ import annotations

from mpidist.comm.choice.sizes import NEVER, ring_begins, sizes_for


def test_ranks_that_outnumber_cores_use_node_memory_for_small_arrays_on_one_node_only() -> None:
    enough = sizes_for(4, 2, 64, is_open_mpi=False)
    one, two = ([sizes_for(4, nodes, 2, is_open_mpi=is_it) for is_it in (False, True)] for nodes in (1, 2))
    assert one[0].node_from == 0 < one[1].node_from < enough.node_from < two[0].node_from < two[1].node_from < NEVER
    assert "more ranks than cores" in one[0].reason


def test_a_ring_pays_where_the_number_of_nodes_is_no_power_of_two() -> None:
    assert [count for count in range(1, 20) if ring_begins(count) == NEVER] == [1, 2, 4, 8, 16]
    # Each rank sends messages of `bytes / nodes`, which must not become small.
    assert {ring_begins(count) // count for count in (3, 5, 12, 100)} == {1 << 16}
    for cores in (2, 64):
        sizes = {nodes: sizes_for(4, nodes, cores, is_open_mpi=False).ring_from for nodes in (1, 2, 3)}
        assert sizes == {1: NEVER, 2: NEVER, 3: 3 << 16}


def test_two_ranks_always_use_node_memory() -> None:
    sizes = [
        sizes_for(ranks, 1, 64, is_open_mpi=is_it).node_from for ranks in (2, 3) for is_it in (False, True)
    ]
    assert sizes[0] == sizes[1] == 0 < sizes[2] == sizes[3]
