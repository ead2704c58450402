"""The plan of an optimizer on a worker: gradients go to the servers, with the factors of their clipping."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from mpidist.arrays import AnyArray, as_array
from mpidist.indexed_slices import IndexedSlices
from mpidist.variables.served import ServedVariable
from mpidist.variables.update.arithmetic import UpdateSettings
from mpidist.variables.update.options import OptimizerOptions
from mpidist.variables.variable import Gradient, Variable

_Apply: TypeAlias = Callable[[int, str, Sequence[tuple[ServedVariable, AnyArray, float]]], None]


class WorkerPlan:
    """See `UpdatePlan`.

    Args:
        apply: As `Worker.apply`.
        number: Of the optimizer.
        name: Of the optimizer.
        variables: That it updates.
        options: Of the optimizer.
    """

    def __init__(
        self, apply: _Apply, number: int, name: str, variables: Sequence[Variable], options: OptimizerOptions
    ) -> None:
        self.number = number
        self._name = name
        self.variables = tuple(variables)
        self.slots: dict[str, list[Variable]] = {}
        self._served = [variable for variable in variables if isinstance(variable, ServedVariable)]
        self._apply = apply
        self._options = options
        self._gradients: dict[int, AnyArray] = {}

    def gradient(self, number: int) -> AnyArray:
        """Local. See `UpdatePlan.gradient`."""
        if number not in self._gradients:
            self._gradients[number] = np.empty(self.variables[number].shape, self.variables[number].dtype)
        return self._gradients[number]

    def accumulate(self, gradients: Mapping[int, Gradient], factor: float, *, is_summed: bool) -> None:
        """Local. Refuse: the coordinator has refused it before."""
        raise NotImplementedError("gradients are not accumulated over closures")

    def apply(self, gradients: Mapping[int, Gradient], settings: UpdateSettings) -> bool:
        """Local. See `UpdatePlan.apply`; the step and the learning rate are given when the closure is committed."""
        if not gradients:
            raise ValueError("expected at least one gradient, got none")
        given = {number: self._array(number, gradient) for number, gradient in gradients.items()}
        norms = np.ones(len(given))
        if self._options.clips_norms or settings.must_be_finite:
            norms = np.array([np.linalg.norm(array.astype(np.float64).reshape(-1)) for array in given.values()])
        if settings.must_be_finite and not np.isfinite(norms).all():
            return False
        factors = settings.factor * self._clipping(norms * settings.factor)
        self._apply(self.number, self._name, [
            (self._served[number], array, float(factor))
            for (number, array), factor in zip(given.items(), factors, strict=True)
        ])
        return True

    def _clipping(self, norms: AnyArray) -> AnyArray:
        options = self._options
        if options.clipnorm is not None:
            return np.asarray(options.clipnorm / np.maximum(norms, options.clipnorm))
        if options.global_clipnorm is not None:
            norm = np.sqrt(np.dot(norms, norms))
            return np.full_like(norms, options.global_clipnorm / np.maximum(norm, options.global_clipnorm))
        return np.ones_like(norms)

    def _array(self, number: int, gradient: npt.ArrayLike | IndexedSlices) -> AnyArray:
        if isinstance(gradient, IndexedSlices):
            gradient = IndexedSlices(gradient.values, gradient.indices, self.variables[number].shape).to_dense()
        return self.variables[number].coerce(as_array(gradient))

    def take_average(self, numbers: tuple[int, ...]) -> None:
        """Local. Refuse: it is for the coordinator."""
        del numbers
        raise RuntimeError("finalize_variable_values is called on the coordinator, after `join`")

    def state(self) -> dict[str, Any]:
        """Local. Nothing."""
        return {}

    def load(self, saved: Mapping[str, Any]) -> None:
        """Local. Nothing."""
