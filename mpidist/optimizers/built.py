"""The part of an optimizer that exists once its variables are known: plan, state, and the ways of its updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mpidist.optimizers.accumulator import Accumulator
from mpidist.optimizers.average import MovingAverage
from mpidist.optimizers.kernel import Kernel, LayerKernel
from mpidist.optimizers.options import OptimizerOptions
from mpidist.optimizers.saving import COMPRESSION, NUMBERS, SUMS, load_list
from mpidist.optimizers.stepping import open_update
from mpidist.variables.mirrored import MirroredVariable
from mpidist.variables.step.compressed_step import CompressionErrors
from mpidist.variables.step.plan import Plan
from mpidist.variables.variable import Variable


class Built:
    """Plan and state of an optimizer.

    Collective. Args:
        variables: Of the optimizer, the same list on every rank.
        kernel: The arithmetic.
        options: For the work around the kernel.
        initial: Names and initial values of the slots.

    Attributes:
        plan: Of the variables.
        numbers: Of all variables.
        update: The way of an update.
        finite_update: The way of an update that is skipped where a sum is not finite.
        errors: Of compressed gradients.
        accumulator: Under `gradient_accumulation_steps`, else None.
        average: Under `use_ema`, else None.
        slots: The state by name, in the order of the variables.
    """

    def __init__(
        self,
        variables: Sequence[MirroredVariable],
        kernel: Kernel | LayerKernel,
        options: OptimizerOptions,
        initial: Mapping[str, float],
    ) -> None:
        self.plan = plan = Plan(variables, initial, max(kernel.scratch_count, int(options.use_ema)))
        self.numbers = tuple(range(len(variables)))
        self.update = open_update(plan, kernel, options)
        self.finite_update = open_update(plan, kernel, options, must_be_finite=True)
        self.errors = CompressionErrors(variables, plan.compression_states)
        self.accumulator = Accumulator(variables) if options.gradient_accumulation_steps else None
        self.average = MovingAverage(plan, options) if options.use_ema else None
        self._initial = initial
        self.slots: dict[str, list[Variable]] = {
            name: [plan.slot(name, number) for number in self.numbers] for name in initial
        }
        if self.accumulator is not None:
            self.slots[SUMS] = [*self.accumulator.sums]

    def state(self) -> dict[str, Any]:
        """Local. The tree that a checkpoint stores."""
        tree: dict[str, Any] = {**self.slots}
        tree.update({COMPRESSION + name: arrays for name, arrays in self.errors.state().items()})
        if self.accumulator is not None:
            tree[NUMBERS] = np.array([number in self.accumulator.numbers for number in self.numbers], np.uint8)
        return tree

    def load(self, saved: Mapping[str, Any], owner: str) -> None:
        """Collective. Take the state over from a checkpoint.

        Args:
            saved: A tree that `state` once gave, on any number of ranks.
            owner: For the errors.

        Raises:
            CheckpointError: State of other shapes.
        """
        self.errors.load({
            name.removeprefix(COMPRESSION): saved[name] for name in saved if name.startswith(COMPRESSION)
        })
        for name, targets in self.slots.items():
            load_list(targets, saved, name, self._initial.get(name, 0.0), owner)
        if self.accumulator is not None:
            flags = saved[NUMBERS].numpy() if NUMBERS in saved else []
            self.accumulator.numbers = {int(number) for number in np.flatnonzero(flags)}
