"""Top-k compression: each rank sends its largest elements and keeps the others for later."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpidist.arguments import number, python_numbers
from mpidist.arrays import AnyArray
from mpidist.comm.collective import Collective
from mpidist.comm.compression.compression import ERROR, CompressionState, is_compressible, with_error

# Below this size of a gradient, starting a message takes as long as sending its bytes.
_LEAST_BYTES = 1 << 12


@dataclass(frozen=True)
class TopK:
    """Local. Sums of each rank's elements of largest magnitude. The other elements are added to its next gradient.

    This is the sparsification of A. Aji and K. Heafield (Sparse Communication for Distributed Gradient Descent, 2017),
    on which Deep Gradient Compression (Y. Lin and others, 2018) builds; the latter's momentum correction is not done.
    Each rank sends to every other one the fraction `ratio` of its elements, each with a 32-bit index (64-bit in arrays
    of 2**32 elements and more). With n ranks it pays for ratios below about 1 / n.

    Args:
        ratio: The fraction of elements that is sent, above 0 and up to 1; at least one element is sent.

    Raises:
        ValueError: `ratio` is out of range.
    """

    ratio: float

    def __post_init__(self) -> None:
        if not 0 < number("ratio", self.ratio) <= 1:
            raise ValueError(f"`ratio` must be above 0 and at most 1, got {self.ratio!r}")
        python_numbers(self)

    def count(self, size: int) -> int:
        """Local. The number of elements that a rank sends of an array of `size` elements."""
        return min(size, max(1, math.ceil(self.ratio * size)))

    def compresses(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> bool:
        """Local. See `Compression.compresses`: arrays from 4 KB on."""
        return is_compressible(dtype) and math.prod(shape) * dtype.itemsize >= _LEAST_BYTES

    def all_reduce(self, collective: Collective, gradient: AnyArray, state: CompressionState) -> None:
        """Collective. See `Compression.all_reduce`."""
        rest = with_error(gradient, state).reshape(-1)
        index_dtype = np.dtype(np.uint32 if rest.size < 2**32 else np.uint64)
        chosen = self._largest(rest)
        with np.errstate(over="ignore", invalid="ignore"):
            sent = rest[chosen].astype(gradient.dtype)
            # For half precision the error of rounding also stays in the rest.
            rest[chosen] -= sent.astype(rest.dtype)
        message = np.concatenate([chosen.astype(index_dtype).view(np.uint8), sent.view(np.uint8)])
        total = np.zeros_like(rest)
        # Added in the order of the ranks, so that every rank gets the same bits.
        for got in collective.all_gather(message.reshape(1, -1)):
            cut = len(chosen) * index_dtype.itemsize
            with np.errstate(over="ignore", invalid="ignore"):
                total[got[:cut].view(index_dtype)] += got[cut:].view(gradient.dtype).astype(rest.dtype)
        with np.errstate(over="ignore", invalid="ignore"):
            gradient[...] = total.reshape(gradient.shape)
        if np.isfinite(gradient).all():
            state[ERROR] = rest.reshape(gradient.shape)

    def _largest(self, values: AnyArray) -> AnyArray:
        """The indices of the largest values, in rising order. NaN counts as largest."""
        count = self.count(values.size)
        if count == values.size:
            return np.arange(values.size)
        return np.sort(np.argpartition(np.abs(values), values.size - count)[values.size - count :])
