"""Gradient accumulation: gradients of several calls are added up on each replica before they are reduced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mpidist import arrays
from mpidist.arrays import AnyArray
from mpidist.comm.arithmetic.combine import is_half
from mpidist.options import VariableAggregation
from mpidist.variables.kinds.mirrored import MirroredVariable
from mpidist.variables.kinds.sync_on_read import SyncOnReadVariable
from mpidist.variables.step.gradient import to_dense
from mpidist.variables.variable import Gradient


class Accumulator:
    """Collective. Sums of this replica's gradients; half precision is added up in float32.

    Args:
        variables: The variables of the optimizer.

    Attributes:
        sums: One ON_READ variable for each variable. A checkpoint saves it as the sum over the replicas.
        numbers: The numbers of the variables that have had a gradient since the last update.
        calls: The calls since the last update; see `UpdateSettings`.
    """

    def __init__(self, variables: Sequence[MirroredVariable]) -> None:
        self._variables = variables
        self.sums = [
            SyncOnReadVariable(
                v.arena, np.zeros(v.shape, np.float32 if is_half(v.dtype) else v.dtype),
                name=f"{v.name}/accumulated", aggregation=VariableAggregation.SUM,
            )
            for v in variables
        ]
        self.numbers: set[int] = set()
        self.calls: tuple[tuple[float, bool, int], ...] = ()

    def add(self, gradients: Mapping[int, Gradient], factor: float, *, is_summed: bool) -> None:
        """Local. Add `factor` times the gradients of a call to the sums; an error changes no sum.

        Args:
            gradients: The gradients by the numbers of their variables.
            factor: The factor of all of them.
            is_summed: Whether the gradients are sums over the ranks already.

        Raises:
            ValueError, TypeError: A gradient does not fit its variable; see `to_dense`.
        """
        # All are looked at before one is added: a program may catch the error and make the call again.
        dense = {number: to_dense(gradient, self._variables[number]) for number, gradient in gradients.items()}
        self.numbers.update(dense)
        self.calls = self.with_call(factor, is_summed=is_summed)
        for number, gradient in dense.items():
            if not self._counts(number, is_summed=is_summed):
                continue
            total = self.sums[number]
            with np.errstate(over="ignore", invalid="ignore"):
                total.accumulate(_scaled(gradient, factor, total.dtype))

    def hand_over(
        self, gradients: Mapping[int, Gradient], factor: float, views: Sequence[AnyArray], *, is_summed: bool
    ) -> tuple[int, ...]:
        """Local. Write the sums, with the gradients of one more call added, into the views of the gradients.

        The sums themselves are as they were until `clear`: where the ranks do not agree on the update, a program may
        catch the error, and make the call again.

        Args:
            gradients: See `add`. One may be the view of its own variable, and of no other.
            factor: See `add`.
            views: The views of all variables.
            is_summed: See `add`.

        Returns:
            The variables that have a gradient, increasing.

        Raises:
            ValueError, TypeError: See `add`.
        """
        dense = {number: to_dense(gradient, self._variables[number]) for number, gradient in gradients.items()}
        numbers = tuple(sorted(self.numbers.union(dense)))
        for number in numbers:
            view, total = views[number], self.sums[number].component
            with np.errstate(over="ignore", invalid="ignore"):
                if number in dense and self._counts(number, is_summed=is_summed):
                    own = _scaled(dense[number], factor, total.dtype)
                    # Without a further array, where the view takes the sum as it is.
                    out = view if isinstance(view, np.ndarray) and view.dtype == total.dtype else None
                    total = np.asarray(np.add(total, own, out=out, dtype=total.dtype))
                if total is not view:
                    np.copyto(view, arrays.move(total, arrays.namespace(view)), casting="same_kind")
        return numbers

    def take_back(
        self, gradients: Mapping[int, Gradient], factor: float, views: Sequence[AnyArray], *, is_summed: bool
    ) -> None:
        """Local. Undo `hand_over`: the gradients that the program had in the views are there again, within rounding.

        Args:
            gradients: See `hand_over`.
            factor: See `hand_over`.
            views: See `hand_over`.
            is_summed: See `hand_over`.
        """
        for number, gradient in gradients.items():
            view = views[number]
            if gradient is view and self._counts(number, is_summed=is_summed):
                total = arrays.move(self.sums[number].component, arrays.namespace(view))
                with np.errstate(over="ignore", invalid="ignore"):
                    np.copyto(view, (view - total) / factor, casting="same_kind")

    def clear(self) -> None:
        """Local. Begin again at zero."""
        for total in self.sums:
            total.clear()
        self.numbers = set()
        self.calls = ()

    def with_call(self, factor: float, *, is_summed: bool) -> tuple[tuple[float, bool, int], ...]:
        """Local. The calls since the last update, and one more."""
        *before, last = self.calls or ((factor, is_summed, 0),)
        if last[:2] == (factor, is_summed):
            return *before, (factor, is_summed, last[2] + 1)
        return *before, last, (factor, is_summed, 1)

    def _counts(self, number: int, *, is_summed: bool) -> bool:
        # Accumulated gradients are saved, and later applied, as sums over the ranks. Gradients that are such sums
        # already must count once, on the first rank.
        arena = self._variables[number].arena
        return arena.communicator.rank == 0 if is_summed else arena.gives_gradients


def _scaled(gradient: AnyArray, factor: float, dtype: np.dtype[Any]) -> AnyArray:
    # The sums are in host memory, as ON_READ variables are.
    own = arrays.to_host(gradient)
    return own if factor == 1 else np.multiply(own, factor, dtype=dtype)
