"""An optimizer in a function that runs on a worker: the coordinator gives its step and its learning rate."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from mpidist.optimizers.optimizer import Optimizer
from mpidist.parameter_server.worker.plan import ByShard
from mpidist.variables.update.arithmetic import UpdateSettings
from mpidist.variables.update.kernel import Kernel, LayerKernel
from mpidist.variables.variable import BaseVariable, Gradient, UpdatePlan

_OF_THE_COORDINATOR = frozenset({"iterations", "learning_rate"})


class WorkerOptimizer(Optimizer):
    """The optimizer of the coordinator, as a function on a worker sees it.

    Args:
        kernel: The arithmetic.
        name: For people.
        options: As of `Optimizer`.
    """

    def __init__(self, kernel: Kernel | LayerKernel, *, name: str, **options: Any) -> None:
        super().__init__(kernel, 0.0, name=name, **options)
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
                raise ValueError(f"{self.name}: variable {whole.name!r} stands in the list, and shards of it")
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
