"""Reduction of sparse arrays: rows of all ranks are gathered, and added up on request."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence

import numpy as np

from mpidist.comm.agreement import same_on_all
from mpidist.comm.collective import AnyArray, Collective, check_reducible
from mpidist.comm.merging import merge_rows
from mpidist.indexed_slices import IndexedSlices
from mpidist.options import ReduceOp

# Indices, shape (n,), 64-bit integers; and their values, shape (n, ...).
Rows = tuple[AnyArray, AnyArray]
# A message begins with its length in bytes, the checksum of what must be the same on all ranks, whether the values are
# in it, and the tables' counts of rows.
_HEADER = np.dtype(np.int64)
_FIXED = 3
# Of values up to so many bytes, copies into and out of the message cost less than messages of their own.
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
    collective: Collective, tables: Sequence[Rows], subject: str, described: object = None
) -> list[Rows]:
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
    indices = [rows[0] for rows in tables]
    values = [rows[1].astype(rows[1].dtype.newbyteorder("="), copy=False) for rows in tables]
    is_packed = sum(array.nbytes for array in values) <= _PACKED_BYTES
    bodies = [_as_bytes(array) for array in (*indices, *(values if is_packed else ()))]
    header = np.array([0, zlib.crc32(repr(described).encode()), is_packed, *map(len, indices)], _HEADER)
    header[0] = header.nbytes + sum(body.size for body in bodies)
    messages = _split(collective.all_gather(np.concatenate([header.view(np.uint8), *bodies])))
    if any(checksum != header[1] for _, checksum, _ in messages):
        same_on_all(collective.communicator, subject, described, "Only the number of rows may differ.")
    received = [message for message, _, _ in messages]
    if all(has_values for _, _, has_values in messages):
        joined = _unpack(received, len(indices), [*indices, *values])
        return list(zip(joined[: len(indices)], joined[len(indices) :], strict=True))
    # Some rank has much to send; those who have packed a little send it once more.
    gathered = [collective.all_gather(array) for array in values]
    return list(zip(_unpack(received, len(indices), indices), gathered, strict=True))


def _reduce_union(collective: Collective, mine: Rows, subject: str, described: object) -> Rows:
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


def _split(gathered: AnyArray) -> list[tuple[AnyArray, int, int]]:
    """The messages of the ranks, with checksum and whether values are in it."""
    messages: list[tuple[AnyArray, int, int]] = []
    at = 0
    while at < len(gathered):
        length, checksum, has_values = gathered[at : at + _FIXED * _HEADER.itemsize].view(_HEADER).tolist()
        messages.append((gathered[at : at + length], checksum, has_values))
        at += length
    return messages


def _unpack(messages: Sequence[AnyArray], table_count: int, likes: Sequence[AnyArray]) -> list[AnyArray]:
    """All ranks' arrays one after another; `likes` are this rank's indices of all tables, and perhaps the values."""
    parts: list[list[AnyArray]] = [[] for _ in likes]
    row_bytes = [like.itemsize * math.prod(like.shape[1:]) for like in likes]
    begin = (_FIXED + table_count) * _HEADER.itemsize
    for message in messages:
        counts = message[:begin].view(_HEADER).tolist()[_FIXED:]
        at = begin
        for number, like in enumerate(likes):
            count = counts[number % table_count]
            stop = at + count * row_bytes[number]
            parts[number].append(message[at:stop].view(like.dtype).reshape(count, *like.shape[1:]))
            at = stop
    return [np.concatenate(part) for part in parts]


def _as_bytes(array: AnyArray) -> AnyArray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
