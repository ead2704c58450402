"""Updates that need norms before a parameter changes: to clip, to test for finite sums, and for kernels of layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from mpidist.arrays import AnyArray
from mpidist.comm.arithmetic.compiled_sums import sum_of_squares
from mpidist.variables.step.plan import Plan
from mpidist.variables.step.variable_pass import VariablePass
from mpidist.variables.update.arithmetic import UpdateArithmetic, UpdateSettings, widened
from mpidist.variables.update.kernel import Kernel, LayerKernel, Update
from mpidist.variables.update.options import OptimizerOptions

# The sum of the squares of a flat block.
Squares = Callable[[AnyArray], float]


class Limits:
    """The factors of gradients by their norms: the fraction that clipping leaves of each, and whether all are finite.

    Args:
        options: The options of the optimizer.
        squares: See `squares_of`.
        must_be_finite: Whether sums that are not finite are looked for.

    Attributes:
        are_measured: Whether norms are needed.
    """

    def __init__(self, options: OptimizerOptions, squares: Squares, *, must_be_finite: bool) -> None:
        self._squares = squares
        self._clipnorm = options.clipnorm
        self._global_clipnorm = options.global_clipnorm
        self._must_be_finite = must_be_finite
        self.are_measured = options.clips_norms or must_be_finite

    def factors(
        self, variable_pass: VariablePass, numbers: tuple[int, ...], factor: float
    ) -> dict[int, float] | None:
        """Collective. The factor of each variable's gradient, None if one is not finite; the same on every rank.

        Args:
            variable_pass: The pass over the variables, after the reduction.
            numbers: The numbers of the variables.
            factor: The factor of all gradients, before they are clipped.
        """
        if not self.are_measured:
            return dict.fromkeys(numbers, factor)
        norms = np.sqrt(variable_pass.measure(lambda _, gradient: [self._squares(gradient)], 1)[:, 0])
        if self._must_be_finite and not np.isfinite(norms).all():
            return None
        return dict(zip(numbers, (factor * self._clipping(norms * factor)).tolist(), strict=True))

    def _clipping(self, norms: AnyArray) -> AnyArray:
        if self._clipnorm is not None:
            return _limit(norms, self._clipnorm)
        if self._global_clipnorm is not None:
            return np.full_like(norms, _limit(np.asarray(np.sqrt(np.dot(norms, norms))), self._global_clipnorm))
        return np.ones_like(norms)


def _limit(norms: AnyArray, limit: float) -> AnyArray:
    return np.asarray(limit / np.maximum(norms, limit))


def squares_of(*, in_order: bool, compiles: bool) -> Squares:
    """Local. The function that gives the sum of a block's squares, in double precision.

    Args:
        in_order: Whether the sum must depend neither on the number of threads nor on what is compiled.
        compiles: Whether sums in host memory are compiled.
    """
    if in_order:
        return _squares_in_order
    return _squares_compiled if compiles else _squares_by_blas


def _squares_in_order(array: AnyArray) -> float:
    with np.errstate(over="ignore", invalid="ignore"):
        wide = widened(array)
        return float(np.multiply(wide, wide).sum())


def _squares_by_blas(array: AnyArray) -> float:
    # BLAS adds in an order that depends on its threads, and these on how many ranks share the cores.
    with np.errstate(over="ignore", invalid="ignore"):
        wide = widened(array)
        return float(np.dot(wide, wide))


def _squares_compiled(array: AnyArray) -> float:
    squares = sum_of_squares(array)
    return _squares_by_blas(array) if squares is None else squares


class MeasuredUpdate:
    """An update whose gradients are clipped by their norms, or tested, before any parameter is changed.

    Args:
        plan: The plan of the variables.
        kernel: The arithmetic.
        arithmetic: The arithmetic of the kernel, with the work around it.
        limits: Clipping and the test.
    """

    def __init__(self, plan: Plan, kernel: Kernel, arithmetic: UpdateArithmetic, limits: Limits) -> None:
        self._plan = plan
        self._kernel = kernel
        self._arithmetic = arithmetic
        self._limits = limits

    def __call__(self, numbers: tuple[int, ...], settings: UpdateSettings) -> bool:
        """Collective. See `UpdateVariables`."""
        # First: a kernel may refuse a learning rate, and the step is then as if it had not begun.
        update = self._kernel.prepare(settings.step, settings.learning_rate)
        variable_pass = _reduce(self._plan, numbers, settings)
        factors = self._limits.factors(variable_pass, numbers, settings.factor)
        if factors is None:
            return False
        keep = 1 - settings.learning_rate * self._arithmetic.decay
        # Most variables have the same factor, and recording an update takes a while.
        updates = {
            factor: self._arithmetic.surround(update, keep=keep, factor=factor, moves=settings.moves)
            for factor in set(factors.values())
        }
        variable_pass.apply(lambda number: updates[factors[number]])
        return True


class LayerUpdate:
    """An update by a kernel that needs the norms of each variable and of its direction.

    Args:
        plan: The plan of the variables.
        kernel: The arithmetic.
        arithmetic: The arithmetic of the kernel, with the work around it.
        limits: Clipping and the test for what is not finite.
        squares: See `squares_of`.
    """

    def __init__(
        self, plan: Plan, kernel: LayerKernel, arithmetic: UpdateArithmetic, limits: Limits, squares: Squares
    ) -> None:
        self._squares = squares
        self._plan = plan
        self._kernel = kernel
        self._arithmetic = arithmetic
        self._limits = limits

    def __call__(self, numbers: tuple[int, ...], settings: UpdateSettings) -> bool:
        """Collective. See `UpdateVariables`."""
        kernel, arithmetic = self._kernel, self._arithmetic
        variable_pass = _reduce(self._plan, numbers, settings)
        variable_pass.widen()
        factors = self._limits.factors(variable_pass, numbers, settings.factor)
        if factors is None:
            return False
        keep = 1 - settings.learning_rate * arithmetic.decay
        direct = kernel.direct(settings.step)
        # Every rank must decide alike whether there is this pass, which is collective: from what all ranks share, and
        # not from the factors, which come out of a reduction.
        if direct is not None or self._limits.are_measured or arithmetic.clipvalue is not None or settings.factor != 1:
            directions = {
                number: arithmetic.surround(direct or _leave, factor=factors[number], keeps_gradient=True)
                for number in numbers
            }
            variable_pass.change(directions.__getitem__)
        squares = variable_pass.measure(
            lambda parameter, gradient: [self._squares(parameter), self._squares(gradient)], 2
        )
        updates: dict[int, Update] = {}
        for number, (parameter_norm, direction_norm) in zip(numbers, np.sqrt(squares).tolist(), strict=True):
            # The norm is that of the decayed parameter; the pass itself decays the parameter.
            update = kernel.prepare(settings.step, settings.learning_rate, keep * parameter_norm, direction_norm)
            updates[number] = arithmetic.surround(update, keep=keep, clips=False, moves=settings.moves)
        variable_pass.apply(updates.__getitem__)
        return True


def _reduce(plan: Plan, numbers: tuple[int, ...], settings: UpdateSettings) -> VariablePass:
    # Sums of half precision may overflow; the norms then show it.
    with np.errstate(over="ignore", invalid="ignore"):
        plan.step(numbers, is_summed=settings.is_summed).reduce(settings)
    return plan.variable_pass(numbers)


def _leave(
    _parameter: AnyArray, _gradient: AnyArray, _slots: Sequence[AnyArray], _scratch: Sequence[AnyArray]
) -> None:
    """Local. An update that changes nothing."""
