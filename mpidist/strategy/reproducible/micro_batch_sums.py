"""The results of a rank's micro-batches: flat rows, added up in a fixed tree. Nothing here communicates."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpidist import tree
from mpidist.arrays import AnyArray
from mpidist.comm.arithmetic.combine import is_half
from mpidist.comm.arithmetic.exact import halves, is_checked, joined, narrowed
from mpidist.comm.arithmetic.tree_order import TreeNode, combine_pairs
from mpidist.comm.collective import check_reducible
from mpidist.options import ReduceOp
from mpidist.strategy.values import as_array

# Shape and dtype of each leaf of a result; None for a leaf that is None.
Layout = list[tuple[tuple[int, ...], np.dtype[Any]] | None]


class MicroBatchResults:
    """The results of `fn` for a rank's micro-batches, as one flat row per dtype; siblings in the tree are added up.

    A sum is made as soon as both siblings are there. So a rank keeps only a few rows, and the order of the additions
    depends on the numbers of the micro-batches alone, not on the rank that computed them.

    Attributes:
        layout: Shapes and dtypes of the leaves of a result.
        spec: The structure of a result.
    """

    def __init__(self) -> None:
        self.layout: Layout = []
        self.spec: Any = None
        self._nodes: list[TreeNode] = []
        self._rows: list[dict[np.dtype[Any], AnyArray]] = []

    def add(self, node: TreeNode, result: Any) -> None:
        """Local. Add the result of one micro-batch, which is a leaf of the tree.

        Raises:
            ValueError: The result has another structure, or other shapes or dtypes, than that of another micro-batch.
            TypeError: The result holds values that cannot be added.
        """
        leaves, spec = tree.flatten(result)
        arrays = [None if leaf is None else as_array(leaf) for leaf in leaves]
        layout: Layout = [None if one is None else (one.shape, one.dtype.newbyteorder("=")) for one in arrays]
        for array in arrays:
            if array is not None:
                check_reducible(array, ReduceOp.SUM)
        if self._nodes and (layout, spec) != (self.layout, self.spec):
            raise ValueError(
                "gradients: `fn` must return the same structure, shapes and dtypes for every micro-batch, got "
                f"{_described(self.layout)} and then {_described(layout)}. Sum over the rows of a micro-batch in `fn`"
            )
        self.layout, self.spec = layout, spec
        row = {
            dtype: np.concatenate([
                _flat(one) for one in arrays if one is not None and _added_in(one.dtype) == dtype
            ])
            for dtype in flat_sizes(layout)
        }
        self._nodes.append(node)
        self._rows.append(row)
        while len(self._nodes) > 1 and _are_siblings(self._nodes[-2], self._nodes[-1]):
            right, last = self._nodes.pop(), self._rows.pop()
            for dtype, values in self._rows[-1].items():
                combine_pairs([values, last[dtype]], [(0, 1)], ReduceOp.SUM)
            self._nodes[-1] = TreeNode(right.level + 1, right.number // 2)

    def rows(self, dtype: np.dtype[Any]) -> list[AnyArray]:
        """Local. One row for each of this rank's `subtrees`."""
        return [row[dtype] for row in self._rows]


def flat_sizes(layout: Layout) -> dict[np.dtype[Any], int]:
    """Local. The dtypes in which leaves are added up, in the order of the leaves, with their numbers of elements."""
    sizes: dict[np.dtype[Any], int] = {}
    for leaf in layout:
        if leaf is not None:
            dtype = _added_in(leaf[1])
            sizes[dtype] = sizes.get(dtype, 0) + _flat_size(*leaf)
    return sizes


def unpack(layout: Layout, sums: dict[np.dtype[Any], AnyArray]) -> list[Any]:
    """Local. The leaves of the sum, cut out of the flat sums and rounded to their own dtypes.

    Raises:
        OverflowError: Integers do not fit their dtype; on every rank.
    """
    places = dict.fromkeys(sums, 0)
    leaves: list[Any] = []
    for leaf in layout:
        if leaf is None:
            leaves.append(None)
            continue
        shape, dtype = leaf
        low = places[_added_in(dtype)]
        places[_added_in(dtype)] = high = low + _flat_size(shape, dtype)
        total = sums[_added_in(dtype)][low:high]
        if is_checked(dtype, ReduceOp.SUM):
            whole = joined(total.reshape(2, *shape), np.dtype(f"{dtype.kind}8"))
            leaves.append(narrowed(whole, dtype, ReduceOp.SUM)[()])
            continue
        with np.errstate(over="ignore"):
            leaves.append(total.reshape(shape).astype(dtype, copy=False)[()])
    return leaves


def _are_siblings(left: TreeNode, right: TreeNode) -> bool:
    return left.level == right.level and left.number % 2 == 0 and right.number == left.number + 1


def _added_in(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype of the sum: half precision is added up in float32 and rounded once, integers as two halves each."""
    if is_checked(dtype, ReduceOp.SUM):
        return np.dtype(np.int64)
    return np.dtype(np.float32) if is_half(dtype) else dtype.newbyteorder("=")


def _flat(array: AnyArray) -> AnyArray:
    """The part of a leaf that is added up, flat."""
    if is_checked(array.dtype, ReduceOp.SUM):
        array = halves(np.ascontiguousarray(array, f"{array.dtype.kind}8"))
    return array.reshape(-1).astype(_added_in(array.dtype), copy=False)


def _flat_size(shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    return (2 if is_checked(dtype, ReduceOp.SUM) else 1) * int(np.prod(shape, dtype=np.int64))


def _described(layout: Layout) -> str:
    return ", ".join("None" if leaf is None else f"{leaf[1]}{list(leaf[0])}" for leaf in layout) or "nothing"
