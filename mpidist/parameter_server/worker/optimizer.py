"""An optimizer in a function that runs on a worker: the coordinator gives its step and its learning rate.

Gradients go to the servers, with the factors of their clipping.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from mpidist.arrays import AnyArray, as_array
from mpidist.comm.arithmetic.rows import merge_rows
from mpidist.comm.calls.order import CallOrder
from mpidist.comm.group.communicator import Communicator
from mpidist.indexed_slices import IndexedSlices
from mpidist.optimizers.optimizer import Optimizer
from mpidist.parameter_server.heap.rows import pack
from mpidist.parameter_server.protocol.endpoint import Station
from mpidist.parameter_server.protocol.references import handle_of_variable, load
from mpidist.parameter_server.protocol.thread_guard import WindowLock
from mpidist.variables.kinds.served import ServedVariable
from mpidist.variables.kinds.sharded import ShardedVariable, rows_within, served_parts
from mpidist.variables.step.gradient import take_rows
from mpidist.variables.update.arithmetic import UpdateSettings, widened
from mpidist.variables.update.kernel import Kernel, LayerKernel
from mpidist.variables.update.options import OptimizerOptions
from mpidist.variables.variable import BaseVariable, Gradient, Slot, UpdatePlan

Apply: TypeAlias = Callable[[int, str, Sequence[tuple[ServedVariable, AnyArray, float]]], None]

# The name of the question with which a worker asks the chief to build an optimizer.
BUILD = "build"
_OF_THE_COORDINATOR = frozenset({"iterations", "learning_rate"})


class ByShard(tuple[Gradient | None, ...]):
    """The gradients of the shards of one variable, in their order; None leaves a shard alone."""

    __slots__ = ()


class _Share(NamedTuple):
    """The gradient of a variable in one place.

    Attributes:
        part: The variable.
        indices: The indices of the rows of a table, each of them once; None for another variable.
        array: The gradient, or that of these rows.
    """

    part: ServedVariable
    indices: AnyArray | None
    array: AnyArray


class _Cut(NamedTuple):
    """The gradient of a variable.

    Attributes:
        array: The whole gradient; of a table that of its rows.
        shares: The shares of the shards.
    """

    array: AnyArray
    shares: Sequence[_Share]


class WorkerPlan:
    """See `UpdatePlan`.

    Args:
        apply: See `Worker.apply`.
        order: The calls of this worker, which no other rank makes.
        number: The number of the optimizer.
        name: The name of the optimizer.
        variables: The variables that it updates.
        options: The options of the optimizer.
    """

    def __init__(
        self, apply: Apply, order: CallOrder, number: int, name: str, variables: Sequence[BaseVariable],
        options: OptimizerOptions,
    ) -> None:
        self.number = number
        self._name = name
        self.variables = tuple(variables)
        self.slots: dict[str, Slot] = {}
        self._apply = apply
        self._order = order
        self._options = options
        self._clips = options.clips_norms
        self._gradients: dict[int, AnyArray] = {}

    def during(self) -> AbstractContextManager[object]:
        """Local. See `UpdatePlan.during`."""
        return self._order.during("apply_gradients")

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
        factors = np.full(len(given), settings.factor)
        if self._clips or settings.must_be_finite:
            norms = np.array([_norm([cut.array for cut in cuts]) for cuts in given])
            if settings.must_be_finite and not np.isfinite(norms).all():
                return False
            factors *= self._clipping(norms * settings.factor)
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
        """Local. Do nothing: gradients are not accumulated over closures."""
        del count, settings
        return True

    def take_average(self, numbers: tuple[int, ...], moves: int = 0) -> None:
        """Local. Refuse: it is for the coordinator."""
        del numbers, moves
        raise RuntimeError("finalize_variable_values is called on the coordinator, after `join`")

    def state(self) -> dict[str, Any]:
        """Local. Empty: the state is on the servers."""
        return {}

    def load(self, saved: Mapping[str, Any]) -> None:
        """Local. Do nothing: the state is on the servers."""


def _cut(variable: BaseVariable, gradient: Gradient) -> _Cut:
    parts = served_parts(variable)
    rows = variable.rows if isinstance(variable, ShardedVariable) else [slice(None)]
    if variable.sparse_gradient:
        merged = _merged(variable, gradient)
        # A step counts, though there may be no rows: one server gets it.
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


class Stepping(Protocol):
    """The part of a worker that its optimizers use.

    Attributes:
        lock: See `OwnThreads`.
        communicator: The communicator of this process alone.
        apply: See `Worker.apply`.
    """

    lock: WindowLock
    communicator: Communicator

    @property
    def apply(self) -> Apply:
        """Local. See `Worker.apply`."""
        ...


class Builder:
    """Builds the optimizers of one worker, as the coordinator has built them, or is asked to.

    Args:
        worker: The worker of the optimizers, which makes their steps.
        station: The station of the worker.
        coordinator: The rank of the coordinator.
        find: A function that returns the variable of a handle.
    """

    def __init__(
        self, worker: Stepping, station: Station, coordinator: int, find: Callable[[tuple[Any, ...]], Any]
    ) -> None:
        self._worker = worker
        self._station = station
        self._coordinator = coordinator
        self._find = find
        # The number and the name of the optimizer that is being built.
        self._planned: tuple[int, str] | None = None

    def make(self, number: int, described: tuple[Any, ...], *, is_built: bool) -> WorkerOptimizer:
        """Local. An optimizer of the coordinator.

        Args:
            number: The number of its plan; for an optimizer that is not built, the number by which to ask for it.
            described: The description of `Names.name_of`.
            is_built: Whether the optimizer is built.
        """
        kernel, options, name, *variables = described
        optimizer = WorkerOptimizer(kernel, name=name, builder=self, key=0 if is_built else number, **options)
        if is_built:
            optimizer.build_as(number, *variables)
        return optimizer

    @contextlib.contextmanager
    def during(self, number: int, name: str) -> Iterator[None]:
        """Local. Inside, an optimizer is built."""
        self._planned = number, name
        try:
            yield
        finally:
            self._planned = None

    def plan(self, variables: Sequence[BaseVariable], options: OptimizerOptions) -> UpdatePlan:
        """Local. The plan of the optimizer that is being built.

        Raises:
            ValueError: A function has made the optimizer, which has no state on servers.
        """
        if self._planned is None:
            raise ValueError(
                "an optimizer cannot be made inside a function that runs on a worker: make it in `with "
                "strategy.scope():` on the coordinator, and use it in the function"
            )
        order = self._worker.communicator.order
        return WorkerPlan(self._worker.apply, order, *self._planned, variables, options)

    def ask(self, key: int, variables: Sequence[BaseVariable]) -> tuple[int, Sequence[BaseVariable]]:
        """Local. Let the coordinator build an optimizer on these variables, unless it has; its number and variables.

        Raises:
            Exception: See `Optimizer.build`.
        """
        handles = [handle_of_variable(one) for one in variables]
        # As for a read: a thread of the function may use the window, and so may the one that pulls ahead.
        with self._worker.lock:
            number, of_plan = self._station.call(self._coordinator, BUILD, key, handles)
            return number, load(of_plan, self._find)


class WorkerOptimizer(Optimizer):
    """The optimizer of the coordinator, as functions on a worker use it.

    Args:
        kernel: The arithmetic.
        name: A name for display and errors.
        builder: The builder of the optimizer.
        key: The number by which to ask for it, where the coordinator has not built it; 0 where it has.
        options: See `Optimizer`.
    """

    def __init__(
        self, kernel: Kernel | LayerKernel, *, name: str, builder: Builder, key: int = 0, **options: Any
    ) -> None:
        super().__init__(kernel, 0.0, name=name, **options)
        self._builder = builder
        self._key = key
        for attribute in _OF_THE_COORDINATOR:
            super().__delattr__(attribute)
        self._is_made = True
        self._settle(WorkerOptimizer)

    def __getattr__(self, attribute: str) -> Any:
        if attribute in _OF_THE_COORDINATOR:
            raise self._refusal(attribute)
        raise AttributeError(f"{type(self).__name__!r} has no attribute {attribute!r}")

    def __setattr__(self, attribute: str, value: object) -> None:
        if attribute in _OF_THE_COORDINATOR and "_is_made" in vars(self):
            raise self._refusal(attribute)
        super().__setattr__(attribute, value)

    def _refusal(self, attribute: str) -> RuntimeError:
        return RuntimeError(
            f"{self.name}.{attribute} is not known on a worker: the coordinator gives step and learning rate when the "
            "function counts. Read it on the coordinator, and pass it as an argument; set it there, too"
        )

    def build_as(self, number: int, variables: Sequence[BaseVariable]) -> UpdatePlan:
        """Local. Take the plan of the coordinator's optimizer.

        Args:
            number: The number of the plan.
            variables: The variables of the plan.
        """
        with self._builder.during(number, self.name):
            return super()._build(variables)

    def _build(self, variables: Iterable[BaseVariable]) -> UpdatePlan:
        """See `Optimizer`. The plan may be for other variables: another worker was first."""
        if not self._key or self._plan is not None:
            return super()._build(variables)
        return self.build_as(*self._builder.ask(self._key, list(variables)))

    def _by_number(self, pairs: Iterable[tuple[Gradient | None, BaseVariable]]) -> dict[int, Gradient]:
        """See `Optimizer`; gradients may be those of shards."""
        by_shard: dict[int, tuple[BaseVariable, dict[int, Gradient | None]]] = {}
        others: list[tuple[Gradient | None, BaseVariable]] = []
        for gradient, variable in pairs:
            whole = getattr(variable, "whole", variable)
            if whole is variable:
                others.append((gradient, variable))
                continue
            known = by_shard.setdefault(id(whole), (whole, {}))[1]
            if id(variable) in known:
                raise ValueError(f"{self.name}: variable {variable.name!r} appears twice in the list; pass it once")
            known[id(variable)] = gradient
        gradients: dict[int, Any] = dict(super()._by_number(others))
        for whole, known in by_shard.values():
            number = self._number(whole)
            if number in gradients:
                raise ValueError(f"{self.name}: variable {whole.name!r} is in the list, and so are shards of it")
            if any(gradient is not None for gradient in known.values()):
                gradients[number] = ByShard(known.get(id(part)) for part in whole.parts)
        return gradients

    def _apply_whole(
        self, plan: UpdatePlan, gradients: Mapping[int, Gradient], factor: float, *, is_summed: bool,
        must_be_finite: bool,
    ) -> bool | None:
        return plan.apply(gradients, UpdateSettings(1, 0.0, factor, is_summed, must_be_finite))

    def __repr__(self) -> str:
        return f"<{self.name} on a worker>"
