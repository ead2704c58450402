"""The arena of central storage: one value per node, which may be in host memory while replicas compute on GPUs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from mpidist import arrays
from mpidist.arrays import AnyArray
from mpidist.recorder.calls import noted
from mpidist.variables.arena import Arena, mirrored_only
from mpidist.variables.kinds.aggregating import AggregatingVariable
from mpidist.variables.kinds.mirrored import MirroredVariable
from mpidist.variables.memory.device_copies import DeviceCopies
from mpidist.variables.memory.slab import Slab
from mpidist.variables.replicas import Replicas
from mpidist.variables.step.arena_plan import ArenaPlan
from mpidist.variables.update.arithmetic import UpdateSettings
from mpidist.variables.update.kernel import Kernel, LayerKernel
from mpidist.variables.update.options import OptimizerOptions
from mpidist.variables.variable import BaseVariable, Gradient, UpdatePlan


class CentralArena(Arena):
    """Collective. The home of `CentralStorageStrategy`'s variables, in host memory or on the one GPU of a single rank.

    Args:
        replicas: The strategy's ranks, and their collectives.
        shared: See `Arena`.
        on_gpu: Whether variables and state are on this rank's GPU.
        copies: The copies of variables in host memory, where this rank computes on a GPU; otherwise None.
    """

    def __init__(
        self, replicas: Replicas, *, shared: bool | None = None, on_gpu: bool = False,
        copies: DeviceCopies | None = None,
    ) -> None:
        super().__init__(replicas, shared=shared, on_gpu=on_gpu)
        self._copies = copies

    @property
    @override
    def mirrored_kind(self) -> Callable[..., MirroredVariable]:
        """Local. Makes an `AggregatingVariable`."""
        return partial(AggregatingVariable, copies=self._copies)

    @override
    def create_variable(
        self, initial_value: npt.ArrayLike | BaseVariable | Callable[[], npt.ArrayLike], **arguments: Any
    ) -> BaseVariable:
        """Collective. See `Home.create_variable`; a value on a GPU is copied to host memory."""
        if self._copies is not None and not isinstance(initial_value, BaseVariable):
            initial_value = partial(_on_host, initial_value)
        return super().create_variable(initial_value, **arguments)

    @override
    @noted("building an optimizer")
    def plan(
        self, variables: Sequence[BaseVariable], kernel: Kernel | LayerKernel, options: OptimizerOptions
    ) -> UpdatePlan:
        """Collective. See `Arena.plan`."""
        if self._copies is None:
            return super().plan(variables, kernel, options)
        return CentralPlan(mirrored_only(variables), kernel, options, self._copies)

    @override
    def write(
        self, slab: Slab, function: Callable[[], object], name: str, detail: Hashable, sign: int | None = None
    ) -> None:
        """Collective. See `ArenaMemory.write`."""
        if self._copies is None:
            super().write(slab, function, name, detail, sign)
            return
        with self._copies.renewed():
            super().write(slab, function, name, detail, sign)

    @override
    def reserve(self, count: int, dtype: np.dtype[Any], *, shared: bool) -> Slab:
        """Collective. See `ArenaMemory.reserve`."""
        slab = super().reserve(count, dtype, shared=shared)
        return slab if self._copies is None else self._copies.lock_pages(slab)

    @override
    def _new_slab(self, dtype: np.dtype[Any], count: int) -> Slab:
        slab = super()._new_slab(dtype, count)
        return slab if self._copies is None else self._copies.lock_pages(slab)


class CentralPlan(ArenaPlan):
    """Collective. An optimizer's plan over variables in host memory, whose gradients GPUs compute.

    Args:
        variables: The variables of the optimizer, the same list on every rank.
        kernel: The arithmetic, which runs on CPUs.
        options: The options of the optimizer.
        copies: This rank's copies of the variables.
    """

    def __init__(
        self, variables: Sequence[MirroredVariable], kernel: Kernel | LayerKernel, options: OptimizerOptions,
        copies: DeviceCopies,
    ) -> None:
        super().__init__(variables, kernel, options)
        self._copies = copies
        # Sums of several calls, and sums over the ranks, do not go through a view of this rank's own gradient.
        self._fills_views = not options.gradient_accumulation_steps
        self._on_device: dict[int, AnyArray] = {}

    @override
    def gradient(self, number: int) -> AnyArray:
        """Local. See `UpdatePlan.gradient`; an array on this rank's GPU, from where `apply` copies it."""
        if number not in self._on_device:
            place = self._plan.gradients[number]
            self._on_device[number] = arrays.gpu_namespace().zeros(place.shape, place.dtype)
        return self._on_device[number]

    @override
    def accumulate(self, gradients: Mapping[int, Gradient], factor: float, *, is_summed: bool) -> None:
        """Local. See `UpdatePlan.accumulate`."""
        super().accumulate(self._copies.on_host(gradients), factor, is_summed=is_summed)

    @override
    def apply(
        self, gradients: Mapping[int, Gradient], settings: UpdateSettings, *, numbers: tuple[int, ...] | None = None
    ) -> bool:
        """Collective. See `UpdatePlan.apply`."""
        view = self._view if self._fills_views and not settings.is_summed else None
        fetched = self._copies.on_host(gradients, view)
        with self._copies.renewed():
            return super().apply(fetched, settings, numbers=numbers)

    @override
    def flush(self, count: int, settings: UpdateSettings) -> bool:
        """Collective. See `UpdatePlan.flush`."""
        with self._copies.renewed():
            return super().flush(count, settings)

    @override
    def take_average(self, numbers: tuple[int, ...], moves: int = 0) -> None:
        """Collective. See `UpdatePlan.take_average`."""
        with self._copies.renewed():
            super().take_average(numbers, moves)

    def _view(self, number: int) -> AnyArray:
        # A variable whose gradients are rows has none.
        return self._plan.gradients[number]


def _on_host(value: Any) -> AnyArray:
    """An initial value, or what a function makes of it, in host memory; Python's own numbers stay what they are."""
    made = value() if callable(value) else value
    return arrays.to_host(made) if arrays.is_cupy(made) else made
