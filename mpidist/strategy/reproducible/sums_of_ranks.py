"""The sum of all ranks' rows in the order of a fixed tree."""

from __future__ import annotations

import numpy as np

from mpidist.arrays import AnyArray
from mpidist.comm.arithmetic.slices import even_sizes, slices_of
from mpidist.comm.arithmetic.tree_order import TreeNode, combine_pairs, pairing
from mpidist.comm.backends.tree import GATHERED_BYTES, TreeBackend
from mpidist.comm.front.front import CollectiveFront
from mpidist.options import ReduceOp


def sum_rows(
    collective: CollectiveFront, rows: list[AnyArray], nodes: list[list[TreeNode]], total: AnyArray
) -> None:
    """Collective. Add up the rows of all ranks, one for each of their nodes, into `total`.

    There are four algorithms. All make the additions of the same tree, and so give the same bits; they differ in the
    number of messages and bytes.

    Args:
        collective: The collective of the ranks.
        rows: This rank's rows.
        nodes: The nodes of each rank.
        total: The memory for the sum.
    """
    communicator = collective.communicator
    pairs = pairing([node for own in nodes for node in own])
    if communicator.size == 1:
        total[...] = combine_pairs(rows, pairs, ReduceOp.SUM)
        return
    one_each = all(len(own) == 1 for own in nodes)
    if isinstance(collective.backend, TreeBackend) and one_each and pairs == collective.backend.pairs:
        # For example 8 logical replicas on 2, 4 or 8 ranks: the rest of the tree is the tree over the ranks.
        total[...] = rows[0]
        collective.all_reduce(total, in_place=True)
        return
    row_count = sum(len(own) for own in nodes)
    if total.nbytes * row_count <= GATHERED_BYTES:
        # Small rows: every rank gets all of them in one call, and adds them up itself.
        mine = np.concatenate([np.empty(0, total.dtype), *rows])
        gathered = collective.all_gather(mine).reshape(row_count, total.size)
        total[...] = combine_pairs(list(gathered), pairs, ReduceOp.SUM)
        return
    # Large rows: each rank gets one slice of all rows and adds it up, then the ranks gather the slices.
    counts = even_sizes(total.size, communicator.size)
    empty = np.empty(0, total.dtype)
    sent = [np.concatenate([empty, *(row[piece] for row in rows)]) for piece in slices_of(counts)]
    width = counts[communicator.rank]
    received = [
        row for got, own in zip(collective.all_to_all(sent), nodes, strict=True)
        for row in got.reshape(len(own), width)
    ]
    total[...] = collective.all_gather(combine_pairs(received, pairs, ReduceOp.SUM))
