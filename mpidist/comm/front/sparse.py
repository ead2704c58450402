"""Reduction of sparse arrays: the rows of all ranks are gathered, and added up on request."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mpidist.arrays import AnyArray, as_bytes
from mpidist.comm.arithmetic.combine import is_half
from mpidist.comm.arithmetic.exact import halves, is_checked, joined, narrowed
from mpidist.comm.collective import Collective, check_reducible
from mpidist.comm.first_use import at_first_use
from mpidist.comm.group.agreement import same_on_all
from mpidist.indexed_slices import IndexedSlices
from mpidist.options import ReduceOp

if TYPE_CHECKING:
    from mpidist.comm.arithmetic.rows import merge_rows
else:
    merge_rows = at_first_use("mpidist.comm.arithmetic.rows", "merge_rows")

# Indices of rows, shape (n,), 64-bit integers; and the rows' values, shape (n, ...).
IndexedRows = tuple[AnyArray, AnyArray]
# A message consists of 64-bit numbers: its length in numbers, the checksum of the description that all ranks share, the
# count of rows of each table, all indices, and then the values of the packed tables, padded to a whole number.
_NUMBER = np.dtype(np.int64)
# The numbers before the counts: the length and the checksum.
_FIXED = 2
# Tables up to this many bytes of values are packed into the message, since copies into and out of it are faster than
# further messages. Larger copies need memory that the system provides again, page by page, at every call: five tables
# of 100 KB took five times as long packed as alone.
_PACKED_BYTES = 1 << 17


def reduce_slices(
    collective: Collective, op: ReduceOp, slices: IndexedSlices, *, merge: bool = False, densify: bool = False
) -> IndexedSlices:
    """Collective. Gather the rows of all ranks in the order of the ranks, or add up the rows of each index.

    Args:
        collective: The collective of these ranks.
        op: The operation: SUM, or MEAN, which divides the rows by the number of ranks; the MEAN of integers is float64.
        slices: This rank's rows, any number of them.
        merge: Whether to add up rows of the same index, in the order of the ranks and, within a rank, in the given
            order. Half precision adds in float32.
        densify: Whether to add up rows as with `merge`, and, where the ranks have mostly the same indices, to
            all-reduce the rows of all indices as one array, which then moves fewer bytes. Sums are in the order of the
            collective.

    Returns:
        All rows; with `merge` or `densify` one row for each index, sorted. Indices are 64-bit. The same bits on every
        rank.

    Raises:
        OverflowError: A sum of integers does not fit their dtype; on every rank.
        ValueError: `op` is neither SUM nor MEAN.
        TypeError: The dtype cannot be added.
        MismatchError: Operations, dense shapes, dtypes or shapes of rows differ between ranks.
    """
    check_slices(slices, op)
    row_shape = slices.values.shape[1:]
    values = slices.values.reshape(len(slices.values), math.prod(row_shape))
    values = values.astype(values.dtype.newbyteorder("="), copy=False)
    described = (op.name, slices.dense_shape, row_shape, values.dtype.name, merge, densify)
    subject = "the operation, dense shape, row shape and dtype of IndexedSlices"
    if op is ReduceOp.MEAN and values.dtype.kind in "iu":
        # Converted before they are added: sums of small integers may not fit their dtype.
        values = values.astype(np.float64)
    dtype, width = values.dtype, values.shape[1]
    is_wide = (merge or densify) and is_checked(dtype, op)
    if is_wide:
        values = np.concatenate(halves(np.ascontiguousarray(values.astype(f"{dtype.kind}8"))), axis=1)
    mine = (slices.indices.astype(np.int64), values)
    if densify:
        indices, values = _reduce_union(collective, mine, subject, described)
    else:
        indices, values = gather_rows(collective, [mine], subject, described)[0]
        if merge:
            indices, values = merge_rows(indices, values)
    if is_wide:
        sums = joined(np.stack([values[:, :width], values[:, width:]]), np.dtype(f"{dtype.kind}8"))
        values = narrowed(sums, dtype, op)
    if op is ReduceOp.MEAN:
        # Halves in float32: a half may not hold the number of ranks, and ml_dtypes 0.5 divides no bfloat16 by an int.
        wide = values.astype(np.float32) if is_half(values.dtype) else values
        values = np.true_divide(wide, collective.communicator.size, dtype=wide.dtype).astype(values.dtype, copy=False)
    return IndexedSlices(values.reshape(len(indices), *row_shape), indices, slices.dense_shape)


def check_slices(slices: IndexedSlices, op: ReduceOp) -> None:
    """Local. Raise TypeError or ValueError if `op` is not defined for these rows."""
    if op not in (ReduceOp.SUM, ReduceOp.MEAN):
        raise ValueError(f"IndexedSlices are reduced by SUM or MEAN, got {op.name}: reduce their `to_dense()` instead")
    check_reducible(slices.values, op)


def gather_rows(
    collective: Collective, tables: Sequence[IndexedRows], subject: str, described: object = None
) -> list[IndexedRows]:
    """Collective. Gather the rows of all ranks in the order of the ranks. Small tables go in one message.

    Args:
        collective: The collective of these ranks.
        tables: This rank's rows of each table, any number of them. Dtypes, and shapes apart from the numbers of rows,
            must be the same on every rank: the caller either knows that they are or puts them into `described`.
        subject: A name for `described`, used in the error.
        described: A value that must be the same on all ranks; comparable, readable when printed.

    Returns:
        The rows of each table, as new arrays.

    Raises:
        MismatchError: `described` differs between ranks.
    """
    values = [rows[1].astype(rows[1].dtype.newbyteorder("="), copy=False) for rows in tables]
    header = np.array([0, zlib.crc32(repr(described).encode()), *[len(rows[0]) for rows in tables]], _NUMBER)
    numbers = np.concatenate([header, *[rows[0] for rows in tables]])
    sizes = [array.nbytes for array in values]
    packed = [as_bytes(np.ascontiguousarray(array)) for array, fits in zip(values, _fit(sizes), strict=True) if fits]
    message = numbers.view(np.uint8)
    if packed:
        rest = np.zeros(-sum(array.size for array in packed) % _NUMBER.itemsize, np.uint8)
        message = np.concatenate([message, *packed, rest])
    message.view(_NUMBER)[0] = message.size // _NUMBER.itemsize
    row_bytes = [array.itemsize * math.prod(array.shape[1:]) for array in values]
    checksums, indices, packed_values = _split(collective.all_gather(message), row_bytes)
    if any(checksum != header[1] for checksum in checksums):
        same_on_all(collective.communicator, subject, described, "Only the number of rows may differ.")
    results: list[IndexedRows] = []
    for array, numbers_of_all, values_of_all in zip(values, indices, packed_values, strict=True):
        rows = np.concatenate(numbers_of_all)
        if len(values_of_all) == len(checksums):
            results.append((rows, np.concatenate(values_of_all).view(array.dtype).reshape(len(rows), *array.shape[1:])))
        else:
            # Some rank has too many values to pack. All ranks must take part in this call, so those that have packed
            # theirs send them once more.
            results.append((rows, collective.all_gather(array)))
    return results


def _reduce_union(collective: Collective, mine: IndexedRows, subject: str, described: object) -> IndexedRows:
    """The rows of all ranks, each index once, with sums made by the algorithm that moves fewer bytes."""
    indices, values = merge_rows(*mine)
    everyones = gather_rows(collective, [(indices, values[:, :0])], subject, described)[0][0]
    union = np.unique(everyones)
    # In a ring each of n ranks sends (n - 1)/n of the bytes in a gather, and twice that in an all-reduce.
    if len(everyones) <= 2 * len(union):
        return merge_rows(everyones, collective.all_gather(values))
    laid_out = np.zeros((len(union), values.shape[1]), values.dtype)
    laid_out[np.searchsorted(union, indices)] = values
    return union, collective.all_reduce(laid_out)


def _fit(sizes: Sequence[int]) -> list[bool]:
    """Whether each table's values, of these sizes in bytes, are packed: in turn, those that fit into the rest."""
    left, fits = _PACKED_BYTES, []
    for size in sizes:
        fits.append(size <= left)
        left -= size * fits[-1]
    return fits


def _split(
    gathered: AnyArray, row_bytes: Sequence[int]
) -> tuple[list[int], list[list[AnyArray]], list[list[AnyArray]]]:
    """The checksums of all ranks; for each table their indices; and the bytes of the values that they have packed."""
    checksums: list[int] = []
    indices: list[list[AnyArray]] = [[] for _ in row_bytes]
    values: list[list[AnyArray]] = [[] for _ in row_bytes]
    numbers = gathered.view(_NUMBER)
    begin = 0
    while begin < len(numbers):
        at = begin + _FIXED + len(row_bytes)
        length, checksum, *counts = numbers[begin:at].tolist()
        checksums.append(checksum)
        for table, count in zip(indices, counts, strict=True):
            table.append(numbers[at : at + count])
            at += count
        place = at * _NUMBER.itemsize
        # The tables that a rank has packed follow from its counts of rows.
        sizes = [count * width for count, width in zip(counts, row_bytes, strict=True)]
        for table, size, fits in zip(values, sizes, _fit(sizes), strict=True):
            if fits:
                table.append(gathered[place : place + size])
                place += size
        begin += length
    return checksums, indices, values
