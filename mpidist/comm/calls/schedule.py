"""The schedule by which ranks compare what they do, beside the checksums of every call; one for the whole package.

Comparing is a collective call: all ranks must compare or none. So only the number of a call may decide it.
"""

from __future__ import annotations

import sys
from typing import NamedTuple


class Schedule(NamedTuple):
    """The numbers of the calls that ranks compare; the first one is number 1.

    Attributes:
        first: The number of first calls that are compared, before anything is sent.
        every: The distance of the later calls that are compared.
    """

    first: int
    every: int

    def has(self, number: int) -> bool:
        """Local. Whether the call of this number is compared."""
        return number <= self.first or number % self.every == 0


# Most mistakes show in the first calls, where every rank can still raise an error before anything has gone wrong. One
# message between nodes compares the checksums of all calls since the one before; `benchmarks/dispatch.py` measures it.
USUAL = Schedule(first=16, every=32)
# `CommunicationOptions(check=True)`.
EVERY_CALL = Schedule(first=sys.maxsize, every=1)


def schedule_of(*, check: bool) -> Schedule:
    """Local. The schedule of ranks that check every call, or not; see `CommunicationOptions`."""
    return EVERY_CALL if check else USUAL
