"""Merging rows: values for the same row of an array are added up, always in the same order."""

from __future__ import annotations

import numpy as np

from mpidist.arrays import AnyArray
from mpidist.comm.arithmetic.combine import is_half
from mpidist.comm.arithmetic.compiled_sums import add_rows

# The first occurrences of a row, so many, are added by one vector operation each. The further occurrences of more
# frequent rows are added by `np.add.at`, which takes two to four times as long for each, but whose time does not depend
# on how often the most frequent row occurs.
VECTOR_ROUNDS = 8
# From this many numbers on, they are sorted together with their places: 33,000 take 0.12 ms instead of 2.
SORTED_AS_KEYS = 300


def merge_rows(
    indices: AnyArray, values: AnyArray, slice_index: int = 0, slice_count: int = 1
) -> tuple[AnyArray, AnyArray]:
    """Local. Add up the values of each row, in the order in which they are given; half precision adds in float32.

    Args:
        indices: The numbers of the rows, integers of shape (n,). Each row may occur any number of times, in any order.
        values: The values of the rows, shape (n, width).
        slice_index: The wanted slice of the rows. Only its sums are computed.
        slice_count: The number of slices into which the sorted rows are cut.

    Returns:
        The rows of the slice, sorted and each of them once, and their sums in the dtype of `values`: new arrays.
    """
    ordered, order = _sorted(indices)
    starts = np.flatnonzero(np.concatenate([np.ones(min(1, len(order)), bool), ordered[1:] != ordered[:-1]]))
    stops = np.append(starts[1:], len(order))
    wanted = slice(len(starts) * slice_index // slice_count, len(starts) * (slice_index + 1) // slice_count)
    starts, counts = starts[wanted], (stops - starts)[wanted]
    rows = ordered[starts]
    if not len(rows) or int(counts.max()) == 1:
        return rows, values[order[starts]]
    named = slice(starts[0], starts[-1] + counts[-1])
    sums = add_rows(values, order[named], counts)
    if sums is not None:
        return rows, sums
    # The caller looks for sums that are not finite. They are expected where losses are scaled.
    with np.errstate(over="ignore", invalid="ignore"):
        return rows, _add_others(values[order[starts]], starts, counts, order, values)


def _sorted(indices: AnyArray) -> tuple[AnyArray, AnyArray]:
    """The sorted indices, and where each of them was; equal ones in their order."""
    count = len(indices)
    bits = (count - 1).bit_length()
    limit = 1 << (63 - bits)
    if count >= SORTED_AS_KEYS and indices.dtype == np.int64 and -limit <= indices.min() and indices.max() < limit:
        # No two keys are equal, so any sort will do. NumPy has fast ones for numbers, not for their places.
        keys = (indices << bits) | np.arange(count)
        keys.sort()
        return keys >> bits, keys & ((1 << bits) - 1)
    order = np.argsort(indices, kind="stable")
    return indices[order], order


def _add_others(
    sums: AnyArray, starts: AnyArray, counts: AnyArray, order: AnyArray, values: AnyArray
) -> AnyArray:
    """Add all but the first occurrence of each row to `sums`, which holds the first."""
    wide = sums.astype(np.float32) if is_half(sums.dtype) else sums
    for occurrence in range(1, min(int(counts.max()), VECTOR_ROUNDS)):
        chosen = np.flatnonzero(counts > occurrence)
        wide[chosen] += values[order[starts[chosen] + occurrence]]
    late = np.flatnonzero(counts > VECTOR_ROUNDS)
    if len(late):
        positions = np.concatenate([np.arange(starts[i] + VECTOR_ROUNDS, starts[i] + counts[i]) for i in late])
        np.add.at(wide, np.repeat(late, counts[late] - VECTOR_ROUNDS), values[order[positions]].astype(wide.dtype))
    return wide.astype(sums.dtype, copy=False)
