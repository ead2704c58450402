"""Requirements of an optimizer: variables are examined before a plan is made for them."""

from __future__ import annotations

from mpidist import context
from mpidist.options import VariableSynchronization
from mpidist.variables.update.kernel import Kernel, LayerKernel
from mpidist.variables.update.options import OptimizerOptions
from mpidist.variables.variable import Variable


def require_updatable(
    variable: Variable, kernel: Kernel | LayerKernel, options: OptimizerOptions, owner: str
) -> Variable:
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
    if not isinstance(variable, Variable) or variable.synchronization is not VariableSynchronization.ON_WRITE:
        raise TypeError(f"{owner} updates ON_WRITE variables of mpidist, got {variable!r}")
    if variable.dtype.kind in "biu":
        raise TypeError(
            f"{owner} updates variables of floating dtype, got {variable.name!r} of dtype {variable.dtype}: create it "
            "with dtype='float32', or leave it out"
        )
    context.require_home(variable.home, variable.name)
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
