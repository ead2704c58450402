"""The arena's plan of an optimizer: its state, and its updates, in as few passes as the options allow.

`open_update` chooses the way once, when the plan is made:

- one pass, in which sums and kernel are one (`DirectUpdate`);
- sums, then norms to clip by or to test, then the kernel (`MeasuredUpdate`);
- sums, then norms of each variable that the kernel itself needs, then the kernel (`LayerUpdate`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from mpidist.arguments import settings_of
from mpidist.arrays import AnyArray
from mpidist.comm.arithmetic.combine import is_half
from mpidist.comm.group.agreement import same_on_all
from mpidist.variables.kinds.mirrored import MirroredVariable
from mpidist.variables.memory.arena_memory import ArenaMemory
from mpidist.variables.step.accumulator import Accumulator
from mpidist.variables.step.alarm import Alarm
from mpidist.variables.step.average import MovingAverage
from mpidist.variables.step.compressed_step import CompressionErrors
from mpidist.variables.step.gradient import copy_of, require_same_gradients, take_rows, write_gradient
from mpidist.variables.step.measured import LayerUpdate, Limits, MeasuredUpdate, squares_of
from mpidist.variables.step.plan import Plan
from mpidist.variables.update.arithmetic import UpdateArithmetic, UpdateSettings
from mpidist.variables.update.compiled import TABLE_SHARE, is_wanted
from mpidist.variables.update.halves import MASTER_COPY
from mpidist.variables.update.kernel import Kernel, LayerKernel, require_rate
from mpidist.variables.update.options import ACCUMULATED, ACCUMULATES, OptimizerOptions
from mpidist.variables.update.overflow import infinite_count, overflow_text
from mpidist.variables.variable import Gradient, Slot

# `update_variables(numbers, settings)` is Collective: it sums the gradients of some variables over all replicas and
# updates these variables. It gives False, on every rank, if a gradient was not finite and nothing was updated.
UpdateVariables = Callable[[tuple[int, ...], UpdateSettings], bool]


class ArenaPlan:
    """Collective. Memory, state and updates of an optimizer whose variables live in an arena; see `UpdatePlan`.

    Args:
        variables: The variables of the optimizer, the same list on every rank.
        kernel: The arithmetic.
        options: The options of the optimizer.
        arena: See `Plan`.

    Attributes:
        variables: The constructor's argument.
        slots: The state by name, in the order of the variables.
    """

    def __init__(
        self, variables: Sequence[MirroredVariable], kernel: Kernel | LayerKernel, options: OptimizerOptions,
        arena: ArenaMemory | None = None,
    ) -> None:
        given_arena, arena = arena, variables[0].arena if arena is None else arena
        # First: what follows is collective, and depends on the kernel.
        same_on_all(
            arena.communicator, "the optimizer and its options", f"{settings_of(kernel)} with {settings_of(options)}",
            "Each rank updates a part of the variables: make the optimizer the same way on every rank.",
        )
        on_gpu = arena.namespace is not np
        node_size = arena.communicator.node.size
        updated_bytes = sum(v.size * v.dtype.itemsize // (TABLE_SHARE if v.sparse_gradient else 1) for v in variables)
        compiles = not on_gpu and is_wanted(updated_bytes // node_size, node_size)
        halves = [number for number, variable in enumerate(variables) if is_half(variable.dtype)]
        self._kernel = kernel
        # Without state an overflow shows in the variable itself.
        self._alarm = Alarm(arena) if kernel.slots and not on_gpu else None
        arithmetic = UpdateArithmetic(
            kernel, options, on_gpu=on_gpu, compiles=compiles, has_halves=bool(halves),
            overflow=None if self._alarm is None else self._alarm.overflow,
        )
        self.variables = tuple(variables)
        self._plan = plan = Plan(
            variables, arithmetic.slots, arithmetic.scratch_count, has_directions=isinstance(kernel, LayerKernel),
            has_master=options.master_copy, arena=given_arena,
        )
        self._update = open_update(plan, arithmetic, options)
        self._finite_update = open_update(plan, arithmetic, options, must_be_finite=True)
        self._errors = CompressionErrors(variables, plan.compression_states)
        self._accumulator = Accumulator(variables) if options.gradient_accumulation_steps else None
        self._accumulated = options.accumulated
        self._counts_missing = options.missing_gradients == "zero"
        self._average = MovingAverage(plan, arithmetic, options) if options.use_ema else None
        self._checks = arena.options.check
        self._communicator = self._compared_over = arena.communicator
        # Where no rank has all state, all ranks must learn of an overflow that one has noted.
        self._heard_by = arena.communicator if plan.is_sharded or given_arena is not None else None
        self._order, self._owner = arena.communicator.order, arena.strategy_number
        numbers = range(len(variables))
        self.slots: dict[str, Slot] = {
            name: [plan.slot(name, number) for number in numbers] for name in arithmetic.slots
        }
        if options.master_copy and halves:
            self.slots[MASTER_COPY] = {number: plan.slot(MASTER_COPY, number) for number in halves}
        if self._accumulator is not None:
            self.slots[ACCUMULATED] = [*self._accumulator.sums]

    def during(self) -> AbstractContextManager[object]:
        """Local. See `UpdatePlan.during`; a step in it is signed there, and is no call of its own."""
        return self._order.during("apply_gradients", self._owner)

    def gradient(self, number: int) -> AnyArray:
        """Local. See `UpdatePlan.gradient`."""
        return self._plan.gradients[number]

    def accumulate(self, gradients: Mapping[int, Gradient], factor: float, *, is_summed: bool) -> None:
        """Local, and Collective under `CommunicationOptions(check=True)`. See `UpdatePlan.accumulate`."""
        self._plan.arena.require_open()
        if self._accumulator is None:
            raise RuntimeError("gradients are accumulated only under `gradient_accumulation_steps`")
        if self._checks and is_summed:
            require_same_gradients(self._compared_over, gradients, self.variables)
        self._accumulator.add(gradients, factor, is_summed=is_summed)

    def apply(
        self, gradients: Mapping[int, Gradient], settings: UpdateSettings, *, numbers: tuple[int, ...] | None = None
    ) -> bool:
        """Collective. See `UpdatePlan.apply`; the gradients of variables with these numbers are written already."""
        if self._plan.arena.is_closed:
            self._plan.arena.require_open()
        if numbers is None:
            if self._accumulator is not None:
                return self._apply_mean(self._accumulator, gradients, settings)
            numbers = self._write(gradients, is_summed=settings.is_summed)
        if self._counts_missing and not settings.is_summed and self._communicator.size > 1:
            numbers = self._with_missing(numbers)
        # A checkpoint had errors of gradients that are no longer compressed.
        if self._errors.owed and not settings.is_summed:
            self._errors.pay(numbers, self._plan.gradients)
        update, alarm = self._finite_update if settings.must_be_finite else self._update, self._alarm
        # For copies that other threads of this rank make: it holds until all ranks of the node have written.
        with self._plan.arena.guard:
            if alarm is None:
                was_applied = update(numbers, settings)
            else:
                if alarm.text:
                    alarm.hear(self._overflowed, self._heard_by)
                # Watched here: a step pays for each function that it enters.
                overflow = alarm.overflow
                with np.errstate(over="call", call=overflow.note):
                    was_applied = update(numbers, settings)
                if alarm.rings(self._heard_by) if self._heard_by else overflow.counts.tobytes() != overflow.seen:
                    alarm.hear(self._overflowed, self._heard_by)
            if was_applied and self._average is not None:
                self._average.follow(settings.step, numbers, settings.moves)
        return was_applied

    def flush(self, count: int, settings: UpdateSettings) -> bool:
        """Collective. See `UpdatePlan.flush`."""
        if self._accumulator is None:
            return True
        self._plan.arena.require_open()
        with self._order.enter("flush", self._plan.number, None, self._owner):
            same_on_all(
                self._communicator, "the number of calls of apply_gradients since the last update, at `flush`,", count,
                "Call apply_gradients equally often on every rank, with None where a rank has no gradient.",
            )
        return self._apply_mean(self._accumulator, {}, settings, after=count) if count else True

    def _apply_mean(
        self, accumulator: Accumulator, gradients: Mapping[int, Gradient], settings: UpdateSettings,
        after: int | None = None,
    ) -> bool:
        """Collective. Update by the mean of several calls; `after` is the number of calls before a `flush`."""
        # First: the call can be made again with another rate, and the sums are then what they were.
        require_rate(self._kernel, settings.step, settings.learning_rate)
        count, factor, is_summed = after or self._accumulated, settings.factor, settings.is_summed
        if self._checks and is_summed:
            require_same_gradients(self._compared_over, gradients, self.variables)
        views, calls = self._plan.gradients, accumulator.calls
        if after is None:
            calls = accumulator.with_call(factor, is_summed=is_summed)
        numbers = accumulator.hand_over(self._apart(gradients), factor, views, is_summed=is_summed)
        moves = 0 if self._average is None or settings.step == 1 else count - 1
        settings = settings._replace(factor=1 / count, is_summed=False, calls=calls, moves=moves)
        try:
            was_applied = self.apply({}, settings, numbers=numbers)
        except BaseException:
            # The call can also be made again where the ranks have refused it.
            accumulator.take_back(gradients, factor, views, is_summed=is_summed)
            raise
        accumulator.clear()
        return was_applied

    def _with_missing(self, numbers: tuple[int, ...]) -> tuple[int, ...]:
        """Collective. The variables for which some rank has a gradient; of the others' this rank's becomes zero."""
        with self._order.enter("missing_gradients", self._plan.number, None, self._owner):
            everyone = self._communicator.all_gather_object(numbers)
        wanted = tuple(sorted({number for one in everyone for number in one}))
        for number in set(wanted) - set(numbers):
            self._plan.gradients[number][...] = 0
            if number in self._plan.tables:
                # It has got rows where the ranks have refused an earlier step.
                self._plan.tables[number].take()
        return wanted

    def take_average(self, numbers: tuple[int, ...], moves: int = 0) -> None:
        """Collective. See `UpdatePlan.take_average`."""
        if self._average is None:
            raise RuntimeError("the weights are averaged only under `use_ema`")
        with self._plan.arena.guard:
            self._average.overwrite(numbers, moves)

    def state(self) -> dict[str, Any]:
        """Local. See `UpdatePlan.state`."""
        tree: dict[str, Any] = {**self._errors.state()}
        if self._accumulator is not None:
            numbers = range(len(self.variables))
            tree[ACCUMULATES] = np.array([number in self._accumulator.numbers for number in numbers], np.uint8)
        return tree

    def load(self, saved: Mapping[str, Any]) -> None:
        """Collective. See `UpdatePlan.load`."""
        self._errors.load(saved)
        if self._accumulator is not None:
            flags = np.asarray(saved.get(ACCUMULATES, []))
            self._accumulator.numbers = {int(number) for number in np.flatnonzero(flags)}

    def _overflowed(self) -> str:
        """Local. The text of the error for state that is infinite on this rank; or nothing."""
        for name in self._kernel.slots:
            for number, variable in enumerate(self.variables):
                state = self._plan.elements(name, number)
                count = infinite_count(state)
                if count:
                    return overflow_text(variable.name, name, count, state.dtype)
        return ""

    def _write(self, gradients: Mapping[int, Gradient], *, is_summed: bool) -> tuple[int, ...]:
        """Collective under `check`. Put gradients into the plan; returns the numbers of their variables, increasing."""
        if self._checks:
            require_same_gradients(self._compared_over, gradients if is_summed else None, self.variables)
        plan = self._plan
        for number, gradient in self._apart(gradients).items():
            if number in plan.tables:
                plan.tables[number].put(*take_rows(gradient, plan.variables[number]))
            elif not is_summed or plan.takes_sum(number):
                write_gradient(plan.gradients[number], gradient, plan.variables[number])
        return tuple(sorted(gradients))

    def _apart(self, gradients: Mapping[int, Gradient]) -> Mapping[int, Gradient]:
        """The gradients, copied where they are in the view of another variable's, which may be written before."""
        plan, views = self._plan, self._plan.gradients
        copies: dict[int, Gradient] = {}
        for number, given in gradients.items():
            # Most own their memory, and have no base.
            if getattr(given, "base", given) is not None and given is not views[number] and plan.holds(given):
                copies[number] = copy_of(given)
        return {**gradients, **copies} if copies else gradients


