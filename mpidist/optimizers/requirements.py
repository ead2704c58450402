"""Requirements of an optimizer: variables are examined before a plan is made for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from typing import Any, TypeAlias, TypeVar

from mpidist import context
from mpidist.options import VariableSynchronization
from mpidist.variables.update.kernel import Kernel, LayerKernel
from mpidist.variables.update.options import OptimizerOptions
from mpidist.variables.variable import BaseVariable

T = TypeVar("T")
# Is called with whether a step has updated the variables, before an interrupt can come.
Then: TypeAlias = Callable[[bool], None] | None


# Names of arguments in PyTorch, in Optax, and in older versions of Keras.
_OTHER_NAMES = {
    "lr": "learning_rate", "eps": "epsilon", "betas": "beta_1 and beta_2", "b1": "beta_1", "b2": "beta_2",
    "decay": "a schedule as learning_rate", "alpha": "rho", "max_norm": "global_clipnorm", "clip_norm": "clipnorm",
    "clip_value": "clipvalue", "amsgrad": "Adam or AdamW, which have it",
}


def refuse_unknown(given: Mapping[str, object], owner: str) -> None:
    """Local. Raise TypeError for the name of an option that does not exist.

    Args:
        given: The options by name.
        owner: The optimizer, for the error.
    """
    known = [field.name for field in fields(OptimizerOptions)]
    for name in given:
        if name not in known:
            near = _OTHER_NAMES.get(name) or next(iter(get_close_matches(name, known, 1)), "")
            way_out = f"Use {near}" if near else f"Every optimizer takes {', '.join(known)}"
            raise TypeError(f"{owner} has no argument {name!r}. {way_out}")


def require_kernel(kernel: object) -> None:
    """Local. Raise TypeError for something that is no kernel."""
    if not hasattr(kernel, "prepare"):
        raise TypeError(
            f"`kernel` must be the arithmetic of an optimizer (mpidist.optimizers.Kernel), got {kernel!r} of type "
            f"{type(kernel).__name__}. Use mpidist.optimizers.SGD() or another built-in optimizer"
        )


def instead_of_setting(name: str, owner: str, kernel: object) -> str:
    """Local. Say what to do instead of setting an attribute of an optimizer; empty if that is none of its settings.

    Args:
        name: The name of the attribute.
        owner: The optimizer, for the error.
        kernel: The optimizer's arithmetic.
    """
    known = {field.name for kind in (OptimizerOptions, kernel) if is_dataclass(kind) for field in fields(kind)}
    real = _OTHER_NAMES.get(name, name)
    if real == "learning_rate":
        return "set `learning_rate`"
    if real not in known:
        near = get_close_matches(name, known, 1)
        if not near or get_close_matches(name, ["learning_rate", "iterations"], 1):
            return ""
        real = near[0]
    return f"`learning_rate` may be set at any time, and `{real}` is an argument of {owner}: make another optimizer"


def require_dense(variables: Iterable[BaseVariable], owner: str) -> None:
    """Local. Raise ValueError for a variable whose gradients are `IndexedSlices`."""
    for variable in variables:
        if variable.sparse_gradient:
            raise ValueError(
                f"{owner}: variable {variable.name!r} was made with sparse_gradient=True and has no dense gradient to "
                "write to: pass its IndexedSlices to `apply_gradients`"
            )


def listed(given: Iterable[T], what: str, owner: str) -> list[T]:
    """Local. The argument of a program as a list.

    Args:
        given: The list, or another collection or iterator.
        what: The expected content, for the error.
        owner: The optimizer, for the error.

    Raises:
        TypeError: It is a single variable, or nothing that has elements.
    """
    if isinstance(given, BaseVariable):
        raise TypeError(f"{owner} expected a list of {what}, got only {given!r}. Pass a list, for instance [variable]")
    if not isinstance(given, Iterable):
        raise TypeError(f"{owner} expected a list of {what}, got {given!r} of type {type(given).__name__}")
    return list(given)


def require_pairs(given: list[Any], owner: str) -> None:
    """Local. Raise TypeError unless all elements are pairs of a gradient and a variable."""
    for element in given:
        if not (isinstance(element, (list, tuple)) and len(element) == 2 and isinstance(element[1], BaseVariable)):
            raise TypeError(
                f"{owner} expected pairs (gradient, variable), got an element {element!r} of type "
                f"{type(element).__name__}. Pass zip(gradients, variables)"
            )


def require_updatable(
    variable: BaseVariable, kernel: Kernel | LayerKernel, options: OptimizerOptions, owner: str
) -> BaseVariable:
    """Local. The variable, if an optimizer with this kernel and these options can update it.

    Args:
        variable: The variable that the optimizer is to update.
        kernel: The optimizer's arithmetic.
        options: The optimizer's options.
        owner: The optimizer, for the errors.

    Raises:
        TypeError: `variable` is no ON_WRITE variable of a floating dtype.
        ValueError: The variable is of another strategy than the current one, or has sparse gradients, and the optimizer
            needs all of its rows.
    """
    if not isinstance(variable, BaseVariable) or variable.synchronization is not VariableSynchronization.ON_WRITE:
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


def callback(then: Then, owner: str) -> Then:
    """Local. The function that a step calls at its end, or None; a TypeError for anything else.

    Args:
        then: The argument of the program.
        owner: The optimizer, for the error.
    """
    if then is not None and not callable(then):
        raise TypeError(f"{owner}: `then` must be a function of whether the variables were updated, got {then!r}")
    return then


def wholes(variables: Sequence[BaseVariable]) -> list[BaseVariable]:
    """Local. The variables, each once; a shard is replaced by the variable of which it is a part."""
    # One that is named twice stays twice: that is for others to refuse.
    found: list[BaseVariable] = []
    for one in variables:
        if one.whole is one or not any(known is one.whole for known in found):
            found.append(one.whole)
    return found
