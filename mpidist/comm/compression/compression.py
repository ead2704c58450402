"""Compression: gradients are summed over ranks by sending less than they are, and what was left out is sent later.

Each rank keeps what it has not sent (error feedback: F. Seide and others, 1-Bit Stochastic Gradient Descent, 2014) and
adds it to its next gradient, so that over many steps the sums that were applied add up to the true ones. What is kept
belongs to whoever reduces: the classes hold parameters only and may be shared. What a checkpoint holds of it, and what
becomes of it on another number of ranks, `variables/step/compressed_step.py` says.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from mpidist.arrays import AnyArray
from mpidist.comm.arithmetic.combine import is_half
from mpidist.comm.collective import Collective, check_in_place
from mpidist.options import ReduceOp

# What a rank keeps of one gradient from step to step, by name: under `ERROR` what it has left out, of the gradient's
# shape; all else is the same on every rank.
CompressionState = dict[str, AnyArray]
ERROR = "error"


class Compression(Protocol):
    """A way to sum gradients approximately. Every rank makes the same calls and gets the same bits."""

    def compresses(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> bool:
        """Local. Whether gradients of this shape and dtype are worth it; others are all-reduced as they are."""
        ...

    def all_reduce(self, collective: Collective, gradient: AnyArray, memory: CompressionState) -> None:
        """Collective. Sum the gradients of all ranks, in place.

        Args:
            collective: Over the ranks.
            gradient: C-contiguous, of a floating dtype; same shape and dtype on every rank. Takes the result. Where
                that is not finite, it is so on every rank, and `memory` stays as if the call had not been made.
            memory: Of this gradient, empty at first, and then what the last call left there; `memory[ERROR]` is this
                rank's own, in float32 for halves and else in the gradient's dtype, and may have been changed by others;
                all else is the same on every rank. Arrays are replaced, not written to.
        """
        ...


def with_error(gradient: AnyArray, memory: CompressionState) -> AnyArray:
    """Local. The gradient and what was left of earlier ones: a new array of its shape, halves in float32.

    Raises:
        ValueError: `gradient` is not contiguous or not writable.
        TypeError: Not of a floating dtype.
    """
    check_in_place(gradient, ReduceOp.SUM)
    if not is_compressible(gradient.dtype):
        raise TypeError(f"gradients of floating dtype can be compressed, got {gradient.dtype}")
    total = gradient.astype(np.float32 if is_half(gradient.dtype) else gradient.dtype)
    if ERROR in memory:
        # What is not finite is seen by all ranks in the result.
        with np.errstate(over="ignore", invalid="ignore"):
            total += memory[ERROR]
    return total


def is_compressible(dtype: np.dtype[Any]) -> bool:
    """Local. Whether the dtype is a real floating one."""
    return dtype.kind == "f" or is_half(dtype)
