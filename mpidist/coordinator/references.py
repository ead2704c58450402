"""Names: how workers get the objects that functions and arguments name, and which objects are sent once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from mpidist.coordinator.functions import is_of_this_process
from mpidist.coordinator.late_builds import LateBuilds
from mpidist.coordinator.remote_value import PerWorkerValues, RemoteValue
from mpidist.optimizers.loss_scale import LossScaleOptimizer
from mpidist.optimizers.optimizer import Optimizer
from mpidist.parameter_server.chief.chief import Chief
from mpidist.parameter_server.chief.plan import ServedPlan
from mpidist.parameter_server.protocol.references import (
    describe_variable,
    dump_arguments,
    handle_of_class,
    handle_of_variable,
)
from mpidist.parameter_server.queue.work import Name
from mpidist.strategy.parameter_server.strategy import ParameterServerStrategy
from mpidist.variables.kinds.served import ServedVariable
from mpidist.variables.kinds.sharded import ShardedVariable
from mpidist.variables.variable import BaseVariable

# Sent by their contents, without a further look.
_PLAIN = frozenset({tuple, list, dict, str, bytes, int, float, bool, type(None), np.ndarray})


class OwnContext:
    """Stands for the worker's `InputContext`."""


class Names:
    """The names of a coordinator's objects.

    Args:
        strategy: The strategy of the coordinator.
        chief: The chief of the strategy.
        builds: The optimizers that are built when workers ask.
    """

    def __init__(
        self, strategy: ParameterServerStrategy, chief: Chief, builds: LateBuilds
    ) -> None:
        self._builds = builds
        self._strategy = strategy
        self._chief = chief
        # The objects that are sent to a worker once, by kind and number.
        self._names: dict[tuple[str, int], Name] = {}

    def handle_of(self, given: object) -> tuple[Any, ...] | None:
        """Local. See `Naming.handle_of`.

        Raises:
            TypeError: The object must not be sent.
        """
        if type(given) in _PLAIN:
            return None
        if isinstance(given, (ServedVariable, ShardedVariable)):
            return handle_of_variable(given)
        if isinstance(given, Optimizer):
            if _is_unbuilt(given):
                return "unbuilt", self._builds.key_of(given)
            return "optimizer", _plan_of(given).number
        if isinstance(given, PerWorkerValues):
            return "resource", given.number
        if isinstance(given, RemoteValue):
            return "input" if self._chief.values.get(given.number) is given else "value", given.number
        if isinstance(given, OwnContext):
            return ("context",)
        if given is self._strategy:
            return ("strategy",)
        if isinstance(given, type) and self._strategy.roles.is_one_process:
            return handle_of_class(given)
        _require_sendable(given)
        return None

    def name_of(self, given: object) -> tuple[Name, ...]:
        """Local. See `Naming.name_of`."""
        if isinstance(given, ServedVariable):
            return (self._named("variable", given.place.number, lambda: describe_variable(given)),)
        if isinstance(given, ShardedVariable):
            shards = [name for one in given.variables for name in self.name_of(one)]
            return (*shards, self._named("sharded", given.key, lambda: describe_variable(given)))
        if isinstance(given, Optimizer) and _is_unbuilt(given):
            unbuilt = given.kernel, dataclasses.asdict(given.options), given.name
            return (self._named("unbuilt", self._builds.key_of(given), lambda: unbuilt),)
        if isinstance(given, Optimizer):
            plan = _plan_of(given)
            self._chief.optimizers[plan.number] = given
            described = plan.kernel, dataclasses.asdict(plan.options), given.name, list(plan.variables)
            variables = [name for variable in plan.variables for name in self.name_of(variable)]
            return (*variables, self._named("optimizer", plan.number, lambda: described))
        return ()

    def _named(self, kind: str, number: int, described: Callable[[], object]) -> Name:
        if (kind, number) not in self._names:
            self._names[kind, number] = Name(kind, number, dump_arguments(described(), handle_of_variable))
        return self._names[kind, number]

    def discard(self, kind: str, number: int) -> None:
        """Local. Forget an object that the program has deleted."""
        self._names.pop((kind, number), None)


def _require_sendable(given: object) -> None:
    """Refuse what must not be sent by its content."""
    if isinstance(given, BaseVariable):
        raise TypeError(
            f"variable {given.name!r} is not on a parameter server; variables are made in `with strategy.scope():`"
        )
    if isinstance(given, LossScaleOptimizer):
        raise TypeError(
            f"{given.name} keeps a scale that its steps change, and copies of it would drift apart, unseen by the "
            "coordinator and by checkpoints"
        )
    if is_of_this_process(given):
        raise TypeError("it exists in this process only")


def _is_unbuilt(optimizer: Optimizer) -> bool:
    """Whether an optimizer is built at its first use. One that keeps a state of its own is not sent at all."""
    if isinstance(optimizer, LossScaleOptimizer):
        _require_sendable(optimizer)
    return optimizer.plan is None


def _plan_of(optimizer: Optimizer) -> ServedPlan:
    if not isinstance(optimizer.plan, ServedPlan):
        raise TypeError(
            f"the state of optimizer {optimizer.name!r} is not on parameter servers: use one for variables of this "
            "strategy only"
        )
    return optimizer.plan
