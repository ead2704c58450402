"""The tree order: numbered arrays are combined in pairs, these in pairs again, whoever holds which of them.

A node of the tree stands for the leaves [number * 2**level, (number + 1) * 2**level). A leaf that is not there has no
part in the sum: its sibling goes up as it is. So the bits of the result depend on the leaves alone, neither on how they
are dealt out to ranks nor on which partial sums a rank has made of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mpidist.arrays import AnyArray
from mpidist.comm.arithmetic.combine import FUNCTIONS, is_half
from mpidist.options import ReduceOp

# All rows' pieces should stay in a cache while they are combined.
BLOCK_BYTES = 1 << 15


class Node(NamedTuple):
    """A node of the tree.

    Attributes:
        level: 0 for a leaf.
        number: Of the node among those of its level.
    """

    level: int
    number: int


def subtrees(start: int, stop: int) -> list[Node]:
    """Local. The fewest nodes that stand for the leaves [start, stop), from left to right."""
    nodes: list[Node] = []
    while start < stop:
        fits = (stop - start).bit_length() - 1
        level = fits if start == 0 else min(fits, (start & -start).bit_length() - 1)
        nodes.append(Node(level, start >> level))
        start += 1 << level
    return nodes


def pairing(nodes: Sequence[Node]) -> list[tuple[int, int]]:
    """Local. In which order some nodes are combined.

    Args:
        nodes: From left to right, none above another.

    Returns:
        Positions in `nodes`: (left, right) says that `left` takes the result of both. In the end position 0 has all.
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


def leaves(count: int) -> list[Node]:
    """Local. The nodes of `count` leaves."""
    return [Node(0, number) for number in range(count)]


# An overflow is an infinity, as it is where MPI adds; no warning on one rank.
@np.errstate(all="ignore")
def combine_pairs(rows: Sequence[AnyArray], pairs: Sequence[tuple[int, int]], op: ReduceOp) -> AnyArray:
    """Local. Combine flat arrays of one size and dtype in the order of `pairing`; changes them.

    Returns:
        The first of them, which has the result.
    """
    function = FUNCTIONS[op]
    length = max(1, BLOCK_BYTES // rows[0].itemsize)
    for begin in range(0, rows[0].size, length):
        pieces = [row[begin : begin + length] for row in rows]
        for left, right in pairs:
            function(pieces[left], pieces[right], out=pieces[left])
    return rows[0]


def combine_in_tree(parts: Sequence[AnyArray], out: AnyArray, op: ReduceOp) -> None:
    """Local. `combine` in the order of the tree, halves in float32 with one rounding; may change the parts."""
    rows = [part.astype(np.float32) for part in parts] if is_half(out.dtype) else parts
    result = combine_pairs(rows, _pairs_of_leaves(len(parts)), op)
    if result is not out:
        out[...] = result


@functools.cache
def _pairs_of_leaves(count: int) -> list[tuple[int, int]]:
    return pairing(leaves(count))
