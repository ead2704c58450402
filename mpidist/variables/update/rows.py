"""The arithmetic of rows: an update of some rows of a parameter and of its state, in any memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from mpidist import arrays
from mpidist.arrays import AnyArray
from mpidist.comm.arithmetic.rows import merge_rows
from mpidist.variables.update.compiled import CompiledUpdate
from mpidist.variables.update.halves import scratch_blocks, state_dtype
from mpidist.variables.update.kernel import BLOCK_BYTES, GPU_BLOCK_BYTES, Update

# Numbers of rows, increasing, each of them once; and their values, one row each.
Rows = tuple[AnyArray, AnyArray]


class RowArithmetic:
    """Merges rows of gradients, and updates the same rows of a parameter and of its state.

    Rows are merged in host memory; where the parameter is on a GPU, the merged rows are then copied there.

    Args:
        parameter: Shape (rows, width), writable.
        slots: The slots of its state, each of the same shape, writable; of half precision in float32.
        scratch_count: Number of private blocks for the kernel.
        xp: The module of these arrays: NumPy or CuPy.
    """

    def __init__(self, parameter: AnyArray, slots: Sequence[AnyArray], scratch_count: int, xp: Any = np) -> None:
        count, self._width = parameter.shape
        self._dtype = parameter.dtype
        self._parameter = parameter
        self._slots = list(slots)
        self._xp = xp
        state = state_dtype(self._dtype)
        row_bytes = max(1, self._width * state.itemsize)
        self._length = max(1, BLOCK_BYTES // row_bytes if xp is np else min(GPU_BLOCK_BYTES // row_bytes, count))
        dtypes = [self._dtype, *(slot.dtype for slot in self._slots)]
        self._blocks = [xp.empty((self._length, self._width), dtype) for dtype in dtypes]
        self._scratch = scratch_blocks(scratch_count, self._length * self._width, self._dtype, xp)

    def no_rows(self) -> Rows:
        """Local. Rows of the parameter, none of them."""
        return np.empty(0, np.int64), np.empty((0, self._width), self._dtype)

    def merge(self, indices: AnyArray, values: AnyArray, index: int = 0, count: int = 1) -> Rows:
        """Local. Add up the values of rows of one number, in their order.

        Args:
            indices: The indices of the rows, shape (n,).
            values: n rows of any shape with as many elements as the parameter's rows have.
            index: The number of the part of the merged rows that is returned.
            count: The number of parts, which have nearly as many rows each.
        """
        return merge_rows(indices.astype(np.int64, copy=False), values.reshape(len(indices), self._width), index, count)

    def apply(self, merged: Rows, update: Update) -> None:
        """Local. Update these rows of the parameter and of the state."""
        if self._is_compiled(merged, update, is_aside=False):
            return
        for rows, gradient in self._pieces(merged):
            self._parameter[rows] = self._updated(rows, gradient, update).reshape(len(rows), self._width)

    def apply_aside(self, merged: Rows, update: Update) -> None:
        """Local. As `apply`, but leave the new parameters in the values of `merged`, for `write_back`.

        Only for arrays in host memory.
        """
        if self._is_compiled(merged, update, is_aside=True):
            return
        for rows, gradient in self._pieces(merged):
            np.copyto(gradient, self._updated(rows, gradient, update))

    def write_back(self, merged: Rows) -> None:
        """Local. Set the parameters to what `apply_aside` has left."""
        indices, parameters = merged
        self._parameter[indices] = parameters

    def measure(
        self, merged: Rows, measure: Callable[[AnyArray, AnyArray], Sequence[float]], count: int
    ) -> AnyArray:
        """Local. Sum up a measure of these rows.

        Args:
            merged: The rows.
            measure: A function `measure(parameter, gradient)` that returns `count` numbers for a block.
            count: The number of the numbers.

        Returns:
            Shape (count,), float64.
        """
        sums = np.zeros(count)
        for rows, gradient in self._pieces(merged):
            sums += measure(self._fetch(self._parameter, rows, 0), gradient)
        return sums

    def _is_compiled(self, merged: Rows, update: Update, *, is_aside: bool) -> bool:
        """Update all rows at once, where the update is compiled; False if nothing was done."""
        indices, values = merged
        return isinstance(update, CompiledUpdate) and update.on_rows(
            indices, self._parameter, values, self._slots, is_aside=is_aside
        )

    def _updated(self, rows: AnyArray, gradient: AnyArray, update: Update) -> AnyArray:
        """Update the state of some rows; returns their new parameters as a flat block."""
        parameter = self._fetch(self._parameter, rows, 0)
        states = tuple(self._fetch(slot, rows, 1 + i) for i, slot in enumerate(self._slots))
        update(parameter, gradient, states, tuple(scratch[: gradient.size] for scratch in self._scratch))
        for slot, block in zip(self._slots, states, strict=True):
            slot[rows] = block.reshape(len(rows), self._width)
        return parameter

    def _pieces(self, merged: Rows) -> Iterator[tuple[AnyArray, AnyArray]]:
        """Row numbers and flat gradients, in the parameter's memory; as many at a time as a block takes."""
        indices, values = merged
        for low in range(0, len(indices), self._length):
            rows, gradient = indices[low : low + self._length], values[low : low + self._length].reshape(-1)
            yield arrays.move(rows, self._xp), arrays.move(gradient, self._xp)

    def _fetch(self, source: AnyArray, rows: AnyArray, block: int) -> AnyArray:
        """Rows of an array as a flat block of their own."""
        target: AnyArray = self._blocks[block][: len(rows)]
        if self._xp is np:
            # "clip" writes straight into `out`; the indices have been checked.
            np.take(source, rows, axis=0, out=target, mode="clip")
        else:
            self._xp.take(source, rows, axis=0, out=target)
        return target.reshape(-1)
