"""The update of an optimizer: reduce, unscale, clip, decay and apply the kernel, in as few passes as the options allow.

`open_update` chooses the way once, when an optimizer is built:

- one pass, in which sums and kernel are one (`DirectUpdate`);
- sums, then norms to clip by or to test, then the kernel (`MeasuredUpdate`);
- sums, then norms of each variable that the kernel itself needs, then the kernel (`LayerUpdate`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from mpidist.arrays import AnyArray
from mpidist.optimizers.fused import fused
from mpidist.optimizers.kernel import Kernel, LayerKernel
from mpidist.optimizers.options import OptimizerOptions
from mpidist.variables.step.bundle import Update
from mpidist.variables.step.plan import Plan
from mpidist.variables.step.variable_pass import VariablePass


class UpdateSettings(NamedTuple):
    """The numbers of one update.

    Attributes:
        step: 1 in the first update.
        learning_rate: Of this update.
        factor: The sums of the gradients are multiplied with it.
        is_summed: The gradients are the sums over all replicas already.
    """

    step: int
    learning_rate: float
    factor: float = 1.0
    is_summed: bool = False


# `update_variables(numbers, settings)` is Collective: it sums the gradients of some variables over all replicas and
# updates these variables. It gives False, on every rank, if a gradient was not finite and nothing was updated.
UpdateVariables = Callable[[tuple[int, ...], UpdateSettings], bool]


def open_update(
    plan: Plan, kernel: Kernel | LayerKernel, options: OptimizerOptions, *, must_be_finite: bool = False
) -> UpdateVariables:
    """Local. The way of an optimizer's updates.

    Args:
        plan: Of the variables.
        kernel: The arithmetic.
        options: For the work around the kernel.
        must_be_finite: Skip updates in which a sum is not finite.
    """
    wrap = Wrapper(kernel, options, on_gpu=plan.arena.namespace is not np)
    if isinstance(kernel, LayerKernel):
        return LayerUpdate(plan, kernel, wrap, Limits(options, must_be_finite=must_be_finite))
    if options.clips_norms or must_be_finite:
        return MeasuredUpdate(plan, kernel, wrap, Limits(options, must_be_finite=must_be_finite))
    return DirectUpdate(plan, kernel, wrap)


class Wrapper:
    """The element-wise work around a kernel's update: unscaling, clipping by value, decay, and one kernel on GPUs.

    Args:
        kernel: Of the updates.
        options: Of the optimizer.
        on_gpu: Whether the variables lie on GPUs.

    Attributes:
        decay: The parameters lose this fraction times the learning rate.
        clipvalue: Of the options.
        is_needed: Whether there can be any such work.
    """

    def __init__(self, kernel: Kernel | LayerKernel, options: OptimizerOptions, *, on_gpu: bool) -> None:
        self._kernel_slots = len(kernel.slots)
        self._slots = self._kernel_slots + options.use_ema
        self._scratch = kernel.scratch_count
        self._hides_slots = options.use_ema
        self._on_gpu = on_gpu
        self.decay = options.decay
        self.clipvalue = options.clipvalue
        self.is_needed = bool(
            on_gpu or options.decay or options.clipvalue is not None or options.use_ema or options.accumulated > 1
        )

    def __call__(
        self,
        update: Update,
        *,
        keep: float = 1.0,
        factor: float = 1.0,
        clips: bool = True,
        keeps_gradient: bool = False,
    ) -> Update:
        """Local. The whole update.

        Args:
            update: Of the kernel, for one step.
            keep: The parameter is first multiplied with it.
            factor: The gradient is first multiplied with it.
            clips: Then clip the gradient by value.
            keeps_gradient: What the update leaves in the gradient is read later.
        """
        clipvalue = self.clipvalue if clips else None
        # The average of the weights is a slot after the kernel's own, which the kernel must not see.
        if keep != 1 or factor != 1 or clipvalue is not None or self._hides_slots:
            update = _surround(update, self._kernel_slots, keep=keep, factor=factor, clipvalue=clipvalue)
        # In host memory, block by block in a cache, an update is best as it is.
        return fused(update, self._slots, self._scratch, keeps_gradient=keeps_gradient) if self._on_gpu else update


def _surround(
    update: Update, slot_count: int, *, keep: float, factor: float, clipvalue: float | None
) -> Update:
    def surrounded(
        parameter: AnyArray, gradient: AnyArray, slots: Sequence[AnyArray], scratch: Sequence[AnyArray]
    ) -> None:
        if factor != 1:
            np.multiply(gradient, factor, out=gradient)
        if clipvalue is not None:
            np.clip(gradient, -clipvalue, clipvalue, out=gradient)
        if keep != 1:
            np.multiply(parameter, keep, out=parameter)
        update(parameter, gradient, slots[:slot_count], scratch)

    return surrounded


class Limits:
    """The factors of gradients by their norms: what clipping leaves of each, and whether all are finite.

    Args:
        options: Of the optimizer.
        must_be_finite: Whether sums that are not finite are looked for.

    Attributes:
        are_measured: Whether norms are needed.
    """

    def __init__(self, options: OptimizerOptions, *, must_be_finite: bool) -> None:
        self._clipnorm = options.clipnorm
        self._global_clipnorm = options.global_clipnorm
        self._must_be_finite = must_be_finite
        self.are_measured = options.clips_norms or must_be_finite

    def factors(
        self, variable_pass: VariablePass, numbers: tuple[int, ...], factor: float
    ) -> dict[int, float] | None:
        """Collective. The factor of each variable's gradient, None if one is not finite; the same on every rank.

        Args:
            variable_pass: Over the variables, after the reduction.
            numbers: Of the variables.
            factor: Of all gradients, before they are clipped.
        """
        if not self.are_measured:
            return dict.fromkeys(numbers, factor)
        norms = np.sqrt(variable_pass.measure(lambda _, gradient: [_square(gradient, variable_pass)], 1)[:, 0])
        if self._must_be_finite and not np.isfinite(norms).all():
            return None
        return dict(zip(numbers, (factor * self._clipping(norms * factor)).tolist(), strict=True))

    def _clipping(self, norms: AnyArray) -> AnyArray:
        if self._clipnorm is not None:
            return _limit(norms, self._clipnorm)
        if self._global_clipnorm is not None:
            return np.full_like(norms, _limit(np.asarray(np.sqrt(np.dot(norms, norms))), self._global_clipnorm))
        return np.ones_like(norms)


class DirectUpdate:
    """An update in one pass: each block is summed and updated while it is in the cache.

    Args:
        plan: Of the variables.
        kernel: The arithmetic.
        wrap: Adds the work around it.
    """

    def __init__(self, plan: Plan, kernel: Kernel, wrap: Wrapper) -> None:
        self._plan = plan
        self._kernel = kernel
        self._wrap = wrap if wrap.is_needed else None

    def __call__(self, numbers: tuple[int, ...], settings: UpdateSettings) -> bool:
        """Collective. See `UpdateVariables`."""
        update = self._kernel.prepare(settings.step, settings.learning_rate)
        if self._wrap is not None:
            keep = 1 - settings.learning_rate * self._wrap.decay
            update = self._wrap(update, keep=keep, factor=settings.factor)
        self._plan.step(numbers, is_summed=settings.is_summed).apply(update)
        return True


class MeasuredUpdate:
    """An update whose gradients are clipped by their norms, or tested, before any parameter is changed.

    Args:
        plan: Of the variables.
        kernel: The arithmetic.
        wrap: Adds the work around it.
        limits: Clipping and the test.
    """

    def __init__(self, plan: Plan, kernel: Kernel, wrap: Wrapper, limits: Limits) -> None:
        self._plan = plan
        self._kernel = kernel
        self._wrap = wrap
        self._limits = limits

    def __call__(self, numbers: tuple[int, ...], settings: UpdateSettings) -> bool:
        """Collective. See `UpdateVariables`."""
        variable_pass = _reduce(self._plan, numbers, settings)
        factors = self._limits.factors(variable_pass, numbers, settings.factor)
        if factors is None:
            return False
        update = self._kernel.prepare(settings.step, settings.learning_rate)
        keep = 1 - settings.learning_rate * self._wrap.decay
        updates = {number: self._wrap(update, keep=keep, factor=factors[number]) for number in numbers}
        variable_pass.apply(updates.__getitem__)
        return True


class LayerUpdate:
    """An update by a kernel that needs the norms of each variable and of its direction.

    Args:
        plan: Of the variables.
        kernel: The arithmetic.
        wrap: Adds the work around it.
        limits: Clipping and the test for what is not finite.
    """

    def __init__(self, plan: Plan, kernel: LayerKernel, wrap: Wrapper, limits: Limits) -> None:
        self._plan = plan
        self._kernel = kernel
        self._wrap = wrap
        self._limits = limits

    def __call__(self, numbers: tuple[int, ...], settings: UpdateSettings) -> bool:
        """Collective. See `UpdateVariables`."""
        kernel, wrap = self._kernel, self._wrap
        variable_pass = _reduce(self._plan, numbers, settings)
        factors = self._limits.factors(variable_pass, numbers, settings.factor)
        if factors is None:
            return False
        keep = 1 - settings.learning_rate * wrap.decay
        direct = kernel.direct(settings.step)
        # Every rank must decide alike whether there is this pass, which is collective: from what all ranks share, and
        # not from the factors, which come out of a reduction.
        if direct is not None or self._limits.are_measured or wrap.clipvalue is not None or settings.factor != 1:
            directions = {
                number: wrap(direct or _leave, factor=factors[number], keeps_gradient=True) for number in numbers
            }
            variable_pass.change(directions.__getitem__)
        squares = variable_pass.measure(
            lambda parameter, gradient: [_square(parameter, variable_pass), _square(gradient, variable_pass)], 2
        )
        updates: dict[int, Update] = {}
        for number, (parameter_norm, direction_norm) in zip(numbers, np.sqrt(squares).tolist(), strict=True):
            # The norm is that of the decayed parameter; the pass itself decays the parameter.
            update = kernel.prepare(settings.step, settings.learning_rate, keep * parameter_norm, direction_norm)
            updates[number] = wrap(update, keep=keep, clips=False)
        variable_pass.apply(updates.__getitem__)
        return True


def _reduce(plan: Plan, numbers: tuple[int, ...], settings: UpdateSettings) -> VariablePass:
    # Sums of half precision may overflow; the norms then show it.
    with np.errstate(over="ignore", invalid="ignore"):
        plan.step(numbers, is_summed=settings.is_summed).reduce()
    return plan.variable_pass(numbers)


def _leave(
    _parameter: AnyArray, _gradient: AnyArray, _slots: Sequence[AnyArray], _scratch: Sequence[AnyArray]
) -> None:
    """Local. An update that changes nothing."""


def _limit(norms: AnyArray, limit: float) -> AnyArray:
    return np.asarray(limit / np.maximum(norms, limit))


def _square(array: AnyArray, variable_pass: VariablePass) -> float:
    """The sum of squares, in double precision."""
    with np.errstate(over="ignore", invalid="ignore"):
        wide = np.abs(array).astype(np.float64, copy=False) if array.dtype.kind == "c" else array.astype(np.float64)
        if variable_pass.is_in_order:
            # BLAS adds in an order that depends on its threads, and these on how many ranks share the cores.
            return float(np.multiply(wide, wide).sum())
        return float(np.dot(wide, wide))