def open_update(
    plan: Plan, arithmetic: UpdateArithmetic, options: OptimizerOptions, *, must_be_finite: bool = False
) -> UpdateVariables:
    """Local. The way of an optimizer's updates.

    Args:
        plan: The plan of the variables.
        arithmetic: The arithmetic of the optimizer.
        options: The options of the optimizer.
        must_be_finite: Whether updates in which a sum is not finite are skipped.
    """
    kernel = arithmetic.kernel
    squares = squares_of(in_order=plan.arena.options.reproducible, compiles=arithmetic.compiles)
    limits = Limits(options, squares, must_be_finite=must_be_finite)
    if isinstance(kernel, LayerKernel):
        return LayerUpdate(plan, kernel, arithmetic, limits, squares)
    if limits.are_measured:
        return MeasuredUpdate(plan, kernel, arithmetic, limits)
    return DirectUpdate(plan, kernel, arithmetic)


class DirectUpdate:
    """An update in one pass: each block is summed and updated while it is in the cache.

    Args:
        plan: The plan of the variables.
        kernel: The arithmetic.
        arithmetic: The arithmetic of the kernel, with the work around it.
    """

    def __init__(self, plan: Plan, kernel: Kernel, arithmetic: UpdateArithmetic) -> None:
        self._plan = plan
        self._kernel = kernel
        self._arithmetic = arithmetic if arithmetic.is_needed else None

    def __call__(self, numbers: tuple[int, ...], settings: UpdateSettings) -> bool:
        """Collective. See `UpdateVariables`."""
        update = self._kernel.prepare(settings.step, settings.learning_rate)
        if self._arithmetic is not None:
            keep = 1 - settings.learning_rate * self._arithmetic.decay
            update = self._arithmetic.surround(update, keep=keep, factor=settings.factor, moves=settings.moves)
        self._plan.step(numbers, is_summed=settings.is_summed).apply(update, settings)
        return True
