"""PowerSGD: a matrix is sent as two thin factors, which one step of a power iteration improves at each call."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpidist.arguments import python_numbers, whole
from mpidist.arrays import AnyArray
from mpidist.comm.collective import Collective
from mpidist.comm.compression.compression import ERROR, CompressionState, is_compressible, with_error
from mpidist.options import ReduceOp

# A matrix is compressed if its factors are smaller at least by this factor.
_LEAST_SAVING = 2
# The size of a block of the product of two factors, which should stay in a cache.
_BLOCK_BYTES = 1 << 18


@dataclass(frozen=True)
class PowerSGD:
    """Local. Sums of gradients in low rank. The error is added to the next gradient.

    T. Vogels, S. P. Karimireddy, M. Jaggi: PowerSGD: Practical Low-Rank Gradient Compression, 2019, Algorithms 1
    and 2, with a warm start. A gradient of more than two dimensions is taken as the matrix with the smallest sum of
    rows and columns. Ranks all-reduce rank * (rows + columns) elements instead of rows * columns. Vectors, and matrices
    that would not shrink to half, are sent as they are.

    Args:
        rank: The rank of the approximation, at least 1.
        start_step: Number of sums of each gradient that are exact at the beginning, when gradients change fast.
        seed: The seed of the first factor; the same on every rank.

    Raises:
        ValueError: A number is out of range.
        TypeError: A number is no integer.
    """

    rank: int = 1
    start_step: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("rank", 1), ("start_step", 0), ("seed", 0)):
            whole(name, getattr(self, name), least=least)
        python_numbers(self)

    def compresses(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> bool:
        """Local. See `Compression.compresses`."""
        rows, columns = matrix_shape(shape)
        # A matrix without elements is no larger than its factors, and has no rows to make them of.
        return (
            is_compressible(dtype) and rows * columns > 0
            and _LEAST_SAVING * self.rank * (rows + columns) <= rows * columns
        )

    def all_reduce(self, collective: Collective, gradient: AnyArray, state: CompressionState) -> None:
        """Collective. See `Compression.all_reduce`."""
        step = int(state.get("step", 0))
        if step < self.start_step:
            collective.all_reduce(gradient, ReduceOp.SUM, in_place=True)
            state["step"] = np.asarray(step + 1)
            return
        shape = matrix_shape(gradient.shape)
        matrix = with_error(gradient, state).reshape(shape)
        start = self._start(shape, matrix.dtype)
        right = state.get("factor", start)
        if right.shape != start.shape:
            # The factor comes from a checkpoint with another rank of approximation. The error fits any rank.
            right = start
        # Factors are kept as rows. The ranks exchange nothing but these two sums.
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            left = collective.all_reduce(right @ matrix.T)
            left = _orthonormal(left) if np.isfinite(left).all() else np.full_like(left, np.nan)
            mine = left @ matrix
            right = collective.all_reduce(mine)
            _multiply(left, right, gradient.reshape(shape))
        if not np.isfinite(gradient).all():
            # All ranks return here: their results have the same bits.
            return
        matrix -= left.T @ mine
        state[ERROR] = matrix.reshape(gradient.shape)
        # A direction that has become zero, as all do under a gradient of zeros, would stay zero.
        lost = ~right.any(axis=1)
        right[lost] = start[lost]
        state["factor"] = right

    def _start(self, shape: tuple[int, int], dtype: np.dtype[Any]) -> AnyArray:
        drawn = np.random.default_rng(self.seed).standard_normal((min(self.rank, *shape), shape[1]))
        return drawn.astype(dtype)


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Local. Rows and columns of an array taken as a matrix with the smallest sum of both."""
    if not shape:
        return 1, 1
    cuts = [(math.prod(shape[:at]), math.prod(shape[at:])) for at in range(1, max(2, len(shape)))]
    return min(cuts, key=sum)


def _orthonormal(rows: AnyArray) -> AnyArray:
    """Orthogonal rows of length 1 that span the same space as `rows`. A row that adds no direction becomes zero.

    Elementwise products and NumPy's sums have the same bits on processors of any kind. BLAS has not, and is not used.
    """
    tiny = float(np.finfo(rows.dtype).eps)
    result = rows.astype(np.promote_types(rows.dtype, np.float64))
    for at in range(len(result)):
        row = result[at]
        row /= np.abs(row).max() or 1
        length = np.sqrt(np.add.reduce(row * row))
        # Orthogonalizing twice is enough (W. Kahan, in B. Parlett, The Symmetric Eigenvalue Problem, 1980).
        for earlier in itertools.chain(result[:at], result[:at]):
            row -= np.add.reduce(row * earlier) * earlier
        rest = np.sqrt(np.add.reduce(row * row))
        row *= 1 / rest if rest > tiny * length else 0
    return result.astype(rows.dtype)


def _multiply(left: AnyArray, right: AnyArray, out: AnyArray) -> None:
    """Compute `out` = left.T @ right elementwise, in a fixed order, with the same bits on processors of any kind."""
    length = max(1, _BLOCK_BYTES // max(1, right[0].nbytes))
    for low in range(0, len(out), length):
        block = left[:, low : low + length, None]
        total = block[0] * right[0]
        product = np.empty_like(total)
        for column, row in zip(block[1:], right[1:], strict=True):
            np.multiply(column, row, out=product)
            total += product
        out[low : low + length] = total
