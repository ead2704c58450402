"""A number of each rank in a sum of floats, by which every rank sees whether all numbers were equal."""

from __future__ import annotations

import math
from collections.abc import Sequence

_BITS = 24
# Whole numbers up to it are exact in float32, also after a division by the number of ranks and its inverse.
_EXACT = 1 << 22


def base(replicas: int) -> int:
    """Local. The base of digits whose squares, added up over all ranks, are exact in float32.

    >>> base(2), base(1024)
    (1448, 64)
    """
    return max(2, math.isqrt(_EXACT // replicas))


def encode(mark: int, replicas: int) -> list[float]:
    """Local. The digits of a number of 24 bits, and their squares, for a mean over ranks.

    >>> encode(5, 1024)
    [5.0, 0.0, 0.0, 0.0, 25.0, 0.0, 0.0, 0.0]
    """
    digits: list[int] = []
    rest, step = mark & ((1 << _BITS) - 1), base(replicas)
    for _ in range(length(replicas)):
        rest, digit = divmod(rest, step)
        digits.append(digit)
    return [float(digit) for digit in digits] + [float(digit * digit) for digit in digits]


def length(replicas: int) -> int:
    """Local. The number of digits."""
    count, reached = 0, 1
    while reached < 1 << _BITS:
        count, reached = count + 1, reached * base(replicas)
    return count


def are_equal(means: Sequence[float], replicas: int) -> bool:
    """Local. Whether the numbers of all ranks were equal, by the means of what `encode` gave.

    A sum of squares is as small as the square of the sum by the number of ranks only where all are equal.

    >>> are_equal([1.5, 2.5], 2), are_equal([2.0, 4.0], 2)
    (False, True)
    """
    half = len(means) // 2
    sums = [round(mean * replicas) for mean in means]
    return all(sums[n] ** 2 == replicas * sums[half + n] for n in range(half))
