"""Gradient accumulation: gradients of several calls are added up on each replica before they are reduced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from mpidist import arrays
from mpidist.arrays import AnyArray
from mpidist.comm.arithmetic.combine import is_half
from mpidist.options import VariableAggregation
from mpidist.variables.mirrored import MirroredVariable
from mpidist.variables.step.gradient import to_dense
from mpidist.variables.sync_on_read import SyncOnReadVariable
from mpidist.variables.variable import Gradient


class Accumulator:
    """Sums of this replica's gradients; half precision is added up in float32.

    Collective. Args:
        variables: Of the optimizer.

    Attributes:
        sums: One ON_READ variable for each. A checkpoint saves it as the sum over the replicas.
        numbers: Of the variables that have had a gradient since the last update.
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

    def add(self, gradients: Mapping[int, Gradient], factor: float, *, counts: bool) -> None:
        """Local. Add `factor` times some gradients to the sums; an error changes no sum.

        Args:
            gradients: By the numbers of their variables.
            factor: Of all of them.
            counts: False notes only that there are gradients: another rank adds them.

        Raises:
            ValueError, TypeError: A gradient that is not for its variable; see `to_dense`.
        """
        # All are looked at before one is added: a program may catch the error and make the call again.
        dense = {number: to_dense(gradient, self._variables[number]) for number, gradient in gradients.items()}
        self.numbers.update(dense)
        for number, gradient in dense.items() if counts else ():
            total = self.sums[number]
            # The sums are in host memory, as ON_READ variables are.
            own = arrays.to_host(gradient)
            with np.errstate(over="ignore", invalid="ignore"):
                total.accumulate(own if factor == 1 else np.multiply(own, factor, dtype=total.dtype))

    def hand_over(self, views: Sequence[AnyArray]) -> tuple[int, ...]:
        """Local. Move the sums into the views of the gradients, and begin again at zero.

        Returns:
            The variables that have a gradient, increasing.
        """
        numbers = tuple(sorted(self.numbers))
        with np.errstate(over="ignore"):
            for number in numbers:
                view = views[number]
                np.copyto(view, arrays.move(self.sums[number].component, arrays.namespace(view)), casting="same_kind")
        for total in self.sums:
            total.clear()
        self.numbers = set()
        return numbers
