"""Arrays as MPI takes them: C-contiguous, aligned, and of the dtype that the backend combines."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpidist.arrays import AnyArray


def is_plain(array: AnyArray) -> bool:
    """Local. Whether MPI takes the array where it is: mpi4py has no types for elements that are not aligned."""
    return bool(array.flags.c_contiguous and getattr(array.flags, "aligned", True))


def plain(xp: Any, array: AnyArray, dtype: np.dtype[Any]) -> AnyArray:
    """Local. The array, C-contiguous, aligned and of this dtype; a copy unless it is."""
    made: AnyArray = xp.ascontiguousarray(array, dtype)
    return made if is_plain(made) else made.copy()
