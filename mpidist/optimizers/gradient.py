"""The gradients that an optimizer is given, dense or sparse: how they are checked, converted and written to a plan."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from mpidist import arrays, context
from mpidist.arrays import AnyArray
from mpidist.comm.agreement import same_on_all
from mpidist.comm.arithmetic.merging import merge_rows
from mpidist.comm.communicator import Communicator
from mpidist.indexed_slices import IndexedSlices
from mpidist.optimizers.kernel import Kernel, LayerKernel
from mpidist.optimizers.options import OptimizerOptions
from mpidist.variables.mirrored import MirroredVariable
from mpidist.variables.scatter import require_rows
from mpidist.variables.variable import Variable

Gradient = npt.ArrayLike | IndexedSlices


def write_gradient(view: AnyArray, gradient: Gradient, variable: MirroredVariable) -> None:
    """Local. Set `view` to a gradient; rows that a sparse one names twice are added up.

    Args:
        view: Shape and dtype of the variable.
        gradient: In its shape, or rows of it.
        variable: The one that the gradient is for.

    Raises:
        ValueError: Another shape, or rows that the variable does not have.
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


def take_rows(gradient: Gradient, variable: MirroredVariable) -> tuple[AnyArray, AnyArray]:
    """Local. Indices and values of the gradient of a variable that was made with `sparse_gradient=True`.

    Raises:
        ValueError: Rows of another shape, or rows that the variable does not have.
        TypeError: A dense gradient, or a dtype that does not cast.
    """
    if not isinstance(gradient, IndexedSlices):
        raise TypeError(
            f"variable {variable.name!r} was made with sparse_gradient=True: expected IndexedSlices as its gradient, "
            f"got {type(gradient).__name__} of shape {np.shape(gradient)}; pass the rows that have a gradient, or make "
            "the variable without sparse_gradient"
        )
    require_rows(variable, gradient)
    return gradient.indices, gradient.values.astype(variable.dtype, copy=False)


def require_updatable(
    variable: Variable, kernel: Kernel | LayerKernel, options: OptimizerOptions, owner: str
) -> MirroredVariable:
    """Local. The variable, if an optimizer with this kernel and these options can update it.

    Args:
        variable: To be updated.
        kernel: The optimizer's arithmetic.
        options: The optimizer's options.
        owner: The optimizer, for the errors.

    Raises:
        TypeError: Something that is no ON_WRITE variable of floating dtype.
        ValueError: A variable of another strategy than the current one; or one with sparse gradients, and an optimizer
            that needs all of its rows.
    """
    if not isinstance(variable, MirroredVariable):
        raise TypeError(f"{owner} updates ON_WRITE variables of mpidist, got {variable!r}")
    if variable.dtype.kind in "biu":
        raise TypeError(
            f"{owner} updates variables of floating dtype, got {variable.name!r} of dtype {variable.dtype}: create it "
            "with dtype='float32', or leave it out"
        )
    require_current(variable)
    if not variable.sparse_gradient:
        return variable
    needs = {
        "takes the norm of whole variables": isinstance(kernel, LayerKernel),
        "with use_ema=True averages all rows in each update": options.use_ema,
        "with gradient_accumulation_steps keeps the sums of all rows": options.gradient_accumulation_steps is not None,
    }
    for need, is_there in needs.items():
        if is_there:
            raise ValueError(
                f"{owner} {need}, but updates only the rows with a gradient of variable {variable.name!r}, which was "
                "made with sparse_gradient=True: make it without (IndexedSlices are then added into a dense "
                "gradient), or update it with a second optimizer"
            )
    return variable


def require_current(variable: MirroredVariable) -> None:
    """Local. Raise ValueError if another strategy than the variable's is current."""
    entry = context.innermost()
    if entry is not None and entry.arena is not variable.arena:
        raise ValueError(
            f"variable {variable.name!r} does not belong to the current strategy, so every replica would update its "
            "own copy: create it inside `with strategy.scope():`"
        )


def require_same_gradients(
    communicator: Communicator, pairs: Sequence[tuple[Gradient | None, Variable]] | None
) -> None:
    """Collective. Raise MismatchError unless all ranks pass the same values, as sums over the replicas are.

    Args:
        communicator: The ranks.
        pairs: Gradients that are sums already; None for gradients that are still to be summed, on every rank alike.
    """
    same_on_all(
        communicator, "the gradients given with skip_gradients_aggregation=True (checksums)",
        "to be summed" if pairs is None else
        {f"{number}: {variable.name}": _checksum(gradient) for number, (gradient, variable) in enumerate(pairs)},
        "Sum them over the replicas first, as Strategy.gradients and all_reduce do, or leave the argument out.",
    )


def _checksum(gradient: Gradient | None) -> str:
    if gradient is None:
        return "None"
    held = (gradient.indices, gradient.values) if isinstance(gradient, IndexedSlices) else (gradient,)
    return " ".join(f"{zlib.crc32(arrays.to_host(arrays.as_array(one)).tobytes()):#x}" for one in held)


def to_dense(gradient: Gradient, variable: MirroredVariable) -> AnyArray:
    """Local. The gradient as an array of the variable's shape and dtype; see `write_gradient`."""
    if not isinstance(gradient, IndexedSlices):
        return variable.coerce(gradient)
    dense: AnyArray = variable.arena.namespace.zeros(variable.shape, variable.dtype)
    write_gradient(dense, gradient, variable)
    return dense
