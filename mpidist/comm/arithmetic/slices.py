"""Slices: an array is cut over ranks into slices whose sizes differ by at most one."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

# A rank's slice has at least so many bytes, and other ranks have none: a call of NumPy takes as long for fewer.
LEAST_SLICE_BYTES = 4096


def even_sizes(count: int, slice_count: int) -> list[int]:
    """Local. The sizes of `numpy.array_split`: they differ by at most one, and the larger ones come first."""
    size, rest = divmod(count, slice_count)
    return [size + (number < rest) for number in range(slice_count)]


def slices_of(sizes: Sequence[int]) -> list[slice]:
    """Local. Slices of these sizes, each of which begins where the one before ends."""
    ends = itertools.accumulate(sizes, initial=0)
    return [slice(low, high) for low, high in itertools.pairwise(ends)]


def cut_evenly(count: int, slice_count: int) -> list[slice]:
    """Local. Slices of `count` elements, whose sizes differ by at most one."""
    return slices_of(even_sizes(count, slice_count))


def slice_count(byte_count: int, rank_count: int) -> int:
    """Local. The number of ranks among which an array of some bytes is cut.

    Where many ranks had a few bytes each, all their calls together would grow with the square of the ranks: each rank
    goes through the arrays of all of them.
    """
    return min(rank_count, max(1, byte_count // LEAST_SLICE_BYTES))


def own_slice(count: int, itemsize: int, rank: int, rank_count: int) -> slice:
    """Local. A rank's slice of an array of `count` elements; empty where it has none."""
    used = slice_count(count * itemsize, rank_count)
    if rank >= used:
        return slice(0, 0)
    size, rest = divmod(count, used)
    begin = size * rank + min(rank, rest)
    return slice(begin, begin + size + (rank < rest))


def in_bytes(counts: Sequence[int], item_bytes: int) -> list[int]:
    """Local. Numbers of bytes, from numbers of elements or rows of `item_bytes` each."""
    return [count * item_bytes for count in counts]


def cut_by_length(count: int, length: int) -> list[slice]:
    """Local. Slices of `count` elements, all of this length except that the last one may be shorter."""
    return [slice(begin, min(begin + length, count)) for begin in range(0, count, length)]
