"""Late builds: an optimizer that a function is the first to use is built on the chief, once, when a worker asks."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from mpidist import context
from mpidist.optimizers.optimizer import Optimizer
from mpidist.parameter_server.chief.chief import Chief
from mpidist.parameter_server.chief.plan import ServedPlan
from mpidist.parameter_server.protocol.endpoint import Station
from mpidist.parameter_server.protocol.messages import Call, Message
from mpidist.parameter_server.protocol.references import describing_handle_of, dump_arguments
from mpidist.parameter_server.worker.optimizer import BUILD
from mpidist.strategy.parameter_server.strategy import ParameterServerStrategy
from mpidist.variables.variable import BaseVariable


class LateBuilds:
    """The optimizers that were sent before they were built.

    Args:
        strategy: The strategy of the chief.
        chief: The chief.
        station: The station of the chief.
        find: A function that returns the variable of a handle.
    """

    def __init__(
        self, strategy: ParameterServerStrategy, chief: Chief, station: Station,
        find: Callable[[tuple[Any, ...]], BaseVariable],
    ) -> None:
        # Then the worker is this process, too.
        self._is_one_process = strategy.roles.is_one_process
        self._entry = context.Entry(strategy, None, chief)
        self._chief = chief
        self._station = station
        self._find = find
        self._optimizers: weakref.WeakValueDictionary[int, Optimizer] = weakref.WeakValueDictionary()
        self._keys: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._numbers = itertools.count(1)
        self._asked: list[tuple[int, Call]] = []
        station.route([(Call, BUILD)], self.take)

    def key_of(self, optimizer: Optimizer) -> int:
        """Local. The number by which workers ask for an optimizer."""
        key = self._keys.get(optimizer)
        if key is None:
            key = self._keys[optimizer] = next(self._numbers)
            self._optimizers[key] = optimizer
        return key

    def take(self, sender: int, message: Message) -> None:
        """Local. Note that a worker asks for an optimizer."""
        if isinstance(message, Call):
            self._asked.append((sender, message))
        if self._is_one_process:
            # It waits for the answer, and no other thread looks.
            self.look()

    def look(self) -> None:
        """Local. Answer the workers that have asked. Not while a message is handled, since it waits for servers."""
        while self._asked:
            sender, call = self._asked.pop(0)
            self._station.answer(sender, call, self.build)

    def build(self, key: int, handles: Sequence[tuple[Any, ...]]) -> tuple[int, bytes]:
        """Local. Build an optimizer, unless it is built.

        Args:
            key: The number of the optimizer.
            handles: The handles of the variables on which it is built, unless it is built already.

        Returns:
            The number of its plan, and the variables of the plan, dumped with handles that describe them.

        Raises:
            Exception: See `Optimizer.build`.
            RuntimeError: The program has deleted the optimizer.
        """
        optimizer = self._optimizers.get(key)
        if optimizer is None:
            raise RuntimeError("a function uses an optimizer that the program has deleted: keep the optimizer")
        if optimizer.plan is None:
            # Where this process is the worker, too, its variables are now those of the worker.
            context.push(self._entry)
            try:
                optimizer.build([self._find(handle) for handle in handles])
            finally:
                context.pop()
        plan = optimizer.plan
        if not isinstance(plan, ServedPlan):
            raise TypeError(f"the state of optimizer {optimizer.name!r} is not on parameter servers")
        self._chief.optimizers[plan.number] = optimizer
        return plan.number, dump_arguments(plan.variables, describing_handle_of)
