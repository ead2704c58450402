"""Sums of several arrays, of rows, and of squares, in one compiled pass over memory.

NumPy makes a pass for each array that it adds. For two arrays that is one pass; for four the compiled loop takes 0.6 of
NumPy's time, and 0.57 where the sum is stored to all of them.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence

import numpy as np

from mpidist.arrays import AnyArray
from mpidist.comm.arithmetic import compiler
from mpidist.comm.arithmetic.compiler import Code, loop_text, rows_text

# The order of a sum of numbered arrays: of each pair the sum takes the place of the first, and the last sum is at 0.
Pairs = tuple[tuple[int, int], ...]

# LLVM's names of types, by NumPy's characters.
TYPES = {"f": "float", "d": "double"}
# NumPy adds two arrays in one pass, too.
LEAST_ARRAYS = 3
# More arrays at once are more than the processor fetches ahead.
MOST_ARRAYS = 8
# The least size of an array: a call costs 5 us.
LEAST_BYTES = 1 << 16
# Bytes that NumPy adds up before the compiler is loaded: by then it has lost the time that loading takes.
LOAD_AFTER_BYTES = 1 << 33
# The number of independent sums of squares, which a processor computes at the same time.
_LANES = 16


class CompiledSum:
    """Sums of arrays in a given order, in one pass where that is possible and pays; with NumPy's bits.

    Args:
        pairs_of: A function that returns the order for a number of arrays.
        rank_count: Number of ranks that share the cores of this machine.
    """

    def __init__(self, pairs_of: Callable[[int], Pairs], rank_count: int) -> None:
        self._pairs_of = pairs_of
        self._rank_count = rank_count
        self._byte_count = 0

    @staticmethod
    def pays(count: int, byte_count: int) -> bool:
        """Local. Whether one pass gains anything over NumPy's.

        Args:
            count: Number of arrays.
            byte_count: The number of bytes of each of them.
        """
        return LEAST_ARRAYS <= count <= MOST_ARRAYS and byte_count >= LEAST_BYTES

    def add(self, sources: Sequence[AnyArray], out: AnyArray) -> bool:
        """Local. Add up arrays of one size.

        Args:
            sources: The arrays.
            out: The array for the sum. It may be one of the sources, or share no memory with them.

        Returns:
            False if nothing was done, since that is left to NumPy.
        """
        if not self._takes(sources):
            return False
        places, at = [source.ctypes.data for source in sources], out.ctypes.data
        shared = [number for number, place in enumerate(places) if abs(at - place) < out.nbytes]
        if not _is_plain(out, sources[0]) or len(shared) > 1 or any(places[number] != at for number in shared):
            return False
        if shared:
            return self._run(sources[0], len(places), (shared[0],), places)
        return self._run(sources[0], len(places), (len(places),), [*places, at])

    def add_to_all(self, arrays: Sequence[AnyArray]) -> bool:
        """Local. Add up arrays of one size that do not overlap, and store the sum to all of them.

        Returns:
            False if nothing was done, since that is left to NumPy.
        """
        return self._takes(arrays) and self._run(
            arrays[0], len(arrays), tuple(range(len(arrays))), [array.ctypes.data for array in arrays]
        )

    def _takes(self, arrays: Sequence[AnyArray]) -> bool:
        first, count = arrays[0], len(arrays)
        if not self.pays(count, first.nbytes) or first.dtype.char not in TYPES:
            return False
        if not all(_is_plain(array, first) for array in arrays):
            return False
        if compiler.is_loaded():
            return compiler.load()
        self._byte_count += count * first.nbytes
        return self._byte_count > LOAD_AFTER_BYTES and compiler.load(self._rank_count)

    def _run(self, array: AnyArray, count: int, targets: tuple[int, ...], places: Sequence[int]) -> bool:
        code = _sum(array.dtype.char, count, self._pairs_of(count), targets)
        if code is None:
            return False
        code.call(array.size, *places)
        return True


def in_order(count: int) -> Pairs:
    """Local. The order of arrays that are added one after another."""
    return tuple((0, number) for number in range(1, count))


def sum_of_squares(array: AnyArray) -> float | None:
    """Local. The sum of squares, in double precision; None if that is left to NumPy.

    The order is not BLAS's, which is not fixed: it depends on threads.

    Args:
        array: A flat array.
    """
    char = array.dtype.char
    if array.nbytes < LEAST_BYTES or char not in TYPES or not _is_plain(array, array) or not compiler.load():
        return None
    code = _squares(char)
    if code is None:
        return None
    sums, count = np.empty(_LANES), array.size - array.size % _LANES
    code.call(count, array.ctypes.data, sums.ctypes.data)
    rest = array[count:].astype(np.float64)
    return float(sums.sum() + np.dot(rest, rest))


def add_rows(values: AnyArray, order: AnyArray, counts: AnyArray) -> AnyArray | None:
    """Local. Sums of rows, each in the given order; None if that is left to NumPy.

    Args:
        values: The rows, shape (rows, width).
        order: The numbers of the rows, those of the first sum first.
        counts: The number of rows of each sum, at least one.

    Returns:
        A new array of shape (sums, width).
    """
    char, width = values.dtype.char, values.shape[1]
    # The compiled loop takes at least one element of each row.
    if not width or values.nbytes < LEAST_BYTES or char not in TYPES or not _is_plain(values, values):
        return None
    code = _rows(char) if compiler.is_loaded() and compiler.load() else None
    if code is None:
        return None
    # Minus zero changes no number that is added to it.
    sums = np.full((len(counts), width), -0.0, values.dtype)
    places = np.ascontiguousarray(order, np.int64)
    targets = np.repeat(np.arange(len(counts)), counts)
    code.call(len(places), width, *(array.ctypes.data for array in (values, places, targets, sums)))
    return sums


def _is_plain(array: AnyArray, like: AnyArray) -> bool:
    return (
        isinstance(array, np.ndarray) and array.flags.c_contiguous and array.flags.aligned
        and array.dtype == like.dtype and array.size == like.size and array.dtype.isnative
    )


@functools.lru_cache(maxsize=256)
def _sum(char: str, count: int, pairs: Pairs, targets: tuple[int, ...]) -> Code | None:
    pointers = max(count, targets[-1] + 1)
    text = sum_text(char, count, pairs, targets)
    return compiler.compile_loop(text, [ctypes.c_void_p] * pointers)


@functools.cache
def _squares(char: str) -> Code | None:
    return compiler.compile_loop(squares_text(char), [ctypes.c_void_p] * 2)


@functools.cache
def _rows(char: str) -> Code | None:
    return compiler.compile_loop(add_rows_text(char), [ctypes.c_int64, *[ctypes.c_void_p] * 4])


def sum_text(char: str, count: int, pairs: Pairs, targets: Sequence[int]) -> str:
    """Local. The text of `loop(length, arrays...)`, which adds up arrays; no two of them overlap.

    Args:
        char: "f" or "d", NumPy's character for their dtype.
        count: Number of arrays.
        pairs: The order.
        targets: The numbers of the arrays that get the sum; `count` is one more array.
    """
    kind = TYPES[char]
    arrays = range(max(count, targets[-1] + 1))
    lines = [f"  %at{number} = getelementptr inbounds {kind}, ptr %a{number}, i64 %i" for number in arrays]
    lines += [f"  %x{number} = load {kind}, ptr %at{number}" for number in range(count)]
    values = [f"%x{number}" for number in range(count)]
    for number, (left, right) in enumerate(pairs):
        lines.append(f"  %s{number} = fadd {kind} {values[left]}, {values[right]}")
        values[left] = f"%s{number}"
    lines += [f"  store {kind} {values[0]}, ptr %at{number}" for number in targets]
    return loop_text(", ".join(f"ptr noalias %a{number}" for number in arrays), lines)


def squares_text(char: str) -> str:
    """Local. The text of `loop(length, array, sums)`, which adds up squares; the length is a multiple of the lanes."""
    kind, wide = TYPES[char], f"<{_LANES} x double>"
    lines = [
        f"  %at = getelementptr inbounds {kind}, ptr %a, i64 %i",
        f"  %x = load <{_LANES} x {kind}>, ptr %at, align {np.dtype(char).itemsize}",
    ]
    value = "%x"
    if char == "f":
        lines.append(f"  %w = fpext <{_LANES} x float> %x to {wide}")
        value = "%w"
    lines += [f"  %q = fmul {wide} {value}, {value}", f"  %sums = fadd {wide} %before, %q"]
    return loop_text(
        "ptr noalias %a, ptr noalias %out", lines, step=_LANES,
        carried=[f"  %before = phi {wide} [zeroinitializer, %entry], [%sums, %body]"],
        end=[
            f"  %result = phi {wide} [zeroinitializer, %entry], [%sums, %body]",
            f"  store {wide} %result, ptr %out, align 8",
        ],
    )


def add_rows_text(char: str) -> str:
    """Local. The text of `loop(length, width, values, order, targets, sums)`, see `add_rows`.

    Row `order[n]` of the values is added to row `targets[n]` of the sums, for each n in turn.
    """
    kind = TYPES[char]
    outer = []
    for numbers, array in (("order", "values"), ("targets", "sums")):
        outer += [
            f"  %at_{numbers} = getelementptr inbounds i64, ptr %{numbers}, i64 %i",
            f"  %number_{array} = load i64, ptr %at_{numbers}",
            f"  %begin_{array} = mul nsw i64 %number_{array}, %width",
            f"  %row_{array} = getelementptr inbounds {kind}, ptr %{array}, i64 %begin_{array}",
        ]
    lines = [f"  %at_{array} = getelementptr inbounds {kind}, ptr %row_{array}, i64 %j" for array in ("values", "sums")]
    lines += [f"  %x_{array} = load {kind}, ptr %at_{array}" for array in ("values", "sums")]
    lines += [f"  %sum = fadd {kind} %x_sums, %x_values", f"  store {kind} %sum, ptr %at_sums"]
    return rows_text(", ".join(f"ptr noalias %{name}" for name in ("values", "order", "targets", "sums")), outer, lines)
