"""The shutdown barrier: ranks that end their programs together wait for each other before MPI is finalized."""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from mpidist.failures.deaths import DISCOVERY_SECONDS, WATCH, Process
from mpidist.failures.peers import Peer
from mpidist.recorder.rank_page import Page

# A survivor whose program is in a call of MPI speaks after `DISCOVERY_SECONDS`; then its exit functions run.
_SURVIVOR_SECONDS = DISCOVERY_SECONDS + 2.0


class MpiFunctions(NamedTuple):
    """The functions of MPI that an ending needs.

    Attributes:
        abort: Ends all ranks: `MPI.COMM_WORLD.Abort`.
        is_finalized: A function that returns whether the program has finalized MPI itself.
        finalize: Finalizes MPI, where that is not left to mpi4py.
        find_dead: A function that returns the names of the ranks whose death an error of MPI reports.
    """

    abort: Callable[[int], None]
    is_finalized: Callable[[], bool]
    finalize: Callable[[], None]
    find_dead: Callable[[BaseException], Sequence[str]]


_numbers = itertools.count()

# Functions that all ranks call when they have ended together, before MPI is finalized.
LAST: list[Callable[[], None]] = []
# Called on a rank whose error is about to end the job; none takes longer than a minute.
BEFORE_ABORT: list[Callable[[], None]] = []


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
        if not WATCH.learn(error):
            raise
        # The other survivors may hear of it from the kernel only. The launcher would end them with this rank before
        # they have printed what they know.
        time.sleep(max(0.0, (died or time.monotonic()) + DISCOVERY_SECONDS - time.monotonic()))
        return False
    return True


def await_survivors(page: Page | None, peers: Iterable[Peer]) -> None:
    """Local. After a death, wait until the other survivors of this host are about to end, but not for long.

    A launcher may end the other ranks when the first of them ends with an exit code: before they have printed what they
    know, or in their exit functions.

    Args:
        page: The page of this rank.
        peers: The other ranks that this one can see.
    """
    if page is None:
        return
    page.said = True
    end, pause = time.monotonic() + _SURVIVOR_SECONDS, 0.01
    others = [one for one in peers if one.page is not None]
    while (
        others := [one for one in others if not (one.page and one.page.said) and not WATCH.may_have_ended(one.key)]
    ) and time.monotonic() < end:
        time.sleep(pause)
        pause = min(2 * pause, 0.1)
