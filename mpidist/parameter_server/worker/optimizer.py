"""An optimizer in a function that runs on a worker: the coordinator gives its step and its learning rate."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from mpidist.optimizers.optimizer import Optimizer
from mpidist.parameter_server.protocol.endpoint import Station
from mpidist.parameter_server.protocol.references import handle_of_variable, load
from mpidist.parameter_server.protocol.thread_guard import OwnersLock
from mpidist.parameter_server.protocol.window_turns import Turn
from mpidist.parameter_server.worker.plan import Apply, ByShard, WorkerPlan
from mpidist.variables.update.arithmetic import UpdateSettings
from mpidist.variables.update.kernel import Kernel, LayerKernel
from mpidist.variables.update.options import OptimizerOptions
from mpidist.variables.variable import BaseVariable, Gradient, UpdatePlan

# The name of the question with which a worker asks the chief to build an optimizer.
BUILD = "build"
_OF_THE_COORDINATOR = frozenset({"iterations", "learning_rate"})


class Stepping(Protocol):
    """A worker, as its optimizers need it.

    Attributes:
        lock: See `OwnThreads`.
        turn: To use the window.
        apply: See `Worker.apply`.
    """

    lock: OwnersLock
    turn: Turn

    @property
    def apply(self) -> Apply:
        """Local. See `Worker.apply`."""
        ...


class Builder:
    """Builds the optimizers of one worker, as the coordinator has built them, or is asked to.

    Args:
        worker: Their steps are its changes; asking is its turn.
        station: The station of the worker.
        coordinator: The rank of the coordinator.
        find: Gives the variable of a handle.
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
            number: The number of its plan; of one that is not built, the number by which to ask for it.
            described: The description of `Names.name_of`.
            is_built: Whether it is built.
        """
        kernel, options, name, *variables = described
        optimizer = WorkerOptimizer(kernel, name=name, builder=self, key=0 if is_built else number, **options)
        if is_built:
            optimizer.build_as(number, *variables)
        return optimizer

    @contextlib.contextmanager
    def during(self, number: int, name: str) -> Iterator[None]:
        """Local. Surround the building of an optimizer."""
        self._planned = number, name
        try:
            yield
        finally:
            self._planned = None

    def plan(self, variables: Sequence[BaseVariable], options: OptimizerOptions) -> UpdatePlan:
        """Local. The plan of the optimizer that is being built.

        Raises:
            ValueError: It is one that a function has made, which has no state on servers.
        """
        if self._planned is None:
            raise ValueError(
                "an optimizer cannot be made inside a function that runs on a worker: make it in `with "
                "strategy.scope():` on the coordinator, and use it in the function"
            )
        return WorkerPlan(self._worker.apply, *self._planned, variables, options)

    def ask(self, key: int, variables: Sequence[BaseVariable]) -> tuple[int, Sequence[BaseVariable]]:
        """Local. Let the coordinator build an optimizer on these variables, unless it has; its number and variables.

        Raises:
            Exception: See `Optimizer.build`.
        """
        handles = [handle_of_variable(one) for one in variables]
        # As for a read: a thread of the function may use the window, and so may the one that pulls ahead.
        with self._worker.lock, self._worker.turn:
            number, of_plan = self._station.call(self._coordinator, BUILD, key, handles)
            return number, load(of_plan, self._find)


class WorkerOptimizer(Optimizer):
    """The optimizer of the coordinator, as a function on a worker sees it.

    Args:
        kernel: The arithmetic.
        name: For people.
        builder: Builds it.
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
        """Local. Be the optimizer of a plan of the coordinator.

        Args:
            number: The number of the plan.
            variables: The variables of the plan.
        """
        with self._builder.during(number, self.name):
            return super()._build(variables)

    def _build(self, variables: Iterable[BaseVariable]) -> UpdatePlan:
        """As of `Optimizer`. The plan may be one of other variables: another worker was first."""
        if not self._key or self._plan is not None:
            return super()._build(variables)
        return self.build_as(*self._builder.ask(self._key, list(variables)))

    def _by_number(self, pairs: Iterable[tuple[Gradient | None, BaseVariable]]) -> dict[int, Gradient]:
        """As of `Optimizer`; gradients may be those of shards."""
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
