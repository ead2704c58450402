"""How a count grows with the ranks: the slowest of a few functions that fits it, and what that says of more ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

# From the slowest to the fastest.
FUNCTIONS: dict[str, Callable[[int], float]] = {
    "constant": lambda _: 0.0,
    "log n": math.log2,
    "n": float,
    "n log n": lambda ranks: ranks * math.log2(ranks),
    "n^2": lambda ranks: float(ranks) ** 2,
}
# A slower function is taken where its squared errors are no more than so many times those of the best.
_AS_GOOD = 2.0


class Growth(NamedTuple):
    """A count over the ranks: `begin + slope * function(ranks)`.

    Attributes:
        name: The function's.
        begin: What does not grow.
        slope: Its factor.
    """

    name: str
    begin: float
    slope: float

    def at(self, ranks: int) -> float:
        """What it says of so many ranks."""
        return self.begin + self.slope * FUNCTIONS[self.name](ranks)

    @property
    def is_fast(self) -> bool:
        """Whether it grows faster than log n."""
        return list(FUNCTIONS).index(self.name) > list(FUNCTIONS).index("log n")


def fit(points: Mapping[int, float], tolerance: float) -> Growth:
    """The growth of a count.

    Args:
        points: The counts of three or more numbers of ranks.
        tolerance: By which counts differ by chance.

    Raises:
        ValueError: Too few points: two fit every function.
    """
    if len(points) < 3:
        raise ValueError(f"needs counts of 3 numbers of ranks or more, got {sorted(points)}")
    ranks = sorted(points)
    counts = np.array([points[one] for one in ranks])
    # What falls, for instance a rank's part of a fixed amount, has its maximum at the fewest.
    if counts.max() - counts.min() <= tolerance or counts[-1] - counts[0] <= tolerance:
        return Growth("constant", float(counts.max()), 0.0)
    fits = []
    for name in list(FUNCTIONS)[1:]:
        terms = np.array([[1.0, FUNCTIONS[name](one)] for one in ranks])
        solution = np.linalg.lstsq(terms, counts, rcond=None)[0]
        error = float(np.sum((terms @ solution - counts) ** 2))
        fits.append((Growth(name, float(solution[0]), float(solution[1])), error))
    least = min(error for _, error in fits)
    # Each count may be off by a part of the tolerance.
    enough = max(_AS_GOOD * least, len(ranks) * (tolerance / 4) ** 2)
    return next(growth for growth, error in fits if error <= enough)
