"""The tree of a node's ranks, in which each rank looks at a few others instead of at all.

Where every rank looks at every other one, a node's work grows with the square of its ranks.
"""

from __future__ import annotations

# Up to this many ranks each look at all others: a tree of them has two levels, and a message must pass each of these
# twice.
MOST_FLAT = 8
# The number of children of every rank but the leaves. 256 ranks are three levels below the first one.
_ARITY = 8


def is_flat(size: int) -> bool:
    """Local. Whether each rank of a node with `size` ranks looks at all others."""
    return size <= MOST_FLAT


def parent_of(place: int) -> int | None:
    """Local. The parent of a rank by its number on the node; None for the first one."""
    return (place - 1) // _ARITY if place else None


def children_of(place: int, size: int) -> range:
    """Local. The children of a rank by their numbers on the node, which has `size` ranks."""
    first = _ARITY * place + 1
    return range(min(first, size), min(first + _ARITY, size))
