"""Compression: ranks sum their gradients approximately, send fewer bytes, and send the rest later.

Each rank keeps the error of its gradient, the part that it has not sent, and adds it to its next gradient (error
feedback: F. Seide and others, 1-Bit Stochastic Gradient Descent, 2014). Over many steps the applied sums therefore add
up to the true ones. The errors belong to the caller: the classes here hold parameters only and may be shared.
`variables/step/compressed_step.py` saves the errors in checkpoints and restores them on another number of ranks.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from mpidist.arrays import AnyArray
from mpidist.comm.arithmetic.combine import is_half
from mpidist.comm.collective import Collective, check_in_place
from mpidist.options import ReduceOp

# The arrays that a rank keeps for one gradient from step to step, by name. `ERROR` has the gradient's shape and differs
# between ranks; all other arrays are the same on every rank.
CompressionState = dict[str, AnyArray]
ERROR = "error"


class Compression(Protocol):
    """An approximate sum of gradients. Every rank makes the same calls and gets the same bits."""

    def compresses(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> bool:
        """Local. Whether compression pays for gradients of this shape and dtype. Others are all-reduced as they are."""
        ...

    def all_reduce(self, collective: Collective, gradient: AnyArray, state: CompressionState) -> None:
        """Collective. Sum the gradients of all ranks, in place.

        Args:
            collective: The collective of these ranks.
            gradient: The gradient, C-contiguous, of a floating dtype; of the same shape and dtype on every rank. It
                gets the result. If the result is not finite, it is so on every rank, and `state` stays as if the call
                had not been made.
            state: The state of this gradient: empty at first, then as the last call has left it. `state[ERROR]` is this
                rank's own, in float32 for half precision and otherwise in the gradient's dtype; the caller may have
                changed it. All other arrays are the same on every rank. Arrays are replaced, not written to.
        """
        ...


def with_error(gradient: AnyArray, state: CompressionState) -> AnyArray:
    """Local. The sum of the gradient and its error: a new array of its shape, half precision in float32.

    Raises:
        ValueError: `gradient` is not contiguous or not writable.
        TypeError: `gradient` is not of a floating dtype.
    """
    check_in_place(gradient, ReduceOp.SUM)
    if not is_compressible(gradient.dtype):
        raise TypeError(f"only gradients of a floating dtype can be compressed, got {gradient.dtype}")
    total = gradient.astype(np.float32 if is_half(gradient.dtype) else gradient.dtype)
    if ERROR in state:
        # No warning here: all ranks see in the result that it is not finite.
        with np.errstate(over="ignore", invalid="ignore"):
            total += state[ERROR]
    return total


def is_compressible(dtype: np.dtype[Any]) -> bool:
    """Local. Whether the dtype is a real floating dtype."""
    return dtype.kind == "f" or is_half(dtype)
