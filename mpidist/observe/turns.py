"""Turns: of the ranks of a node that see the same at the same time, one ends the job and says why."""

from __future__ import annotations

from collections.abc import Iterable

from mpidist.observe.clock import CLOCK, Clock
from mpidist.observe.page import Page
from mpidist.observe.patience import TICK_SECONDS
from mpidist.observe.peers import Peer

# Less than any time, which a claim is at first.
_CLAIMED = 1


def rivals(peers: Iterable[Peer]) -> list[Peer]:
    """Local. Those of some ranks that may see what this rank sees, where each rank of other hosts sees a few only.

    Args:
        peers: The ranks that may speak.
    """
    return [peer for peer in peers if not peer.is_far or peer.details().get("missing")]


def claim(page: Page, others: Iterable[Peer], clock: Clock = CLOCK) -> bool:
    """Local. Claim to end the job; whether this rank is the one that does.

    The earliest claim holds. Who has it waits a moment first: another rank may have read the clock before, and not have
    written its claim yet.

    Args:
        page: This rank's.
        others: The ranks that may claim it, too.
        clock: By which they claim it.
    """
    page.claim = mine = clock.ns()
    clock.sleep(TICK_SECONDS / 5)
    if any(0 < other.claim() <= mine for other in others):
        page.claim = 0
        return False
    page.claim = _CLAIMED
    return True
