"""The gradients of a step, dense or sparse: how they are checked, converted and written to a plan."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence

import numpy as np

from mpidist import arrays
from mpidist.arrays import AnyArray
from mpidist.comm.arithmetic.rows import merge_rows
from mpidist.comm.group.agreement import same_on_all
from mpidist.comm.group.communicator import Communicator
from mpidist.indexed_slices import IndexedSlices
from mpidist.variables.kinds.mirrored import MirroredVariable
from mpidist.variables.scatter import require_rows
from mpidist.variables.variable import BaseVariable, Gradient


def write_gradient(view: AnyArray, gradient: Gradient, variable: MirroredVariable) -> None:
    """Local. Set `view` to a gradient; rows that a sparse one names twice are added up.

    Args:
        view: An array of the variable's shape and dtype.
        gradient: An array of the same shape, or rows of it.
        variable: The variable of the gradient.

    Raises:
        ValueError: The gradient has another shape, or rows that the variable does not have.
        TypeError: A dtype that does not cast.
    """
    if gradient is view:
        return
    if type(gradient) is type(view) and gradient.shape == view.shape and gradient.dtype == view.dtype:
        # An array of the view's own kind, by far the most frequent gradient, needs no conversion.
        np.copyto(view, gradient)
        return
    if not isinstance(gradient, IndexedSlices):
        np.copyto(view, variable.coerce(gradient))
        return
    require_rows(variable, gradient)
    view[...] = 0
    xp = variable.arena.namespace
    values = gradient.values.astype(variable.dtype, copy=False)
    indices, sums = merge_rows(gradient.indices, values.reshape(len(values), math.prod(view.shape[1:])))
    view[arrays.move(indices, xp)] = arrays.move(sums.reshape(len(sums), *view.shape[1:]), xp)


def take_rows(gradient: Gradient, variable: BaseVariable) -> tuple[AnyArray, AnyArray]:
    """Local. Indices and values of the gradient of a variable that was made with `sparse_gradient=True`.

    Raises:
        ValueError: Rows of another shape, or rows that the variable does not have.
        TypeError: The gradient is dense, or its dtype does not cast.
    """
    if not isinstance(gradient, IndexedSlices):
        raise TypeError(
            f"variable {variable.name!r} was made with sparse_gradient=True: expected IndexedSlices as its gradient, "
            f"got {type(gradient).__name__} of shape {np.shape(gradient)}; pass the rows that have a gradient, or make "
            "the variable without sparse_gradient"
        )
    require_rows(variable, gradient)
    return gradient.indices, gradient.values.astype(variable.dtype, copy=False)


def copy_of(gradient: Gradient) -> Gradient:
    """Local. The same gradient in memory of its own."""
    if isinstance(gradient, IndexedSlices):
        return IndexedSlices(gradient.values.copy(), gradient.indices, gradient.dense_shape)
    copied: AnyArray = arrays.as_array(gradient).copy()
    return copied


def require_same_gradients(
    communicator: Communicator, gradients: Mapping[int, Gradient] | None, variables: Sequence[MirroredVariable]
) -> None:
    """Collective. Raise MismatchError unless all ranks pass the same values, as sums over the replicas are.

    Args:
        communicator: The ranks.
        gradients: The gradients by number, if they are sums already; None for gradients that are still to be summed, on
            every rank alike.
        variables: The variables that the numbers index.
    """
    same_on_all(
        communicator, "the gradients given with skip_gradients_aggregation=True (checksums)",
        "to be summed" if gradients is None else
        {f"{number}: {variables[number].name}": _checksum(gradient) for number, gradient in gradients.items()},
        "Sum them over the replicas first, as Strategy.gradients and all_reduce do, or leave the argument out.",
    )


def _checksum(gradient: Gradient) -> str:
    held = (gradient.indices, gradient.values) if isinstance(gradient, IndexedSlices) else (gradient,)
    return " ".join(f"{zlib.crc32(arrays.to_host(arrays.as_array(one)).tobytes()):#x}" for one in held)


def to_dense(gradient: Gradient, variable: MirroredVariable) -> AnyArray:
    """Local. The gradient as an array of the variable's shape and dtype; see `write_gradient`."""
    if not isinstance(gradient, IndexedSlices):
        return variable.coerce(gradient)
    dense: AnyArray = variable.arena.namespace.zeros(variable.shape, variable.dtype)
    write_gradient(dense, gradient, variable)
    return dense
