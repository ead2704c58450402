"""The combination of a node's arrays: in the order of the ranks or of the tree, compiled where that pays."""

from __future__ import annotations

from collections.abc import Sequence

from mpidist.arrays import AnyArray
from mpidist.comm.arithmetic.combine import combine
from mpidist.comm.arithmetic.compiled_sums import CompiledSum, in_order
from mpidist.comm.arithmetic.tree_order import combine_in_tree, pairs_of_leaves
from mpidist.options import ReduceOp

_SUMS = (ReduceOp.SUM, ReduceOp.MEAN)


class Combination:
    """Combines one array of each of a node's ranks.

    Args:
        rank_count: The number of the ranks.
        in_tree: Whether to combine in the tree order.

    Attributes:
        is_in_order: Whether the order is that of the ranks. With two ranks that of the tree is the same.
        changes_sources: Whether `combine` may change the arrays that it combines.
    """

    def __init__(self, rank_count: int, *, in_tree: bool) -> None:
        self.is_in_order = not in_tree or rank_count == 2
        self.changes_sources = in_tree
        self._by_numpy = combine_in_tree if in_tree else combine
        self._sum = CompiledSum(pairs_of_leaves if in_tree else in_order, rank_count)

    def combine(self, sources: Sequence[AnyArray], out: AnyArray, op: ReduceOp) -> None:
        """Local. Combine arrays of one shape into another one; see the function `combine`."""
        if op not in _SUMS or not self._sum.add(sources, out):
            self._by_numpy(sources, out, op)

    def add_to_all(self, arrays: Sequence[AnyArray], op: ReduceOp) -> bool:
        """Local. Add up arrays that do not overlap, and store the sum to all of them; see `CompiledSum.add_to_all`."""
        return op in _SUMS and self._sum.add_to_all(arrays)
