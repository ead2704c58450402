"""The plan of an optimizer on a worker: gradients go to the servers, with the factors of their clipping."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from mpidist.arrays import AnyArray, as_array
from mpidist.comm.arithmetic.rows import merge_rows
from mpidist.indexed_slices import IndexedSlices
from mpidist.parameter_server.heap.rows import pack
from mpidist.variables.kinds.served import ServedVariable
from mpidist.variables.kinds.sharded import ShardedVariable, rows_within, served_parts
from mpidist.variables.step.gradient import take_rows
from mpidist.variables.update.arithmetic import UpdateSettings, widened
from mpidist.variables.update.options import OptimizerOptions
from mpidist.variables.variable import BaseVariable, Gradient, Slot

Apply: TypeAlias = Callable[[int, str, Sequence[tuple[ServedVariable, AnyArray, float]]], None]


class ByShard(tuple[Gradient | None, ...]):
    """The gradients of the shards of one variable, in their order; None leaves a shard alone."""

    __slots__ = ()


class _Share(NamedTuple):
    """The gradient of a variable in one place.

    Attributes:
        part: The variable.
        indices: The indices of a table the rows, each of them once.
        array: The gradient, or that of these rows.
    """

    part: ServedVariable
    indices: AnyArray | None
    array: AnyArray


class _Cut(NamedTuple):
    """The gradient of a variable.

    Attributes:
        array: The whole; of a table that of its rows.
        shares: The shares of the shards.
    """

    array: AnyArray
    shares: Sequence[_Share]


class WorkerPlan:
    """See `UpdatePlan`.

    Args:
        apply: See `Worker.apply`.
        number: The number of the optimizer.
        name: The name of the optimizer.
        variables: That it updates.
        options: The options of the optimizer.
    """

    def __init__(
        self, apply: Apply, number: int, name: str, variables: Sequence[BaseVariable], options: OptimizerOptions
    ) -> None:
        self.number = number
        self._name = name
        self.variables = tuple(variables)
        self.slots: dict[str, Slot] = {}
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
        given = [self._cuts(number, gradient) for number, gradient in gradients.items()]
        norms = np.ones(len(given))
        if self._options.clips_norms or settings.must_be_finite:
            norms = np.array([_norm([cut.array for cut in cuts]) for cuts in given])
        if settings.must_be_finite and not np.isfinite(norms).all():
            return False
        factors = settings.factor * self._clipping(norms * settings.factor)
        self._apply(self.number, self._name, [
            (part, array if indices is None else pack(IndexedSlices(array, indices)), float(factor))
            for cuts, factor in zip(given, factors, strict=True) for cut in cuts for part, indices, array in cut.shares
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

    def _cuts(self, number: int, gradient: Gradient | ByShard) -> list[_Cut]:
        """The gradient of a variable, or those of its shards."""
        variable = self.variables[number]
        if isinstance(gradient, ByShard):
            pairs = zip(variable.parts, gradient, strict=True)
            return [_cut(part, one) for part, one in pairs if one is not None]
        return [_cut(variable, gradient)]

    def flush(self, count: int, settings: UpdateSettings) -> bool:
        """Local. Nothing: gradients are not accumulated over closures."""
        del count, settings
        return True

    def take_average(self, numbers: tuple[int, ...], moves: int = 0) -> None:
        """Local. Refuse: it is for the coordinator."""
        del numbers, moves
        raise RuntimeError("finalize_variable_values is called on the coordinator, after `join`")

    def state(self) -> dict[str, Any]:
        """Local. Nothing."""
        return {}

    def load(self, saved: Mapping[str, Any]) -> None:
        """Local. Nothing."""


def _cut(variable: BaseVariable, gradient: Gradient) -> _Cut:
    parts = served_parts(variable)
    rows = variable.rows if isinstance(variable, ShardedVariable) else [slice(None)]
    if variable.sparse_gradient:
        merged = _merged(variable, gradient)
        # A step counts, though there may be no rows: one server hears of it.
        if len(parts) == 1 or not len(merged.indices):
            return _Cut(merged.values, [_Share(parts[0], merged.indices, merged.values)])
        cut = [(part, rows_within(merged, own)) for part, own in zip(parts, rows, strict=True)]
        return _Cut(merged.values, [_Share(part, own.indices, own.values) for part, own in cut if len(own.indices)])
    if isinstance(gradient, IndexedSlices):
        gradient = IndexedSlices(gradient.values, gradient.indices, variable.shape).to_dense()
    array = variable.coerce(as_array(gradient))
    if len(parts) == 1:
        return _Cut(array, [_Share(parts[0], None, array)])
    return _Cut(array, [_Share(part, None, array[own]) for part, own in zip(parts, rows, strict=True)])


def _norm(arrays: Sequence[AnyArray]) -> float:
    norms = [np.linalg.norm(widened(array).reshape(-1)) for array in arrays]
    return float(norms[0] if len(norms) == 1 else np.linalg.norm(norms))


def _merged(variable: BaseVariable, gradient: Gradient) -> IndexedSlices:
    """The gradient of a table, each row once."""
    indices, values = take_rows(gradient, variable)
    width = int(math.prod(variable.shape[1:]))
    numbers, sums = merge_rows(indices.astype(np.int64, copy=False), values.reshape(len(indices), width))
    return IndexedSlices(sums, numbers)
