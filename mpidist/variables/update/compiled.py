"""Updates on CPUs in one pass over memory: the ranks' gradients are added up and used in one compiled loop.

NumPy makes a pass over a block for each operation; its bits are what the compiled loop gives, too. So a rank may use
the one or the other at any time, whatever the other ranks do, and what has no compiled form stays with NumPy.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from mpidist.arrays import AnyArray
from mpidist.comm.arithmetic.combine import is_half
from mpidist.comm.arithmetic.compiled_sums import MOST_ARRAYS, Pairs
from mpidist.comm.arithmetic.compiler import Code, compile_loop, load
from mpidist.variables.update.fused import Program, UnknownOperationError, record
from mpidist.variables.update.kernel import Update
from mpidist.variables.update.llvm_text import Loop, loop_of, text_of
from mpidist.variables.update.overflow import Overflow

# The least bytes of parameters that a rank updates in a step. Loading the compiler takes 0.1 s and some 10 MB.
LEAST_BYTES = 1 << 20
# The fraction of a table's bytes that counts, since a step changes only some rows: one in this many.
TABLE_SHARE = 64
# The size of a block: recording an update takes as long as NumPy's update of this many elements.
LEAST_BLOCK_BYTES = 1 << 16

_CTYPES: dict[str, Any] = {"f": ctypes.c_float, "d": ctypes.c_double}

# The code of a loop, and the names of its arrays as in `Loop`.
_Function = tuple[Code, tuple[str, ...]]


class BlockArrays(Protocol):
    """The arrays of an update, of one length: see `mpidist.variables.step.bundle.Block`."""

    @property
    def parameter(self) -> AnyArray:
        """Local. The parameter."""
        ...

    @property
    def gradients(self) -> tuple[AnyArray, ...]:
        """Local. One gradient for each rank."""
        ...

    @property
    def slots(self) -> tuple[AnyArray, ...]:
        """Local. The state."""
        ...


class JoinedRuns:
    """The places of the blocks of a rank's work, joined where they touch: a compiled loop needs no blocks.

    Args:
        blocks: The blocks of contiguous arrays, all of one dtype. The owner of the runs keeps them.

    Attributes:
        dtype: The dtype of the blocks; None if there is none.
    """

    def __init__(self, blocks: Sequence[BlockArrays]) -> None:
        self.dtype: np.dtype[Any] | None = blocks[0].parameter.dtype if blocks else None
        self._places: list[tuple[int, dict[str, tuple[int, ...]]]] = []
        self._arguments: dict[tuple[str, ...], list[tuple[int, ...]]] = {}
        for block in blocks:
            place = {
                "p": (block.parameter.ctypes.data,),
                "g": tuple(gradient.ctypes.data for gradient in block.gradients),
                **{f"s{number}": (slot.ctypes.data,) for number, slot in enumerate(block.slots)},
            }
            self._add(block.parameter.size, place, block.parameter.itemsize)

    def _add(self, count: int, place: dict[str, tuple[int, ...]], itemsize: int) -> None:
        if self._places:
            before, last = self._places[-1]
            if all(
                begin + before * itemsize == here
                for name in last for begin, here in zip(last[name], place[name], strict=True)
            ):
                self._places[-1] = (before + count, last)
                return
        self._places.append((count, place))

    def arguments(self, names: tuple[str, ...]) -> list[tuple[int, ...]]:
        """Local. The arguments of a loop over these arrays, for each run: its length and addresses."""
        known = self._arguments.get(names)
        if known is None:
            known = [(count, *(at for name in names for at in place[name])) for count, place in self._places]
            self._arguments[names] = known
        return known


class CompiledUpdate:
    """An update that is compiled where that is possible and pays, and is NumPy's elsewhere; with the same bits.

    Args:
        update: The update of one step, on blocks.
        slot_count: Number of its slots.
        scratch_count: Number of its scratch blocks.
        keeps_gradient: Whether to store the values that the update leaves in `gradient`.
        overflow: The watch over the loops.
    """

    def __init__(
        self, update: Update, slot_count: int, scratch_count: int, *, keeps_gradient: bool = False,
        overflow: Overflow | None = None,
    ) -> None:
        self._update = update
        self._slot_count = slot_count
        self._scratch_count = scratch_count
        self._keeps_gradient = keeps_gradient
        self._overflow = overflow
        self._programs: dict[np.dtype[Any], Program | None] = {}
        self._functions: dict[tuple[np.dtype[Any], Pairs, bool, bool], _Function | None] = {}
        self._of_halves: Update | None = None

    def widen(self, widened: Callable[[Update], Update]) -> None:
        """Local. Take blocks of half precision, too.

        Args:
            widened: A function that makes an update for them from this one, which then gets their numbers in float32.
        """
        update = widened(self)
        self._of_halves = None if update is self else update

    def __call__(
        self, parameter: AnyArray, gradient: AnyArray, slots: Sequence[AnyArray], scratch: Sequence[AnyArray]
    ) -> None:
        """Local. See `Update`."""
        if self._of_halves is not None and is_half(parameter.dtype):
            self._of_halves(parameter, gradient, slots, scratch)
        elif parameter.nbytes < LEAST_BLOCK_BYTES or not self._run(parameter, parameter, gradient, slots):
            self._update(parameter, gradient, slots, scratch)

    def aside(
        self, parameter: AnyArray, new: AnyArray, gradient: AnyArray, slots: Sequence[AnyArray]
    ) -> bool:
        """Local. Update the state, and store the new parameter elsewhere.

        Args:
            parameter: The parameter, which does not change.
            new: Memory for the new parameter.
            gradient: The sum, which may be overwritten.
            slots: The state.

        Returns:
            False if nothing was done, since that is left to NumPy.
        """
        return parameter.nbytes >= LEAST_BLOCK_BYTES and self._run(parameter, new, gradient, slots)

    def sum_and_update(self, runs: JoinedRuns, pairs: Pairs) -> bool:
        """Local. Add up gradients and update, over all of a rank's work.

        Args:
            runs: The places of this work.
            pairs: The order in which gradients are added up, see `Loop.pairs`.

        Returns:
            False if nothing was done, since that is left to NumPy.
        """
        if runs.dtype is None:
            return True
        function = self._function(runs.dtype, pairs)
        if function is None:
            return False
        code, names = function
        scalars = self._scalars(runs.dtype)
        if self._overflow is not None:
            self._overflow.run(code.call, [(*arguments, *scalars) for arguments in runs.arguments(names)])
            return True
        for arguments in runs.arguments(names):
            code.call(*arguments, *scalars)
        return True

    def on_rows(
        self, rows: AnyArray, parameter: AnyArray, gradient: AnyArray, slots: Sequence[AnyArray], *,
        is_aside: bool = False,
    ) -> bool:
        """Local. Update some rows.

        Args:
            rows: Their numbers, each of them once.
            parameter: Shape (all rows, width).
            gradient: Shape (rows, width); may be overwritten.
            slots: The state, each of the parameter's shape.
            is_aside: The new rows go over the gradient, and the parameter stays as it is.

        Returns:
            False if nothing was done, since that is left to NumPy.

        Raises:
            IndexError: There are no such rows.
        """
        arrays = (parameter, gradient, *slots)
        if gradient.nbytes < LEAST_BLOCK_BYTES or not gradient.size or not all(map(_is_plain, arrays)):
            return False
        function = self._function(parameter.dtype, (), is_aside=is_aside, is_of_rows=True)
        if function is None:
            return False
        code, names = function
        if is_aside and "g" not in names:
            return False
        rows = np.ascontiguousarray(rows, np.int64)
        # Compiled code would write anywhere.
        least, most = (int(row) for row in (rows.min(), rows.max()))
        if least < 0 or most >= len(parameter) or len(rows) != len(gradient):
            raise IndexError(
                f"expected {len(gradient)} rows between 0 and {len(parameter) - 1}, got {len(rows)} between {least} "
                f"and {most}"
            )
        places = dict(zip(("p", "g", *(f"s{number}" for number in range(len(slots)))), arrays, strict=True))
        self._call(
            code, len(rows), gradient.shape[1], rows.ctypes.data, *(places[name].ctypes.data for name in names),
            *self._scalars(parameter.dtype),
        )
        return True

    def _run(self, parameter: AnyArray, new: AnyArray, gradient: AnyArray, slots: Sequence[AnyArray]) -> bool:
        is_aside = new is not parameter
        function = self._function(parameter.dtype, (), is_aside=is_aside)
        arrays = (parameter, new, gradient, *slots)
        if function is None or not all(map(_is_plain, arrays)):
            return False
        code, names = function
        places = dict(zip(("p", "q", "g", *(f"s{number}" for number in range(len(slots)))), arrays, strict=True))
        self._call(
            code, parameter.size, *((new.ctypes.data,) if is_aside else ()),
            *(places[name].ctypes.data for name in names), *self._scalars(parameter.dtype),
        )
        return True

    def _call(self, code: Code, *arguments: Any) -> None:
        if self._overflow is None:
            code.call(*arguments)
        else:
            self._overflow.run(code.call, (arguments,))

    def _scalars(self, dtype: np.dtype[Any]) -> tuple[float, ...]:
        program = self._programs[dtype]
        return () if program is None else program.scalars

    def _function(
        self, dtype: np.dtype[Any], pairs: Pairs, *, is_aside: bool = False, is_of_rows: bool = False
    ) -> _Function | None:
        key = (dtype, pairs, is_aside, is_of_rows)
        if key not in self._functions:
            self._functions[key] = self._find(*key)
        return self._functions[key]

    def _find(self, dtype: np.dtype[Any], pairs: Pairs, is_aside: bool, is_of_rows: bool) -> _Function | None:
        if len(pairs) >= MOST_ARRAYS:
            return None
        if dtype not in self._programs:
            self._programs[dtype] = self._record(dtype)
        program = self._programs[dtype]
        # LARS turns a gradient that no norm clips into itself: a loop over no arrays is none.
        if program is None or not program.names or (is_aside and "p" not in program.stored):
            return None
        try:
            code = _compile(loop_of(program, dtype, pairs, is_aside=is_aside, is_of_rows=is_of_rows))
        except UnknownOperationError:
            return None
        return None if code is None else (code, program.names)

    def _record(self, dtype: np.dtype[Any]) -> Program | None:
        try:
            return record(
                self._update, dtype, self._slot_count, self._scratch_count, keeps_gradient=self._keeps_gradient
            )
        except Exception:
            # Stand-ins are no arrays, so a user's update may fail on them in any way. On arrays it then works, one
            # function after another, or raises its own error.
            return None


def is_wanted(byte_count: int, rank_count: int = 1) -> bool:
    """Local. Whether updates are compiled.

    Args:
        byte_count: The number of bytes of the parameters that this rank updates.
        rank_count: Number of ranks that share the cores of this machine.
    """
    return byte_count >= LEAST_BYTES and load(rank_count)


def _is_plain(array: AnyArray) -> bool:
    return isinstance(array, np.ndarray) and array.flags.c_contiguous and array.flags.aligned


# Steps differ in their numbers only, therefore each optimizer compiles once.
@functools.lru_cache(maxsize=256)
def _compile(loop: Loop) -> Code | None:
    number = _CTYPES[loop.type]
    rows = [ctypes.c_int64, ctypes.c_void_p] if loop.is_of_rows else []
    arguments = [*rows, *[ctypes.c_void_p] * len(loop.arrays()), *[number] * loop.scalar_count]
    return compile_loop(text_of(loop), arguments)
