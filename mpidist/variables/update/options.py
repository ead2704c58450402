"""The options that all families of optimizers share, with Keras's names and defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypedDict

import numpy as np

from mpidist.arguments import flag, python_numbers, whole
from mpidist.variables.update.kernel import positive, share

# Names of an optimizer's state in a checkpoint, besides its slots. Of accumulated gradients: the sums, and 1 for each
# variable that got one.
ACCUMULATED, ACCUMULATES = "accumulated", "accumulates"
# Begins the names of the errors of compressed gradients, and of whatever else is kept of these.
COMPRESSION = "compression_"
# The momentum of the outer steps of groups, which is a slot of each variable.
OUTER_MOMENTUM = "outer_momentum"
# The number of these steps, where their learning rate depends on it.
OUTER_STEPS = "outer_steps"


class PartialState(dict[str, Any]):
    """The state of an object in a checkpoint of which it takes what fits; in the place of a dictionary."""


class OptionKeywordsButDecay(TypedDict, total=False):
    """Keyword arguments of families that have a `weight_decay` of their own."""

    clipvalue: float | None
    clipnorm: float | None
    global_clipnorm: float | None
    gradient_accumulation_steps: int | None
    use_ema: bool
    ema_momentum: float
    ema_overwrite_frequency: int | None
    master_copy: bool
    missing_gradients: Literal["error", "zero"]


class OptionKeywords(OptionKeywordsButDecay, total=False):
    """Keyword arguments of every family; see `OptimizerOptions`."""

    weight_decay: float | None


@dataclass(frozen=True)
class OptimizerOptions:
    """Options of every optimizer: clipping, weight decay, gradient accumulation and moving averages.

    Gradients are clipped after they are summed over the replicas (and averaged over accumulated calls), so that the
    result does not depend on the number of replicas. At most one of the three clipping options may be used. Of a
    variable made with `sparse_gradient=True` only the rows that some replica names are summed: the other rows do not
    count in norms and do not decay. Such variables exclude accumulation and averaging.

    Attributes:
        weight_decay: In each update every parameter with a gradient first loses `learning_rate * weight_decay` of
            itself (decoupled: Loshchilov and Hutter 2019).
        clipvalue: Elements of gradients are cut to [-clipvalue, clipvalue].
        clipnorm: Gradients of larger Euclidean norm are scaled down to it, variable by variable.
        global_clipnorm: The same with the norm over all variables of the call.
        gradient_accumulation_steps: Number of calls, at least 2, whose gradients are added up on this replica; then
            their mean is reduced and applied.
        use_ema: Keep an exponential moving average of the variables, with one step of the average in each call. It
            begins with the variables after the first update. The steps of calls that only accumulate are made at the
            next update, or by `finalize_variable_values`.
        ema_momentum: Decay of the average.
        ema_overwrite_frequency: Number of updates after which the variables are set to their average; None: only
            `finalize_variable_values` does so. With accumulation the first call for this update sets them, too, and is
            then Collective.
        master_copy: For variables of half precision (float16, bfloat16) the state has a copy in float32, slot
            "master_copy": updates change the copy, and the variable is the copy rounded, so that updates too small for
            the variable add up. A variable that the program assigns to, or restores, is copied again. The state of such
            variables is float32 with and without it.
        missing_gradients: A variable with a gradient on some ranks, and None on others, is an "error"; "zero" counts
            the missing ones as zeros, as for layers that not all ranks use. It costs a small message per update. With
            accumulation a variable has a gradient if one of the calls had one; a checkpoint between these calls is a
            MismatchError where ranks have had gradients for other variables so far: save after an update, or `flush`.

    Raises:
        ValueError: An option is out of range, or two kinds of clipping are given.
        TypeError: An option has a wrong type.
    """

    weight_decay: float | None = None
    clipvalue: float | None = None
    clipnorm: float | None = None
    global_clipnorm: float | None = None
    gradient_accumulation_steps: int | None = None
    use_ema: bool = False
    ema_momentum: float = 0.99
    ema_overwrite_frequency: int | None = None
    master_copy: bool = False
    missing_gradients: Literal["error", "zero"] = "error"

    def __post_init__(self) -> None:
        positive(weight_decay=self.decay)
        clipping = {
            name: limit for name in ("clipvalue", "clipnorm", "global_clipnorm")
            if (limit := getattr(self, name)) is not None
        }
        for name, limit in clipping.items():
            if isinstance(limit, bool) or not isinstance(limit, (int, float, np.number)):
                raise TypeError(f"`{name}` must be a number or None, got {limit!r} of type {type(limit).__name__}")
            if not limit > 0:
                raise ValueError(f"`{name}` must be above 0, got {limit!r}; leave it out if nothing is to be clipped")
        if len(clipping) > 1:
            raise ValueError(f"expected at most one of clipvalue, clipnorm and global_clipnorm, got {clipping}")
        share(ema_momentum=self.ema_momentum)
        for name, least in (("gradient_accumulation_steps", 2), ("ema_overwrite_frequency", 1)):
            count = getattr(self, name)
            if count is not None:
                whole(name, count, least=least)
        flag("use_ema", self.use_ema)
        flag("master_copy", self.master_copy)
        if self.missing_gradients not in ("error", "zero"):
            raise ValueError(f"`missing_gradients` must be 'error' or 'zero', got {self.missing_gradients!r}")
        python_numbers(self)
        if self.ema_overwrite_frequency is not None and not self.use_ema:
            raise ValueError("`ema_overwrite_frequency` needs `use_ema=True`")

    @property
    def decay(self) -> float:
        """Local. The weight decay, 0 if there is none."""
        return 0.0 if self.weight_decay is None else self.weight_decay

    @property
    def accumulated(self) -> int:
        """Local. The number of calls per update."""
        return self.gradient_accumulation_steps or 1

    @property
    def clips_norms(self) -> bool:
        """Local. Whether gradients are clipped by their norms, which an update then needs first."""
        return self.clipnorm is not None or self.global_clipnorm is not None
