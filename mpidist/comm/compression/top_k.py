"""Top-k compression: each rank sends its largest elements, and keeps the others for later."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpidist.arrays import AnyArray
from mpidist.comm.collective import Collective
from mpidist.comm.compression.compression import ERROR, CompressionState, is_compressible, with_error

# Below it a message costs as much as its bytes.
_LEAST_BYTES = 1 << 12


@dataclass(frozen=True)
class TopK:
    """Sums of the elements that are largest in magnitude on each rank; the others are kept and added to the next ones.

    The sparsification of A. Aji and K. Heafield (Sparse Communication for Distributed Gradient Descent, 2017), which
    Deep Gradient Compression (Y. Lin and others, 2018) builds on; the latter's correction of momentum is not done. A
    rank sends, and gets from every other one, `ratio` of the elements with a 32-bit index each (64-bit in arrays of
    2**32 elements and more): it pays below a ratio of about 1 / n for n ranks.

    Args:
        ratio: Which part of the elements is sent, above 0 and up to 1; at least one element.

    Raises:
        ValueError: A ratio out of range.
    """

    ratio: float

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            raise ValueError(f"`ratio` must be above 0 and at most 1, got {self.ratio!r}")

    def count(self, size: int) -> int:
        """Local. How many of `size` elements a rank sends."""
        return min(size, max(1, math.ceil(self.ratio * size)))

    def compresses(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> bool:
        """Local. See `Compression.compresses`: arrays from 4 KB on."""
        return is_compressible(dtype) and math.prod(shape) * dtype.itemsize >= _LEAST_BYTES

    def all_reduce(self, collective: Collective, gradient: AnyArray, memory: CompressionState) -> None:
        """Collective. See `Compression.all_reduce`."""
        rest = with_error(gradient, memory).reshape(-1)
        index_dtype = np.dtype(np.uint32 if rest.size < 2**32 else np.uint64)
        chosen = self._largest(rest)
        with np.errstate(over="ignore", invalid="ignore"):
            sent = rest[chosen].astype(gradient.dtype)
            # Of halves the rounding is left for later, too.
            rest[chosen] -= sent.astype(rest.dtype)
        message = np.concatenate([chosen.astype(index_dtype).view(np.uint8), sent.view(np.uint8)])
        total = np.zeros_like(rest)
        # One after another in the order of the ranks: the same bits everywhere.
        for got in collective.all_gather(message.reshape(1, -1)):
            cut = len(chosen) * index_dtype.itemsize
            with np.errstate(over="ignore", invalid="ignore"):
                total[got[:cut].view(index_dtype)] += got[cut:].view(gradient.dtype).astype(rest.dtype)
        with np.errstate(over="ignore", invalid="ignore"):
            gradient[...] = total.reshape(gradient.shape)
        if np.isfinite(gradient).all():
            memory[ERROR] = rest.reshape(gradient.shape)

    def _largest(self, values: AnyArray) -> AnyArray:
        """Where the largest values stand, in order; what is not a number counts as largest."""
        count = self.count(values.size)
        if count == values.size:
            return np.arange(values.size)
        return np.sort(np.argpartition(np.abs(values), values.size - count)[values.size - count :])
