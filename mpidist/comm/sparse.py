"""Reduction of sparse arrays: rows are gathered, merged on request, and made dense where that is smaller."""

from __future__ import annotations

import numpy as np

from mpidist.comm.agreement import same_on_all
from mpidist.comm.collective import Collective, check_reducible
from mpidist.indexed_slices import IndexedSlices
from mpidist.options import ReduceOp


def reduce_slices(collective: Collective, op: ReduceOp, slices: IndexedSlices) -> IndexedSlices:
    """Collective. The rows of all ranks, one after another in the order of the ranks; a row may occur more than once.

    Args:
        collective: Over the ranks.
        op: SUM, or MEAN, which divides the rows by the number of ranks; of integers it is float64.
        slices: This rank's rows, any number of them.

    Returns:
        All rows, with 64-bit indices.

    Raises:
        ValueError: Another operation.
        TypeError: A dtype that cannot be added.
        MismatchError: The dense shapes, the dtypes or the shapes of rows differ.
    """
    if op not in (ReduceOp.SUM, ReduceOp.MEAN):
        raise ValueError(f"IndexedSlices are reduced by SUM or MEAN, got {op.name}; use their `to_dense()`")
    check_reducible(slices.values, op)
    same_on_all(
        collective.communicator, "the dense shape, row shape and dtype of IndexedSlices",
        (slices.dense_shape, slices.values.shape[1:], slices.values.dtype.name),
        "Only the number of rows may differ.",
    )
    values = collective.all_gather(slices.values)
    indices = collective.all_gather(slices.indices.astype(np.int64))
    if op is ReduceOp.MEAN:
        size = collective.communicator.size
        values = np.true_divide(values, size, dtype=np.float64 if values.dtype.kind in "iu" else values.dtype)
    return IndexedSlices(values, indices, slices.dense_shape)


