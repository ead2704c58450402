"""Overflows in updates: a square that is infinite though its gradient is not stops its variable for good.

No code searches for infinities in each step, which would be a pass over memory. The processor sets a flag when some
number was too large, for NumPy's functions and for compiled loops alike. Only then is the state looked at.
"""

from __future__ import annotations

import ctypes
import functools
import platform
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from mpidist.arrays import AnyArray
from mpidist.variables.update.kernel import Update
from mpidist.variables.update.parts import parts_of

# The bit of C's FE_OVERFLOW.
_FLAGS = {"x86_64": 8, "AMD64": 8, "aarch64": 4, "arm64": 4, "riscv64": 4, "ppc64le": 1 << 28}


class Overflow:
    """Whether a number of the updates was too large for its dtype; not each overflow makes state infinite.

    NumPy's functions are watched in `np.errstate(over="call", call=overflow.note)`, and compiled ones in `run`. Then
    `counts.tobytes() != seen` says that there is something new, and `see` makes it known.

    Args:
        counts: For each rank that updates the same state the number of its steps with overflows, modulo 256, of uint8.
            None: this process does it alone.
        own: The place of this rank.

    Attributes:
        counts: The constructor's argument, or one number.
        seen: The counts, as they were when `see` was called last.
    """

    def __init__(self, counts: AnyArray | None = None, own: int = 0) -> None:
        self.counts = np.zeros(1, np.uint8) if counts is None else counts
        self._own = own
        self._clear, self._look = _flags()
        self.see()

    def see(self) -> None:
        """Local. Count the overflows that were noted so far as known."""
        self.seen = self.counts.tobytes()
        # Counts are never set back: a rank that comes late must see them, too. In one step one more is noted, however
        # often it happens.
        self._next = np.uint8((self.seen[self._own] + 1) % 256)

    def note(self, *_error: object) -> None:
        """Local. There was an overflow; NumPy calls it with two words about that."""
        self.counts[self._own] = self._next

    def run(self, function: Callable[..., None], calls: Iterable[Sequence[Any]]) -> None:
        """Local. Call a compiled function with the arguments of several calls, and watch it."""
        self._clear()
        for arguments in calls:
            function(*arguments)
        if self._look():
            self.note()


@functools.cache
def _flags() -> tuple[Callable[[], object], Callable[[], bool]]:
    """The functions that clear this thread's flag of overflows, and read it."""
    flag = _FLAGS.get(platform.machine(), 0)
    # One that keeps Python's lock, which is quicker for so little work.
    library = ctypes.PyDLL(None)
    if not flag or not hasattr(library, "fetestexcept"):
        # The state is then looked at after each compiled loop.
        return lambda: None, lambda: True
    lower, test = library.feclearexcept, library.fetestexcept
    return lambda: lower(flag), lambda: test(flag) != 0


def infinite_count(slot: AnyArray) -> int:
    """Local. The number of infinite elements of some state, which is flat."""
    return int(np.count_nonzero(np.isinf(parts_of(slot))))


def overflow_text(variable: str, slot: str, count: int, dtype: np.dtype[Any]) -> str:
    """Local. The text of the OverflowError for state that has become infinite.

    Args:
        variable: The variable of the state.
        slot: The name of the state.
        count: The number of the elements.
        dtype: The dtype of the state.
    """
    return (
        f"{count} elements of the optimizer's state {slot!r} of variable {variable!r} have become infinite: expected "
        f"numbers that {dtype} can hold, got gradients whose squares, or sums, are too large for it. These elements "
        "would never be updated again. Restore the last checkpoint, and clip the gradients (clipnorm, global_clipnorm "
        "or clipvalue), lower the learning rate, or make the variable with dtype='float64'"
    )


def loud(update: Update, slot_count: int) -> Update:
    """Local. On a GPU, where there is no such flag: the parameter becomes NaN where the state is infinite.

    Args:
        update: The update of one step.
        slot_count: Number of the kernel's slots, which come first.
    """

    def checked(
        parameter: AnyArray, gradient: AnyArray, slots: Sequence[AnyArray], scratch: Sequence[AnyArray]
    ) -> None:
        update(parameter, gradient, slots, scratch)
        is_complex = parameter.dtype.kind == "c"
        parameter = parts_of(parameter) if is_complex else parameter
        for slot in slots[:slot_count]:
            part = parts_of(slot) if is_complex else slot
            np.copyto(parameter, np.nan, where=part == np.inf)

    return checked
