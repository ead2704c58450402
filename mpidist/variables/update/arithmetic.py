"""The arithmetic around a kernel: unscaling, clipping by value, decay, and the moving average of the weights.

All of it works on one block of parameter, gradient and slots, in any memory: a rank applies it to its slice of
node memory, a server to its shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mpidist.arrays import AnyArray
from mpidist.variables.update.compiled import CompiledUpdate
from mpidist.variables.update.fused import fused
from mpidist.variables.update.halves import in_float32
from mpidist.variables.update.kernel import Kernel, LayerKernel, Update
from mpidist.variables.update.options import OptimizerOptions
from mpidist.variables.update.overflow import Overflow, loud
from mpidist.variables.update.parts import parts_of

# The slot of the moving average. It comes after the kernel's own slots, which are all that a kernel gets.
AVERAGE = "average"


class UpdateSettings(NamedTuple):
    """The numbers of one update.

    Attributes:
        step: The number of the update, from 1.
        learning_rate: The learning rate of this update.
        factor: The factor of the sums of the gradients.
        is_summed: Whether the gradients are the sums over all replicas already.
        must_be_finite: Whether the update is skipped if an element of a sum is not finite.
        calls: The calls whose gradients were accumulated: factor, `is_summed`, and how many in a row are alike.
        moves: Number of moves of the average towards the parameter before it changes.
    """

    step: int
    learning_rate: float
    factor: float = 1.0
    is_summed: bool = False
    must_be_finite: bool = False
    calls: tuple[tuple[float, bool, int], ...] = ()
    moves: int = 0

    def __str__(self) -> str:
        """Local. The numbers for people, in errors."""
        calls = ", ".join(
            f"{count} calls{f' with factor {factor:g}' if factor != 1 else ''}{' of sums' if is_summed else ''}"
            for factor, is_summed, count in self.calls
        )
        return (
            f"step {self.step}, learning rate {self.learning_rate:g}, factor {self.factor:g}"
            f"{', of finite numbers' if self.must_be_finite else ''}{f', after {calls}' if calls else ''}"
        )


def slots_of(kernel: Kernel | LayerKernel, options: OptimizerOptions) -> dict[str, complex]:
    """Local. Name and initial value of every slot, in their order: the kernel's, then the average's if there is one."""
    return {**kernel.slots, **({AVERAGE: 0.0} if options.use_ema else {})}


def widened(array: AnyArray) -> AnyArray:
    """Local. The numbers in double precision, of complex ones the magnitudes: for a norm."""
    return np.abs(array).astype(np.float64, copy=False) if array.dtype.kind == "c" else array.astype(np.float64)


class UpdateArithmetic:
    """A kernel with the element-wise work around it.

    Args:
        kernel: The kernel of the updates.
        options: The options of the optimizer.
        on_gpu: Whether the blocks are on a GPU, where one kernel does all the work.
        compiles: Whether updates in host memory are compiled; see `compiled.is_wanted`.
        has_halves: Whether some parameters are of half precision.
        overflow: The watch over compiled updates.

    Attributes:
        kernel: The constructor's argument.
        slots: Name and initial value of every slot, in the order in which an update gets them.
        scratch_count: Number of scratch blocks that an update gets.
        decay: The fraction that the parameters lose in an update, times the learning rate.
        clipvalue: The clipvalue of the options.
        compiles: The constructor's argument.
        is_needed: Whether there can be any work around the kernel.
    """

    def __init__(
        self, kernel: Kernel | LayerKernel, options: OptimizerOptions, *, on_gpu: bool = False, compiles: bool = False,
        has_halves: bool = False, overflow: Overflow | None = None,
    ) -> None:
        self.kernel = kernel
        self.slots = slots_of(kernel, options)
        self.scratch_count = max(kernel.scratch_count, int(options.use_ema))
        self.decay = options.decay
        self.clipvalue = options.clipvalue
        self.is_needed = bool(
            on_gpu or compiles or has_halves
            or options.decay or options.clipvalue is not None or options.use_ema or options.accumulated > 1
        )
        self._kernel_slots = len(kernel.slots)
        self._kernel_scratch = kernel.scratch_count
        self._hides_slots = options.use_ema
        self._momentum = options.ema_momentum
        self._on_gpu = on_gpu
        self.compiles = compiles
        self._has_halves = has_halves
        self._overflow = overflow
        self._has_master = options.master_copy

    def prepare(self, settings: UpdateSettings) -> Update:
        """Local. The whole update of one step, for a kernel that needs no norms.

        Args:
            settings: The settings of the step; `factor` includes what clipping by norms leaves of the gradient.

        Returns:
            `update(parameter, gradient, slots, scratch)` on flat blocks of one dtype, all in place; for parameters of
            half precision see `in_float32`. The gradient is the sum over all replicas, and may be overwritten.

        Raises:
            TypeError: A `LayerKernel`, whose updates depend on norms of whole variables.
        """
        if isinstance(self.kernel, LayerKernel):
            raise TypeError(f"expected a kernel whose update is element-wise, got {type(self.kernel).__name__}")
        update = self.kernel.prepare(settings.step, settings.learning_rate)
        if not self.is_needed and settings.factor == 1:
            return update
        return self.surround(update, keep=1 - settings.learning_rate * self.decay, factor=settings.factor)

    def surround(
        self,
        update: Update,
        *,
        keep: float = 1.0,
        factor: float = 1.0,
        clips: bool = True,
        keeps_gradient: bool = False,
        moves: int = 0,
    ) -> Update:
        """Local. An update with the work around it.

        Args:
            update: The update of the kernel, for one step.
            keep: The factor with which the parameter is multiplied first.
            factor: The factor with which the gradient is multiplied first.
            clips: Whether the gradient is then clipped by value.
            keeps_gradient: Whether the content that the update leaves in the gradient is read later.
            moves: See `UpdateSettings`.
        """
        clipvalue = self.clipvalue if clips else None
        if keep != 1 or factor != 1 or clipvalue is not None or self._hides_slots:
            update = _surround(update, self._kernel_slots, keep=keep, factor=factor, clipvalue=clipvalue)
        if moves:
            update = _move_before(update, self._kernel_slots, self._momentum**moves)
        if self._on_gpu and self._kernel_slots and not keeps_gradient:
            update = loud(update, self._kernel_slots)
        return self._quick(update, max(self._kernel_scratch, int(moves > 0)), keeps_gradient=keeps_gradient)

    def _quick(self, update: Update, scratch_count: int, *, keeps_gradient: bool = False) -> Update:
        """The update in one pass over memory where that is quicker, for all dtypes of parameters."""
        count = len(self.slots)
        if self.compiles:
            update = CompiledUpdate(
                update, count, scratch_count, keeps_gradient=keeps_gradient, overflow=self._overflow
            )
            update.widen(self._widened)
            return update
        # In host memory, block by block in a cache, NumPy's calls are best one by one.
        if self._on_gpu:
            update = fused(update, count, scratch_count, keeps_gradient=keeps_gradient)
        return self._widened(update)

    def follow(self, step: int, moves: int = 1) -> Update:
        """Local. The update that moves the average towards the parameter, and leaves the parameter alone.

        Args:
            step: The step of the update that has just changed the parameter. In step 1 the average becomes its value.
            moves: Number of moves.
        """
        momentum, is_first = self._momentum**moves, step == 1

        def move(
            parameter: AnyArray, _gradient: AnyArray, slots: Sequence[AnyArray], scratch: Sequence[AnyArray]
        ) -> None:
            if is_first:
                np.copyto(slots[-1], parameter)
            else:
                _move(parameter, slots[-1], scratch[0], momentum)

        if self.compiles and not is_first:
            return self._quick(move, 1)
        return self._widened(move)

    def take(self, moves: int = 0) -> Update:
        """Local. The update that sets the parameter to its average, after the given number of further moves."""
        take: Update = take_average
        if moves:
            take = _move_before(take, self._kernel_slots, self._momentum**moves)
        return self._widened(take)

    def _widened(self, update: Update) -> Update:
        return in_float32(update, len(self.slots), has_master=self._has_master) if self._has_halves else update


def _move(parameter: AnyArray, average: AnyArray, difference: AnyArray, momentum: float) -> None:
    np.subtract(parameter, average, out=difference)
    np.multiply(difference, 1 - momentum, out=difference)
    np.add(average, difference, out=average)


def _move_before(update: Update, place: int, momentum: float) -> Update:
    """The average, the slot at a place, moves towards the parameter before an update."""

    def moved(
        parameter: AnyArray, gradient: AnyArray, slots: Sequence[AnyArray], scratch: Sequence[AnyArray]
    ) -> None:
        _move(parameter, slots[place], scratch[0], momentum)
        update(parameter, gradient, slots, scratch)

    return moved


def take_average(
    parameter: AnyArray, _gradient: AnyArray, slots: Sequence[AnyArray], _scratch: Sequence[AnyArray]
) -> None:
    """Local. The update that sets the parameter to its average, on blocks of one dtype."""
    np.copyto(parameter, slots[-1])


def _surround(
    update: Update, slot_count: int, *, keep: float, factor: float, clipvalue: float | None
) -> Update:
    def surrounded(
        parameter: AnyArray, gradient: AnyArray, slots: Sequence[AnyArray], scratch: Sequence[AnyArray]
    ) -> None:
        if factor != 1:
            np.multiply(gradient, factor, out=gradient)
        if clipvalue is not None:
            parts = parts_of(gradient)
            np.clip(parts, -clipvalue, clipvalue, out=parts)
        if keep != 1:
            np.multiply(parameter, keep, out=parameter)
        update(parameter, gradient, slots[:slot_count], scratch)

    return surrounded
