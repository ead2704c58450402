"""Who reads what: pure arithmetic on counts, sizes and ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TypeVar

T = TypeVar("T")


def even_sizes(count: int, parts: int) -> tuple[int, ...]:
    """Local. Cut `count` things into `parts` sizes that differ by at most one.

    Args:
        count: How many things there are; 0 gives zeros.
        parts: How many pieces.

    Returns:
        `parts` sizes with the sum `count`; the first `count % parts` pieces get one more than the others.

    Raises:
        ValueError: `count` is negative, or `parts` is not positive.
    """
    _check(count, parts)
    least, more = divmod(count, parts)
    return (least + 1,) * more + (least,) * (parts - more)


@lru_cache
def even_slice(count: int, parts: int, index: int) -> slice:
    """Local. The place of piece `index` of `even_sizes(count, parts)`: pieces are contiguous and in order.

    Raises:
        ValueError: `count` is negative, `parts` is not positive, or `index` is not one of 0 to `parts` - 1.
    """
    _check(count, parts, index)
    least, more = divmod(count, parts)
    begin = least * index + min(index, more)
    return slice(begin, begin + least + (index < more))


def file_shard(files: Sequence[T], parts: int, index: int) -> Sequence[T]:
    """Local. The files of reader `index`: those whose number i has i mod `parts` = `index`, in their order.

    Raises:
        ValueError: `parts` is not positive, or `index` is not one of 0 to `parts` - 1.
    """
    _check(len(files), parts, index)
    return files[index::parts]


def rotated_sizes(batch_size: int, parts: int, index: int) -> tuple[int, ...]:
    """Local. The sizes of the batches that reader `index` cuts its own copy of the data into, one after the other.

    Every step takes `batch_size` examples over all readers, and every reader takes `batch_size` examples in `parts`
    steps: the even sizes, turned left by `index`.

    Raises:
        ValueError: `batch_size` is negative, `parts` is not positive, or `index` is not one of 0 to `parts` - 1.
    """
    _check(batch_size, parts, index)
    sizes = even_sizes(batch_size, parts)
    return sizes[index:] + sizes[:index]


def count_groups(total: int, sizes: Sequence[int], drop_remainder: bool) -> int:
    """Local. Into how many groups `total` things fall when the sizes are used in turn, over and over.

    A size of zero makes an empty group only while there are things left.

    Args:
        total: How many things there are.
        sizes: Not negative, not all zero.
        drop_remainder: Do not count a last group that is smaller than its size.

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


def _check(count: int, parts: int, index: int = 0) -> None:
    if count < 0:
        raise ValueError(f"`count` must not be negative, got {count!r}")
    if parts < 1:
        raise ValueError(f"`parts` must be positive, got {parts!r}")
    if not 0 <= index < parts:
        raise ValueError(f"`index` must be one of 0 to {parts - 1} for {parts} parts, got {index!r}")
