"""The shutdown barrier: ranks that end their programs together wait for each other before MPI is finalized."""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from mpidist.failures.deaths import DISCOVERY_SECONDS, WATCH, Process

_numbers = itertools.count()

# Functions that all ranks call when they have ended together, before MPI is finalized.
LAST: list[Callable[[], None]] = []


class Farewell:
    """An agreement of some ranks to end the program together. It ends with this object, on all these ranks.

    Args:
        mpi: An MPI communicator that is used for no other collective operation.
        processes: The processes of its ranks. If one of them has died and the others continue without it, no rank
            waits.
    """

    def __init__(self, mpi: Any, processes: Iterable[Process]) -> None:
        self.mpi = mpi
        self._processes = frozenset(processes)
        FAREWELLS[next(_numbers)] = self

    def can_be_kept(self) -> bool:
        """Local. Whether the ranks can still wait for each other: no spared process among them has died."""
        return self._processes.isdisjoint(WATCH.gone.copy())


# By number, and not in a set: all ranks must go through the farewells in the order of their creation.
FAREWELLS: weakref.WeakValueDictionary[int, Farewell] = weakref.WeakValueDictionary()


def leave_together(farewells: Sequence[Farewell], wait: Callable[[float], None]) -> bool:
    """Collective. Wait for the other ranks before MPI is finalized, without spinning.

    Args:
        farewells: The agreements of this rank.
        wait: A function, called repeatedly with the seconds that this rank has waited.

    Returns:
        False if another rank has died instead.
    """
    # MPI_Finalize may wait for the other ranks, and MPI libraries spin there: this rank would take a core from them.
    begin = time.monotonic()
    pause = 1e-4
    died = None
    try:
        waiting = [(one, one.mpi.Ibarrier()) for one in farewells if one.can_be_kept()]
        while waiting := [(one, request) for one, request in waiting if one.can_be_kept() and not request.Test()]:
            time.sleep(pause)
            pause = min(pause * 2, 0.05)
            now = time.monotonic()
            if WATCH.dead:
                # A rank whose barrier is complete may end before this rank sees its own barrier complete.
                died = died or now
                if now - died > DISCOVERY_SECONDS:
                    return False
            wait(now - begin)
    except Exception as error:
        # Open MPI with fault tolerance reports a death when a request is tested.
        if WATCH.learn(error):
            return False
        raise
    return True
