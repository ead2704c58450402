"""The norms of gradients, and what follows from them: clipping, and whether a step is made at all."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mpidist.arrays import AnyArray
from mpidist.comm.arithmetic.compiled_sums import sum_of_squares
from mpidist.variables.step.variable_pass import VariablePass
from mpidist.variables.update.arithmetic import widened
from mpidist.variables.update.options import OptimizerOptions

# The sum of the squares of a flat block.
Squares = Callable[[AnyArray], float]


class Limits:
    """The factors of gradients by their norms: what clipping leaves of each, and whether all are finite.

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
            variable_pass: Over the variables, after the reduction.
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
        in_order: It must not depend on the number of threads, nor on what is compiled.
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
