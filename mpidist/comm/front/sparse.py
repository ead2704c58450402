"""Reduction of sparse arrays: rows of all ranks are gathered, and added up on request."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence

import numpy as np

from mpidist.arrays import AnyArray, as_bytes
from mpidist.comm.agreement import same_on_all
from mpidist.comm.arithmetic.merging import merge_rows
from mpidist.comm.collective import Collective, check_reducible
from mpidist.indexed_slices import IndexedSlices
from mpidist.options import ReduceOp

# Indices, shape (n,), 64-bit integers; and their values, shape (n, ...).
IndexedRows = tuple[AnyArray, AnyArray]
# A message is its length in numbers, the checksum of what must be the same on all ranks, the tables' counts of rows,
# all indices, and the bytes of those tables' values that are packed, filled up to a whole number.
_NUMBER = np.dtype(np.int64)
_FIXED = 2
# Tables are packed as far as so many bytes of values go: copies into and out of the message cost less than messages of
# their own. Beyond it copies land in memory that the system gives anew, page by page, at every call: packed, five
# tables of 100 KB took five times as long as alone.
_PACKED_BYTES = 1 << 17


def reduce_slices(
    collective: Collective, op: ReduceOp, slices: IndexedSlices, *, merge: bool = False, densify: bool = False
) -> IndexedSlices:
    """Collective. The rows of all ranks, one after another in the order of the ranks, or each of them once.

    Args:
        collective: Over the ranks.
        op: SUM, or MEAN, which divides the rows by the number of ranks; of integers it is float64.
        slices: This rank's rows, any number of them.
        merge: Rows named more than once are added up, in the order of the ranks and then as each rank gives them; half
            precision adds in float32.
        densify: As `merge`, and where the ranks name much the same rows, the rows that any of them names are laid out
            as one array and all-reduced, which then moves fewer bytes. Sums are in the order of the collective.

    Returns:
        All rows; with `merge` or `densify` each that some rank names once, and sorted. Indices are 64-bit. The same
        bits on every rank.

    Raises:
        ValueError: Another operation.
        TypeError: A dtype that cannot be added.
        MismatchError: The operations, the dense shapes, the dtypes or the shapes of rows differ.
    """
    if op not in (ReduceOp.SUM, ReduceOp.MEAN):
        raise ValueError(f"IndexedSlices are reduced by SUM or MEAN, got {op.name}; use their `to_dense()`")
    check_reducible(slices.values, op)
    row_shape = slices.values.shape[1:]
    values = slices.values.reshape(len(slices.values), math.prod(row_shape))
    values = values.astype(values.dtype.newbyteorder("="), copy=False)
    described = (op.name, slices.dense_shape, row_shape, values.dtype.name, merge, densify)
    subject = "the operation, dense shape, row shape and dtype of IndexedSlices"
    if op is ReduceOp.MEAN and values.dtype.kind in "iu":
        # Before they are added: sums of small integers may not fit their dtype.
        values = values.astype(np.float64)
    mine = (slices.indices.astype(np.int64), values)
    if densify:
        indices, values = _reduce_union(collective, mine, subject, described)
    else:
        indices, values = gather_rows(collective, [mine], subject, described)[0]
        if merge:
            indices, values = merge_rows(indices, values)
    if op is ReduceOp.MEAN:
        values = np.true_divide(values, collective.communicator.size, dtype=values.dtype)
    return IndexedSlices(values.reshape(len(indices), *row_shape), indices, slices.dense_shape)


def gather_rows(
    collective: Collective, tables: Sequence[IndexedRows], subject: str, described: object = None
) -> list[IndexedRows]:
    """Collective. The rows of all ranks, one after another in the order of the ranks; small tables go in one message.

    Args:
        collective: Over the ranks.
        tables: This rank's rows of each table, any number of them. Dtypes and shapes apart from the numbers of rows are
            the same on every rank: the caller knows so, or says them in `described`.
        subject: What `described` is, for the error.
        described: What must be the same on all ranks; comparable, readable when printed.

    Returns:
        For each table new arrays.

    Raises:
        MismatchError: `described` differs.
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
    checksums, indices, parts = _split(collective.all_gather(message), row_bytes)
    if any(checksum != header[1] for checksum in checksums):
        same_on_all(collective.communicator, subject, described, "Only the number of rows may differ.")
    results: list[IndexedRows] = []
    for array, numbers_of_all, values_of_all in zip(values, indices, parts, strict=True):
        rows = np.concatenate(numbers_of_all)
        if len(values_of_all) == len(checksums):
            results.append((rows, np.concatenate(values_of_all).view(array.dtype).reshape(len(rows), *array.shape[1:])))
        else:
            # Some rank has much to send; those who have packed a little send it once more.
            results.append((rows, collective.all_gather(array)))
    return results


def _reduce_union(collective: Collective, mine: IndexedRows, subject: str, described: object) -> IndexedRows:
    """Each row that some rank names once; the sums by whichever way moves fewer bytes."""
    indices, values = merge_rows(*mine)
    everyones = gather_rows(collective, [(indices, values[:, :0])], subject, described)[0][0]
    union = np.unique(everyones)
    # In ring algorithms a rank sends (n - 1)/n of what is gathered, and twice that of what is all-reduced.
    if len(everyones) <= 2 * len(union):
        return merge_rows(everyones, collective.all_gather(values))
    laid_out = np.zeros((len(union), values.shape[1]), values.dtype)
    laid_out[np.searchsorted(union, indices)] = values
    return union, collective.all_reduce(laid_out)


def _fit(sizes: Sequence[int]) -> list[bool]:
    """Which tables' values are packed, by their bytes: one after another, each that fits in what is left."""
    room, fits = _PACKED_BYTES, []
    for size in sizes:
        fits.append(size <= room)
        room -= size * fits[-1]
    return fits


def _split(
    gathered: AnyArray, row_bytes: Sequence[int]
) -> tuple[list[int], list[list[AnyArray]], list[list[AnyArray]]]:
    """The checksums of all ranks, and for each table their indices and the bytes of what values they have packed."""
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
        # What a rank has packed follows from its counts.
        sizes = [count * width for count, width in zip(counts, row_bytes, strict=True)]
        for table, size, fits in zip(values, sizes, _fit(sizes), strict=True):
            if fits:
                table.append(gathered[place : place + size])
                place += size
        begin += length
    return checksums, indices, values
