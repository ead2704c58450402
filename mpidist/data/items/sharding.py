"""Arithmetic of sharing: how many examples, and which of them, each reader gets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

from mpidist.comm.arithmetic.slices import even_sizes


@lru_cache
def even_slice(count: int, readers: int, reader: int) -> slice:
    """Local. The rows of one reader where `readers` share `count` rows evenly.

    The sizes are those of `even_sizes(count, readers)`; the slices follow one another in the order of the readers.
    This function is cached, and makes no list: it is called for every batch.

    Raises:
        ValueError: `count` is negative, `readers` is not positive, or `reader` is not one of 0 to `readers` - 1.
    """
    _check(count, readers, reader)
    least, more = divmod(count, readers)
    begin = least * reader + min(reader, more)
    return slice(begin, begin + least + (reader < more))


def rotated_sizes(batch_size: int, readers: int, reader: int) -> tuple[int, ...]:
    """Local. The batch sizes that a reader with data of its own uses in turn.

    They are the even sizes, rotated left by `reader`. So all readers together take `batch_size` examples in every
    step, and in `readers` steps each of them takes equally many.

    Raises:
        ValueError: `batch_size` is negative, `readers` is not positive, or `reader` is not one of 0 to `readers` - 1.
    """
    _check(batch_size, readers, reader)
    sizes = even_sizes(batch_size, readers)
    return (*sizes[reader:], *sizes[:reader])


def shared_sizes(batch_sizes: Sequence[int], readers: int, reader: int) -> tuple[int, ...]:
    """Local. The sizes that a reader uses in turn where the global batch sizes are used in turn, over and over.

    In step k the reader takes the size number k of the `rotated_sizes` of the step's global size.

    Raises:
        ValueError: See `rotated_sizes`.
    """
    rotated = [rotated_sizes(size, readers, reader) for size in batch_sizes]
    steps = range(math.lcm(len(rotated), readers))
    return tuple(rotated[step % len(rotated)][step % readers] for step in steps)


def count_groups(total: int, sizes: Sequence[int], drop_remainder: bool) -> int:
    """Local. The number of groups that `total` items fall into when the sizes are used in turn, over and over.

    A size of zero makes an empty group, but only while items are left.

    Args:
        total: Number of items.
        sizes: The sizes, not negative and not all zero.
        drop_remainder: Whether to leave out a last group that is smaller than its size.

    Returns:
        The number of groups.
    """
    cycles = max(0, (total - 1) // sum(sizes))
    left = total - cycles * sum(sizes)
    groups = cycles * len(sizes)
    for size in sizes:
        if left <= 0 or (drop_remainder and size > left):
            break
        left -= size
        groups += 1
    return groups


def _check(count: int, readers: int, reader: int) -> None:
    if count < 0:
        raise ValueError(f"the number of rows must not be negative, got {count!r}")
    if readers < 1:
        raise ValueError(f"`readers` must be positive, got {readers!r}")
    if not 0 <= reader < readers:
        raise ValueError(f"`reader` must be one of 0 to {readers - 1} for {readers} readers, got {reader!r}")
