"""The gradient of one variable, dense or sparse, on its way into the memory that is reduced."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mpidist.indexed_slices import IndexedSlices
from mpidist.variables.mirrored import MirroredVariable
from mpidist.variables.variable import AnyArray

Gradient = npt.ArrayLike | IndexedSlices


def write_gradient(view: AnyArray, gradient: Gradient, variable: MirroredVariable) -> None:
    """Local. Set `view` to a gradient; rows that a sparse one names twice are added up.

    Args:
        view: Shape and dtype of the variable.
        gradient: In its shape, or rows of it.
        variable: For which it is.

    Raises:
        ValueError: Another shape, or rows that the variable has not.
        TypeError: A dtype that does not cast.
    """
    if gradient is view:
        return
    if not isinstance(gradient, IndexedSlices):
        np.copyto(view, variable.coerce(gradient))
        return
    rows = _checked_rows(gradient, variable)
    view[...] = 0
    np.add.at(view, gradient.indices, rows)


def to_dense(gradient: Gradient, variable: MirroredVariable) -> AnyArray:
    """Local. The gradient as an array of the variable's shape and dtype; see `write_gradient`."""
    if not isinstance(gradient, IndexedSlices):
        return variable.coerce(gradient)
    dense = np.zeros(variable.shape, variable.dtype)
    write_gradient(dense, gradient, variable)
    return dense


def _checked_rows(gradient: IndexedSlices, variable: MirroredVariable) -> AnyArray:
    values, indices = gradient.values, gradient.indices
    if not variable.shape or values.shape[1:] != variable.shape[1:]:
        raise ValueError(
            f"variable {variable.name!r}: expected rows of an array of shape {variable.shape}, got IndexedSlices with "
            f"values of shape {values.shape}"
        )
    if indices.size and not 0 <= int(indices.min()) <= int(indices.max()) < variable.shape[0]:
        raise ValueError(
            f"variable {variable.name!r}: expected indices from 0 to {variable.shape[0] - 1}, got "
            f"{int(indices.min())} to {int(indices.max())}"
        )
    if not np.can_cast(values.dtype, variable.dtype, "same_kind"):
        raise TypeError(
            f"variable {variable.name!r}: expected rows of dtype {variable.dtype}, got {values.dtype}; convert them "
            f"with .astype({variable.dtype.name!r}) if that is meant"
        )
    return values.astype(variable.dtype, copy=False)
