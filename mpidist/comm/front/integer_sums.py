"""Sums and products of integers in the front: an overflow of the dtype is an error on every rank.

No rank may detect it alone. Every rank has the whole result in a wider form, and none needs a further message:

- Up to 2,048 integers of up to 32 bits are combined in 32 or 64 bits: one message, as without the check.
- Up to 2,048 integers of 64 bits have one element more, which says whether some rank's are too large to be safe: the
  largest magnitude times the number of ranks may not fit. Only then they are combined once more, in a wider form.
- Of more integers the ranks agree on this by one small message before, and combine them as they are. If some rank's are
  too large, they are combined in the wider form block by block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from mpidist import arrays
from mpidist.arrays import AnyArray
from mpidist.comm.arithmetic import exact
from mpidist.comm.arithmetic.slices import cut_by_length, slices_of
from mpidist.comm.backend import Backend
from mpidist.options import ReduceOp

# Up to this many integers, in their wider form, a message takes hardly longer than an agreement on fewer bytes.
SMALL = 1 << 11
# The number of integers that are combined in the wider form at once.
BLOCK = 1 << 17
_SUM = ReduceOp.SUM


class IntegerSums:
    """SUM and PROD of flat integers of a native dtype over a backend; the methods of `Backend`.

    Args:
        backend: The backend that combines over several ranks.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._communicator = backend.communicator
        self._size = backend.communicator.size

    def all_reduce(self, source: AnyArray, total: AnyArray, op: ReduceOp) -> None:
        """Collective. See `Backend.all_reduce`.

        Raises:
            OverflowError: A result does not fit; on every rank. `total` is then undefined.
        """
        if source.size <= SMALL:
            total[...] = self._small(source, op)
        elif self._are_safe(source, op):
            self._backend.all_reduce(source, total, op)
        else:
            for piece, result in self._pieces(source, op):
                total[piece] = result

    def reduce(self, source: AnyArray, total: AnyArray, op: ReduceOp, root: int) -> None:
        """Collective. See `Backend.reduce`; every rank raises the root's error.

        Raises:
            OverflowError: See `all_reduce`.
        """
        is_root = self._communicator.rank == root
        if source.size <= SMALL:
            result = self._small(source, op)
            if is_root:
                total[...] = result
        elif self._are_safe(source, op):
            self._backend.reduce(source, total, op, root)
        else:
            for piece, result in self._pieces(source, op):
                if is_root:
                    total[piece] = result

    def reduce_scatter(self, source: AnyArray, mine: AnyArray, counts: Sequence[int], op: ReduceOp) -> None:
        """Collective. See `Backend.reduce_scatter`; every rank raises the error of any slice.

        Raises:
            OverflowError: See `all_reduce`.
        """
        own = slices_of(counts)[self._communicator.rank]
        if source.size <= SMALL:
            mine[...] = self._small(source, op)[own]
        elif self._are_safe(source, op):
            self._backend.reduce_scatter(source, mine, counts, op)
        else:
            for piece, result in self._pieces(source, op):
                low, high = max(piece.start, own.start), min(piece.stop, own.stop)
                if low < high:
                    mine[low - own.start : high - own.start] = result[low - piece.start : high - piece.start]

    def all_reduce_parts(self, found: list[AnyArray], dtype: np.dtype[Any], op: ReduceOp) -> AnyArray:
        """Collective. Combine integers that each rank has combined itself; these results need not fit the dtype.

        Args:
            found: The parts of `exact.parts_along`, at least one element; they are overwritten.
            dtype: The dtype of the integers, native.
            op: SUM or PROD.

        Returns:
            The integers, the same on every rank.

        Raises:
            OverflowError: A result does not fit; on every rank.
        """
        if op is _SUM and found[0].nbytes > SMALL * np.dtype(np.int64).itemsize:
            # In their own dtype they are half as many bytes, or fewer.
            own = exact.small_enough(found[0], dtype, self._size)
            self._communicator.order.show_call()
            if not self._communicator.all_reduce_max(int(own is None)) and own is not None:
                flat = own.reshape(-1)
                self._backend.all_reduce(flat, flat, op)
                return own
        return self._whole(found, dtype, op)

    def open_small(
        self, op: ReduceOp, dtype: np.dtype[Any], shape: tuple[int, ...]
    ) -> Callable[[AnyArray], AnyArray] | None:
        """Local, or Collective as `all_reduce` is. See `Backend.open_small`; the messages are those of `all_reduce`."""
        size = math.prod(shape)
        if size > SMALL:
            return None
        if dtype.itemsize < np.dtype(np.int64).itemsize:
            wide = exact.wide_dtype(dtype, op, self._size)
            inside = self._backend.open_small(op, wide, shape)
            return None if inside is None else lambda source: exact.narrowed(inside(source.astype(wide)), dtype, op)
        told = self._backend.open_small(op, dtype, (size + 1,))
        if told is None:
            return None

        def combine_small(source: AnyArray) -> AnyArray:
            flat = source.reshape(-1)
            result: AnyArray = self._checked(told(self._telling(flat, op)), flat, op).reshape(shape)
            return result

        return combine_small

    def _small(self, source: AnyArray, op: ReduceOp) -> AnyArray:
        if source.itemsize < np.dtype(np.int64).itemsize:
            return self._combined(source, op)
        message = self._telling(source, op)
        self._backend.all_reduce(message, message, op)
        return self._checked(message, source, op)

    def _telling(self, source: AnyArray, op: ReduceOp) -> AnyArray:
        """The integers, and one more, which stays what it is where all ranks' are safe: 0 in a sum, 1 in a product."""
        made: AnyArray = arrays.namespace(source).empty(source.size + 1, source.dtype)
        made[:-1] = source
        made[-1] = exact.fits(source, op, self._size) ^ (op is _SUM)
        return made

    def _checked(self, message: AnyArray, source: AnyArray, op: ReduceOp) -> AnyArray:
        are_safe = int(message[-1]) == (op is not _SUM)
        return message[:-1] if are_safe else self._combined(source, op)

    def _are_safe(self, source: AnyArray, op: ReduceOp) -> bool:
        self._communicator.order.show_call()
        return not self._communicator.all_reduce_max(int(not exact.fits(source, op, self._size)))

    def _pieces(self, source: AnyArray, op: ReduceOp) -> Iterator[tuple[slice, AnyArray]]:
        for piece in cut_by_length(source.size, BLOCK):
            yield piece, self._combined(source[piece], op)

    def _combined(self, source: AnyArray, op: ReduceOp) -> AnyArray:
        """The combination of all ranks' integers, made in the wider form: the same on every rank, errors, too."""
        return self._whole(exact.parts(source, op, self._size), source.dtype, op)

    def _whole(self, found: list[AnyArray], dtype: np.dtype[Any], op: ReduceOp) -> AnyArray:
        for part in found:
            flat = part.reshape(-1)
            self._backend.all_reduce(flat, flat, op)
        return exact.whole(found, dtype, op)
