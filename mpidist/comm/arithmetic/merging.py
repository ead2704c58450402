"""Merging rows: those that belong to one row of an array are added up, always in the same order."""

from __future__ import annotations

import numpy as np

from mpidist.arrays import AnyArray

# So many occurrences of a row are added one vector operation each; what is left, of rows that come more often, by
# `np.add.at`: two to four times slower for each, but independent of how often the commonest row comes.
VECTOR_ROUNDS = 8


def merge_rows(indices: AnyArray, values: AnyArray, index: int = 0, parts: int = 1) -> tuple[AnyArray, AnyArray]:
    """Local. The sum of the values of each row, in the order in which they stand; half precision adds in float32.

    Args:
        indices: Shape (n,), integers, in any order, and any number of times each.
        values: Shape (n, width).
        index: Which part of the rows is wanted; only its sums are computed.
        parts: Into so many the rows, sorted, are cut.

    Returns:
        Part `index` of the rows, sorted and each of them once, and their sums in the dtype of `values`: new arrays.
    """
    order = np.argsort(indices, kind="stable")
    ordered = indices[order]
    starts = np.flatnonzero(np.concatenate([np.ones(min(1, len(order)), bool), ordered[1:] != ordered[:-1]]))
    stops = np.append(starts[1:], len(order))
    part = slice(len(starts) * index // parts, len(starts) * (index + 1) // parts)
    starts, counts = starts[part], (stops - starts)[part]
    rows = ordered[starts]
    sums = values[order[starts]]
    if not len(rows) or int(counts.max()) == 1:
        return rows, sums
    # A sum that is not finite is the caller's to see: scaled losses make some.
    with np.errstate(over="ignore", invalid="ignore"):
        return rows, _add_others(sums, starts, counts, order, values)


def _add_others(
    sums: AnyArray, starts: AnyArray, counts: AnyArray, order: AnyArray, values: AnyArray
) -> AnyArray:
    """Add all but the first occurrence of each row to `sums`, which holds the first."""
    is_half = sums.dtype.itemsize == 2 and sums.dtype.kind not in "iu"
    wide = sums.astype(np.float32) if is_half else sums
    for occurrence in range(1, min(int(counts.max()), VECTOR_ROUNDS)):
        chosen = np.flatnonzero(counts > occurrence)
        wide[chosen] += values[order[starts[chosen] + occurrence]]
    late = np.flatnonzero(counts > VECTOR_ROUNDS)
    if len(late):
        positions = np.concatenate([np.arange(starts[i] + VECTOR_ROUNDS, starts[i] + counts[i]) for i in late])
        np.add.at(wide, np.repeat(late, counts[late] - VECTOR_ROUNDS), values[order[positions]].astype(wide.dtype))
    return wide.astype(sums.dtype, copy=False)
