"""The tree order: whatever is added up in advance, the bits are those of the whole tree."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from mpidist.arrays import AnyArray
from mpidist.comm.arithmetic.tree_order import TreeNode, combine_pairs, leaves, pairing, subtrees
from mpidist.options import ReduceOp


def whole_tree(arrays: list[AnyArray], low: int, high: int) -> AnyArray:
    """By definition: [low, high) is halved, high - low being a power of two; what is not there has no part."""
    if high - low == 1:
        return arrays[low]
    middle = (low + high) // 2
    left = whole_tree(arrays, low, middle)
    return left if middle >= len(arrays) else left + whole_tree(arrays, middle, high)


@pytest.mark.parametrize("count", range(1, 10))
def test_all_ways_to_deal_out_leaves_give_the_same_bits(count: int) -> None:
    values = [np.array([x, -x / 3, 1e8 * x], np.float32) for x in np.random.default_rng(count).normal(size=count)]
    expected = whole_tree(values, 0, 1 << (count - 1).bit_length())
    for cuts in itertools.product([False, True], repeat=count - 1):
        # Each way to cut the leaves into runs that follow one another.
        edges = [0, *(place for place, is_cut in enumerate(cuts, 1) if is_cut), count]
        nodes: list[TreeNode] = []
        rows: list[AnyArray] = []
        for start, stop in itertools.pairwise(edges):
            for node in subtrees(start, stop):
                held = values[node.number << node.level : (node.number + 1) << node.level]
                own = pairing(leaves(len(held)))
                rows.append(combine_pairs([value.copy() for value in held], own, ReduceOp.SUM))
                nodes.append(node)
        result = combine_pairs(rows, pairing(nodes), ReduceOp.SUM)
        assert result.tobytes() == expected.tobytes(), (count, edges)


def test_the_order_shows_in_the_bits() -> None:
    values = [np.array([x], np.float32) for x in (2.0**24, 1.0, 1.0, 1.0)]
    in_order = values[0] + values[1] + values[2] + values[3]
    in_tree = combine_pairs([value.copy() for value in values], pairing(leaves(4)), ReduceOp.SUM)
    assert in_tree[0] != in_order[0]
    assert in_tree[0] == 2**24 + 2


@pytest.mark.parametrize(("start", "stop"), [(0, 8), (1, 8), (3, 6), (5, 5), (6, 7), (1000, 1777)])
def test_subtrees_cover_the_leaves_and_are_few(start: int, stop: int) -> None:
    nodes = subtrees(start, stop)
    spans = [(node.number << node.level, (node.number + 1) << node.level) for node in nodes]
    assert [leaf for low, high in spans for leaf in range(low, high)] == list(range(start, stop))
    assert len(nodes) <= 2 * max(1, (stop - start).bit_length())


def test_blocks_do_not_change_the_result() -> None:
    rows = [np.random.default_rng(n).normal(size=100_003).astype(np.float32) for n in range(5)]
    expected = ((rows[0] + rows[1]) + (rows[2] + rows[3])) + rows[4]
    assert combine_pairs([row.copy() for row in rows], pairing(leaves(5)), ReduceOp.SUM).tobytes() == expected.tobytes()
    product = ((rows[0] * rows[1]) * (rows[2] * rows[3])) * rows[4]
    assert combine_pairs(rows, pairing(leaves(5)), ReduceOp.PROD).tobytes() == product.tobytes()
