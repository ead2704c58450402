"""The norms of gradients, and what follows from them: clipping, and whether a step is made at all."""

from __future__ import annotations

import numpy as np

from mpidist.arrays import AnyArray
from mpidist.variables.step.variable_pass import VariablePass
from mpidist.variables.update.arithmetic import widened
from mpidist.variables.update.options import OptimizerOptions


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
        norms = np.sqrt(variable_pass.measure(lambda _, gradient: [sum_of_squares(gradient, variable_pass)], 1)[:, 0])
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


def sum_of_squares(array: AnyArray, variable_pass: VariablePass) -> float:
    """Local. The sum of squares, in double precision."""
    with np.errstate(over="ignore", invalid="ignore"):
        wide = widened(array)
        if variable_pass.is_in_order:
            # BLAS adds in an order that depends on its threads, and these on how many ranks share the cores.
            return float(np.multiply(wide, wide).sum())
        return float(np.dot(wide, wide))
