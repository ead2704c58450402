"""Limits of seconds: watchdogs of what may hang, and multiples of what a start takes on this machine.

Nothing is shown by one that is not reached: a test says by an order, or by marks, what it says about time.
"""

from __future__ import annotations

import os

# By how much a start takes longer here than on a quiet machine. Whoever measures it hands it on: to the workers of
# xdist, and to the programs of the tests.
VARIABLE = "MPIDIST_TEST_SLOWNESS"
# Several programs run at once on two cores, and any of them may be late by this factor.
_ROOM = 3.0
# What a start of three ranks takes on two cores where nothing else runs, on the slower of the MPIs.
QUIET_SECONDS = 2.7


def limit(seconds: float) -> float:
    """The seconds that something may take here which must not take longer than these on a quiet machine."""
    return seconds * _ROOM * float(os.environ.get(VARIABLE, "1"))


def note_start(seconds: float) -> None:
    """Let all limits follow what a start has taken, also those of the processes that this one starts."""
    os.environ[VARIABLE] = f"{max(1.0, seconds / QUIET_SECONDS):.2f}"
