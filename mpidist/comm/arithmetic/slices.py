"""How an array is cut over ranks: sizes that differ by at most one, and slices one after another."""

from __future__ import annotations

import itertools
from collections.abc import Sequence


def even_sizes(count: int, parts: int) -> list[int]:
    """Local. The sizes of `numpy.array_split`: they differ by at most one, the larger ones come first."""
    share, rest = divmod(count, parts)
    return [share + (part < rest) for part in range(parts)]


def slices_of(sizes: Sequence[int]) -> list[slice]:
    """Local. Slices of these sizes, one after another."""
    ends = itertools.accumulate(sizes, initial=0)
    return [slice(low, high) for low, high in itertools.pairwise(ends)]


def cut_evenly(count: int, parts: int) -> list[slice]:
    """Local. `count` elements in `parts` slices, whose sizes differ by at most one."""
    return slices_of(even_sizes(count, parts))
