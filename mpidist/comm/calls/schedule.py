"""The schedule by which ranks compare calls, in addition to the checksum of every call; one for the whole package.

A comparison is a collective call: all ranks must compare or none. So only the number of a call may decide it.
"""

from __future__ import annotations

import sys
from typing import NamedTuple


class Schedule(NamedTuple):
    """The numbers of the calls that ranks compare; the first call has number 1.

    Attributes:
        first: Number of calls at the beginning that are all compared, before anything is sent.
        every: Distance of the later calls that are compared.
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
    """Local. The schedule with or without a check of every call; see `CommunicationOptions`."""
    return EVERY_CALL if check else USUAL
