"""The reading of saved values: what a rank reads must fit the variable, before ranks write together."""

from __future__ import annotations

import numpy as np

from mpidist.arrays import AnyArray
from mpidist.comm.group.agreement import together
from mpidist.variables.variable import BaseVariable, Read


def read_together(variable: BaseVariable, read: Read, start: int, stop: int) -> AnyArray:
    """Collective. The elements of a variable that this rank asks for, one-dimensional, in host memory.

    Args:
        variable: The variable.
        read: See `BaseVariable.load`.
        start: The start of the first element.
        stop: Behind the last one.

    Raises:
        Exception: What `read` raises on any rank, on every rank.
        ValueError: Another number of elements, on any rank.
        TypeError: A dtype that does not cast, on any rank.
    """
    def read_and_check() -> AnyArray:
        data = np.asarray(read(start, stop))
        if data.size != stop - start or not np.can_cast(data.dtype, variable.saved_dtype, "same_kind"):
            kind = ValueError if data.size != stop - start else TypeError
            raise kind(
                f"variable {variable.name!r}: reading the elements [{start}, {stop}) must give {stop - start} values "
                f"that cast to {variable.saved_dtype}, got {data.size} of {data.dtype}. Check what `read` returns"
            )
        return data.reshape(-1)

    return together(variable.group, f"reading variable {variable.name!r}", read_and_check)
