"""Half precision in updates: float16 and bfloat16 are numbers of parameters and gradients, never of state.

The arithmetic is that of float32, and the parameter is rounded after each update. A second moment has the square of a
gradient's range and small steps: in float16 it would overflow at 256, and in bfloat16 it would stop changing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from mpidist.arrays import AnyArray
from mpidist.comm.arithmetic.combine import is_half
from mpidist.variables.update.kernel import Update

# The slot of the float32 copy of a variable, after all other slots.
MASTER_COPY = "master_copy"

# The scratch blocks beyond the kernel's: the parameter and the gradient in float32.
_WIDE_BLOCKS = 2


def state_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Local. The dtype of an optimizer's state, and of its arithmetic, for variables of a dtype."""
    return np.dtype(np.float32) if is_half(dtype) else dtype


def scratch_blocks(count: int, length: int, dtype: np.dtype[Any], xp: Any = np) -> list[AnyArray]:
    """Local. The scratch blocks of updates.

    Args:
        count: See `UpdateArithmetic.scratch_count`.
        length: The length of each.
        dtype: The dtype of the parameters.
        xp: NumPy or CuPy.
    """
    more = _WIDE_BLOCKS if is_half(dtype) else 0
    return [xp.empty(length, state_dtype(dtype)) for _ in range(count + more)]


def in_float32(update: Update, slot_count: int, *, has_master: bool) -> Update:
    """Local. An update of blocks in float32, for parameters of half precision, too.

    Args:
        update: An update of blocks of one dtype.
        slot_count: The number of slots that it gets.
        has_master: Whether one more slot follows these, for the float32 copy of the parameter.

    Returns:
        An update whose slots and scratch are float32 where the parameter is of half precision; its scratch is that of
        `scratch_blocks`. The gradient is of the parameter's dtype, or float32. Other blocks are updated as before.
    """

    def widened(
        parameter: AnyArray, gradient: AnyArray, slots: Sequence[AnyArray], scratch: Sequence[AnyArray]
    ) -> None:
        if not is_half(parameter.dtype):
            update(parameter, gradient, slots, scratch)
            return
        own, wide = scratch[-2], scratch[-1]
        if has_master:
            own = slots[slot_count]
            # A program may have assigned to the variable, or restored it alone.
            np.copyto(own, parameter, where=own.astype(parameter.dtype) != parameter)
        else:
            np.copyto(own, parameter)
        if gradient.dtype == own.dtype:
            wide = gradient
        else:
            np.copyto(wide, gradient)
        update(own, wide, slots[:slot_count], scratch[:-_WIDE_BLOCKS])
        np.copyto(parameter, own, casting="unsafe")

    return cast(Update, widened)
