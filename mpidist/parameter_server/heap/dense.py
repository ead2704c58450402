"""Variables in a server's heap, with two buffers each: one is whole while the next version is made in the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from mpidist.arrays import AnyArray
from mpidist.parameter_server.protocol.messages import CommitStep
from mpidist.variables.kinds.served import ServedPlace
from mpidist.variables.update.arithmetic import UpdateArithmetic, UpdateSettings, widened
from mpidist.variables.update.compiled import CompiledUpdate, is_wanted
from mpidist.variables.update.halves import scratch_blocks, state_dtype
from mpidist.variables.update.kernel import BLOCK_BYTES, Kernel, LayerKernel, Update
from mpidist.variables.update.options import OptimizerOptions
from mpidist.variables.update.overflow import Overflow, infinite_count, overflow_text

VERSION, BEGUN = 0, 1

# The bounds of a block, and there the state and the scratch of an update.
_Block = tuple[int, int, list[AnyArray], list[AnyArray]]


class HeapVariable:
    """A variable in the heap of this process.

    Args:
        memory: The heap.
        place: The place of the variable.
        name: A name for display and errors.

    Attributes:
        place, name: The constructor's argument.
    """

    def __init__(self, memory: AnyArray, place: ServedPlace, name: str = "") -> None:
        self.place = place
        self.name = name
        # Aligned words of eight bytes, each of which is written in one piece.
        self.words = memory[place.header : place.header + 16].view(np.uint64)
        self.buffers = [
            memory[begin : begin + place.bytes].view(place.dtype) for begin in place.buffers
        ]

    @property
    def current(self) -> AnyArray:
        """Local. The last version, flat; not to be changed."""
        return self.buffers[int(self.words[VERSION]) % 2]

    def change(self, make: Callable[[AnyArray, AnyArray], None]) -> None:
        """Local. Make the next version, and show it.

        Args:
            make: A function: `make(current, new)` fills `new`, whose content is that of the version before `current`.
        """
        current = self.current
        make(current, self.buffers[self.begin()])
        self.show()

    def begin(self) -> int:
        """Local. Begin the next version; returns the number of its buffer. Nothing else may change it before `show`."""
        version = int(self.words[VERSION]) + 1
        # Readers of this buffer see that it is not theirs any more.
        self.words[BEGUN] = version
        return version % 2

    def show(self) -> None:
        """Local. Show the version that was begun."""
        self.words[VERSION] = self.words[BEGUN]


class Updates:
    """The updates of one optimizer on the variables of this server.

    Args:
        kernel: The arithmetic.
        options: The options of the optimizer.
        slots: The state of each variable, by its number, in the order of `UpdateArithmetic.slots`.
        byte_count: The number of bytes that an update changes. Where it is large enough, updates are compiled.
        has_halves: Whether some variables are of half precision.
    """

    def __init__(
        self,
        kernel: Kernel | LayerKernel,
        options: OptimizerOptions,
        slots: Mapping[int, Sequence[HeapVariable]],
        byte_count: int = 0,
        *,
        has_halves: bool = False,
    ) -> None:
        self._overflow = Overflow()
        self._arithmetic = UpdateArithmetic(
            kernel, options, compiles=is_wanted(byte_count), has_halves=has_halves, overflow=self._overflow
        )
        self._slots = slots
        self._follows = options.use_ema

    def apply(self, variable: HeapVariable, gradient: AnyArray, step: CommitStep, factor: float) -> None:
        """Local. Update a variable; see `_apply`.

        Raises:
            OverflowError: State has become infinite. The program of this server ends with it, and so the job.
        """
        overflow = self._overflow
        with np.errstate(over="call", call=overflow.note):
            self._apply(variable, gradient, step, factor)
        if overflow.counts.tobytes() != overflow.seen:
            overflow.see()
            number = variable.place.number
            for name, slot in zip(self._arithmetic.kernel.slots, self._slots[number], strict=False):
                count = infinite_count(slot.current)
                if count:
                    raise OverflowError(overflow_text(f"number {number}", name, count, slot.current.dtype))

    def _apply(self, variable: HeapVariable, gradient: AnyArray, step: CommitStep, factor: float) -> None:
        """Local. Update a variable.

        Args:
            variable: The variable.
            gradient: The gradient, flat, of the variable's dtype; it is overwritten.
            step: The step of the optimizer.
            factor: The factor of the gradient.
        """
        states = [slot.current for slot in self._slots[variable.place.number]]
        if isinstance(self._arithmetic.kernel, LayerKernel):
            # The first of two passes leaves something there for the second one.
            gradient = gradient.astype(state_dtype(gradient.dtype), copy=False)

        def make(current: AnyArray, new: AnyArray) -> None:
            update = self._prepare(current, gradient, step, factor, states)
            # Compiled, it reads one version and writes the next.
            if not isinstance(update, CompiledUpdate) or not update.aside(current, new, gradient, states):
                for low, high, pieces, scratch in self._blocks(current.dtype, gradient, states):
                    # Copied while it is in the cache.
                    np.copyto(new[low:high], current[low:high])
                    update(new[low:high], gradient[low:high], pieces, scratch)
            if self._follows:
                follow = self._arithmetic.follow(step.iteration + 1)
                for low, high, pieces, scratch in self._blocks(current.dtype, gradient, states):
                    follow(new[low:high], gradient[low:high], pieces, scratch)

        variable.change(make)

    def state_of(self, number: int) -> set[int]:
        """Local. The numbers of a variable's state."""
        return {slot.place.number for slot in self._slots.get(number, ())}

    def _blocks(self, dtype: np.dtype[Any], gradient: AnyArray, states: Sequence[AnyArray]) -> list[_Block]:
        length = max(1, BLOCK_BYTES // state_dtype(dtype).itemsize)
        scratch = scratch_blocks(self._arithmetic.scratch_count, min(length, gradient.size), dtype)
        bounds = [(low, min(low + length, gradient.size)) for low in range(0, gradient.size, length)]
        return [
            (low, high, [state[low:high] for state in states], [block[: high - low] for block in scratch])
            for low, high in bounds
        ]

    def _prepare(
        self, current: AnyArray, gradient: AnyArray, step: CommitStep, factor: float, states: Sequence[AnyArray]
    ) -> Update:
        arithmetic, kernel, number = self._arithmetic, self._arithmetic.kernel, step.iteration + 1
        if not isinstance(kernel, LayerKernel):
            return arithmetic.prepare(UpdateSettings(number, step.rate, factor))
        direct = arithmetic.surround(kernel.direct(number) or _leave, factor=factor, keeps_gradient=True)
        for low, high, pieces, scratch in self._blocks(current.dtype, gradient, states):
            # It leaves the parameter alone.
            direct(current[low:high], gradient[low:high], pieces, scratch)
        keep = 1 - step.rate * arithmetic.decay
        norms = [float(np.sqrt(np.dot(wide, wide))) for wide in (widened(current), widened(gradient))]
        return arithmetic.surround(kernel.prepare(number, step.rate, keep * norms[0], norms[1]), keep=keep, clips=False)


def _leave(_: AnyArray, __: AnyArray, ___: Sequence[AnyArray], ____: Sequence[AnyArray]) -> None:
    """An update that changes nothing."""
