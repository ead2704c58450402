"""Barriers in the tree of a node's ranks, and the comparison of calls there, in many orders of their steps."""

from __future__ import annotations

import pytest

from mpidist.comm.calls.rank_tree import children_of, is_flat, parent_of
from mpidist.comm.calls.wide_page import WidePage
from tests.model.barriers import BARRIER_MUTANTS, Tree, go_one_way
from tests.model.parties import BrokenError

TREES = {
    "few": Tree(3, 6), "two levels": Tree(11), "awake": Tree(11, sleeps=False), "three levels": Tree(75, 1),
    "calls of few": Tree(3, 6, kind=WidePage), "calls": Tree(11, 4, kind=WidePage),
}


@pytest.mark.parametrize("size", [1, 2, 9, 10, 73, 74, 256])
def test_every_rank_but_the_first_is_the_child_of_its_parent(size: int) -> None:
    children = [child for place in range(size) for child in children_of(place, size)]
    assert children == [*range(1, size)]
    assert all(place in children_of(parent_of(place) or 0, size) for place in range(1, size))
    assert parent_of(0) is None
    assert is_flat(size) == (size <= 8)


@pytest.mark.parametrize("tree", TREES)
def test_ranks_meet_and_hear_the_same(tree: str) -> None:
    for seed in range(6 if TREES[tree].size > 11 else 60):
        go_one_way(TREES[tree], seed)


@pytest.mark.parametrize("mutant", BARRIER_MUTANTS)
def test_a_fault_is_found(mutant: str) -> None:
    rule, tree = BARRIER_MUTANTS[mutant]

    def explore() -> None:
        for seed in range(400):
            go_one_way(tree, seed)

    with pytest.raises(BrokenError, match=f"^{rule}: "):
        explore()
