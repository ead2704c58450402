"""The tree order: numbered arrays are combined in pairs, the results in pairs again, and so on up to one.

A node of the tree combines the leaves [number * 2**level, (number + 1) * 2**level). If only one child of a node exists,
the node is equal to it. The bits of the result therefore depend on the leaves alone: neither on the distribution of
the leaves over ranks nor on the partial sums that a rank has made of its own leaves.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mpidist.arrays import AnyArray
from mpidist.comm.arithmetic.combine import FUNCTIONS, is_half
from mpidist.options import ReduceOp

# The size of a block of a row. The blocks of all rows should stay in a cache while they are combined.
BLOCK_BYTES = 1 << 15


class TreeNode(NamedTuple):
    """A node of the tree.

    Attributes:
        level: The height above the leaves, 0 for a leaf.
        number: The place of the node on its level.
    """

    level: int
    number: int


def subtrees(start: int, stop: int) -> list[TreeNode]:
    """Local. The shortest list of nodes that cover the leaves [start, stop), from left to right."""
    nodes: list[TreeNode] = []
    while start < stop:
        fits = (stop - start).bit_length() - 1
        level = fits if start == 0 else min(fits, (start & -start).bit_length() - 1)
        nodes.append(TreeNode(level, start >> level))
        start += 1 << level
    return nodes


def pairing(nodes: Sequence[TreeNode]) -> list[tuple[int, int]]:
    """Local. The order in which nodes are combined.

    Args:
        nodes: The nodes from left to right; no node is above another.

    Returns:
        Pairs (left, right) of positions in `nodes`. Each result is stored at `left`, the last one at position 0.
    """
    pairs: list[tuple[int, int]] = []
    present: dict[int, int] = {}
    level = 0
    while len(present) > 1 or any(node.level >= level for node in nodes):
        present.update({node.number: position for position, node in enumerate(nodes) if node.level == level})
        parents: dict[int, int] = {}
        for number, position in sorted(present.items()):
            if number // 2 in parents:
                pairs.append((parents[number // 2], position))
            else:
                parents[number // 2] = position
        present = parents
        level += 1
    return pairs


def leaves(count: int) -> list[TreeNode]:
    """Local. The nodes of `count` leaves."""
    return [TreeNode(0, number) for number in range(count)]


# An overflow gives an infinity in silence, as it does where MPI adds. A warning would come on one rank only.
@np.errstate(all="ignore")
def combine_pairs(rows: Sequence[AnyArray], pairs: Sequence[tuple[int, int]], op: ReduceOp) -> AnyArray:
    """Local. Combine flat arrays of one size and dtype in the order of `pairing`. Changes the arrays.

    Returns:
        The first array, which holds the result.
    """
    function = FUNCTIONS[op]
    length = max(1, BLOCK_BYTES // rows[0].itemsize)
    for begin in range(0, rows[0].size, length):
        blocks = [row[begin : begin + length] for row in rows]
        for left, right in pairs:
            function(blocks[left], blocks[right], out=blocks[left])
    return rows[0]


def combine_in_tree(sources: Sequence[AnyArray], out: AnyArray, op: ReduceOp) -> None:
    """Local. `combine` in the tree order, half precision in float32 with one rounding. May change the sources."""
    rows = [source.astype(np.float32) for source in sources] if is_half(out.dtype) else sources
    result = combine_pairs(rows, pairs_of_leaves(len(sources)), op)
    if result is not out:
        out[...] = result


@functools.cache
def pairs_of_leaves(count: int) -> tuple[tuple[int, int], ...]:
    """Local. The order in which `count` leaves are combined, see `pairing`."""
    return tuple(pairing(leaves(count)))
