"""One update: reduce, unscale, clip, decay and apply the kernel, in as few passes over memory as the options allow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mpidist.arrays import AnyArray
from mpidist.optimizers.fused import fused
from mpidist.optimizers.kernel import Kernel, LayerKernel
from mpidist.optimizers.options import OptimizerOptions
from mpidist.variables.arena import Arena
from mpidist.variables.step.bundle import Update
from mpidist.variables.step.plan import Plan
from mpidist.variables.step.variable_pass import VariablePass


@dataclass(frozen=True)
class UpdateSettings:
    """Where in the training an update stands.

    Attributes:
        step: 1 in the first update.
        learning_rate: Of this update.
        factor: What the sums of the gradients are multiplied with.
        must_be_finite: Skip the update where a sum is not.
        is_summed: The gradients are the sums over all replicas already.
    """

    step: int
    learning_rate: float
    factor: float = 1.0
    must_be_finite: bool = False
    is_summed: bool = False


def update_variables(
    plan: Plan, numbers: tuple[int, ...], kernel: Kernel | LayerKernel, options: OptimizerOptions,
    settings: UpdateSettings,
) -> bool:
    """Collective. Sum the gradients of some variables over all replicas and update the variables.

    Args:
        plan: Of the variables.
        numbers: Of the variables in it, increasing.
        kernel: The arithmetic.
        options: What is done around it.
        settings: Step and learning rate.

    Returns:
        False if a gradient was not finite and nothing was updated; the same on every rank.

    Raises:
        MismatchError: The ranks pass other variables.
        ValueError: No variables.
    """
    keep = 1 - settings.learning_rate * options.decay
    if not (isinstance(kernel, LayerKernel) or options.clips_norms or settings.must_be_finite):
        update = kernel.prepare(settings.step, settings.learning_rate)
        around = _around(update, kernel, options, keep=keep, factor=settings.factor)
        plan.step(numbers, _fuse(plan.arena, around, kernel, options), is_summed=settings.is_summed)
        return True
    # Sums of half precision may overflow; what is then not finite is looked for below.
    with np.errstate(over="ignore", invalid="ignore"):
        plan.reduce(numbers, is_summed=settings.is_summed)
    sweep = plan.sweep(numbers)
    factors = dict.fromkeys(numbers, settings.factor)
    if options.clips_norms or settings.must_be_finite:
        norms = np.sqrt(sweep.measure(lambda _, gradient: [_square(gradient, sweep)], 1)[:, 0])
        if settings.must_be_finite and not np.isfinite(norms).all():
            return False
        clipped = settings.factor * _clipping(norms * settings.factor, options)
        factors = dict(zip(numbers, clipped.tolist(), strict=True))
    if isinstance(kernel, LayerKernel):
        _update_layers(plan, numbers, kernel, options, settings, factors, keep)
    else:
        update = kernel.prepare(settings.step, settings.learning_rate)
        updates = {
            n: _fuse(plan.arena, _around(update, kernel, options, keep=keep, factor=factors[n]), kernel, options)
            for n in numbers
        }
        sweep.apply(updates.__getitem__)
    return True


def _update_layers(
    plan: Plan, numbers: tuple[int, ...], kernel: LayerKernel, options: OptimizerOptions, settings: UpdateSettings,
    factors: dict[int, float], keep: float,
) -> None:
    sweep = plan.sweep(numbers)
    direct = kernel.direct(settings.step)
    # From what all ranks share: the factors themselves come out of a reduction.
    changes = options.clips_norms or options.clipvalue is not None or settings.factor != 1 or settings.must_be_finite
    if direct is not None or changes:
        changed = {n: _around(direct or _leave, kernel, options, factor=factors[n]) for n in numbers}
        sweep.change(
            {n: _fuse(plan.arena, one, kernel, options, keeps_gradient=True) for n, one in changed.items()}.__getitem__
        )
    squares = sweep.measure(lambda parameter, gradient: [_square(parameter, sweep), _square(gradient, sweep)], 2)
    updates: dict[int, Update] = {}
    for number, (parameter_norm, direction_norm) in zip(numbers, np.sqrt(squares).tolist(), strict=True):
        update = kernel.prepare(settings.step, settings.learning_rate, keep * parameter_norm, direction_norm)
        around = _around(update, kernel, options, keep=keep, is_clipped=True)
        updates[number] = _fuse(plan.arena, around, kernel, options)
    sweep.apply(updates.__getitem__)


def _around(
    update: Update,
    kernel: Kernel | LayerKernel,
    options: OptimizerOptions,
    *,
    keep: float = 1.0,
    factor: float = 1.0,
    is_clipped: bool = False,
) -> Update:
    """`update` after scaling and clipping the gradient and decaying the parameter; `update` itself if there is none."""
    clipvalue = None if is_clipped else options.clipvalue
    if keep == 1 and factor == 1 and clipvalue is None and not options.use_ema:
        return update
    # The average of the weights is a slot after the kernel's own.
    count = len(kernel.slots)

    def around(
        parameter: AnyArray, gradient: AnyArray, slots: Sequence[AnyArray], scratch: Sequence[AnyArray]
    ) -> None:
        if factor != 1:
            np.multiply(gradient, factor, out=gradient)
        if clipvalue is not None:
            np.clip(gradient, -clipvalue, clipvalue, out=gradient)
        if keep != 1:
            np.multiply(parameter, keep, out=parameter)
        update(parameter, gradient, slots[:count], scratch)

    return around


def _fuse(
    arena: Arena, update: Update, kernel: Kernel | LayerKernel, options: OptimizerOptions, *,
    keeps_gradient: bool = False,
) -> Update:
    """On GPUs the update as one kernel; in host memory, block by block in a cache, it is best as it is."""
    if arena.namespace is np:
        return update
    return fused(update, len(kernel.slots) + options.use_ema, kernel.scratch_count, keeps_gradient=keeps_gradient)


def _leave(
    parameter: AnyArray, gradient: AnyArray, slots: Sequence[AnyArray], scratch: Sequence[AnyArray]
) -> None:
    """Local. An update that changes nothing."""


def _clipping(norms: AnyArray, options: OptimizerOptions) -> AnyArray:
    """What each gradient is multiplied with, by its norm."""
    if options.clipnorm is not None:
        return _limit(norms, options.clipnorm)
    if options.global_clipnorm is not None:
        return np.full_like(norms, _limit(np.asarray(np.sqrt(np.dot(norms, norms))), options.global_clipnorm))
    return np.ones_like(norms)


def _limit(norms: AnyArray, limit: float) -> AnyArray:
    return np.asarray(limit / np.maximum(norms, limit))


def _square(array: AnyArray, sweep: VariablePass) -> float:
    """The sum of squares, in double precision."""
    with np.errstate(over="ignore", invalid="ignore"):
        wide = np.abs(array).astype(np.float64, copy=False) if array.dtype.kind == "c" else array.astype(np.float64)
        if sweep.is_in_order:
            # BLAS adds in an order that depends on its threads, and these on how many ranks share the cores.
            return float(np.multiply(wide, wide).sum())
        return float(np.dot(wide, wide))
