"""A barrier of many ranks of a node: they arrive up a tree and are released down it, so that each looks at a few.

A rank shows that it has arrived when all its children have, and beside that what marks there are in its part of the
tree. The first rank knows those of all ranks then, and its verdict goes down with the release: all ranks raise the same
error in the same barrier. No rank arrives at the next barrier before its parent has released it, and none releases
before all below have arrived; so nobody changes a word that another has yet to read.
"""

from __future__ import annotations

import os
import time

from mpidist.comm.calls.order import CallOrder
from mpidist.comm.calls.rank_tree import children_of, parent_of
from mpidist.comm.calls.signature_page import FLAG, HASH, NUMBER, SLEEPS, CallPage, order_stores
from mpidist.comm.group.communicator import Communicator
from mpidist.comm.memory.node_barrier import PROGRESS_LOOKS, NodeBarrier
from mpidist.comm.memory.sleepers import Sleepers

# A rank with a core of its own that has waited for longer than a time slice sleeps. Where ranks outnumber cores it
# sleeps at once: its turns would keep the core from those that have work. A step of 64 ranks on 2 cores, beside other
# programs, took 17 ms so, and 37 to 54 ms where they gave their cores away for 5 ms first; one of 12 ranks 2 to 4 ms,
# and 9 to 20 ms.
_YIELDS_SECONDS = 0.005
# After so long it looks whether MPI or others need it. Each sleep is twice as long as the one before, up to this time
# for every 16 ranks of the node: all their looks together take a few percent of a core.
_SLEEP_SECONDS, _LOOKERS, _LONGEST_SLEEP_SECONDS = 0.005, 16, 0.5
# A part of the tree in which marks differ shows another mark than its first rank's.
_UNLIKE = 0x2AAAAA
_DIFFERS = 1


class TreeBarrier(NodeBarrier):
    """Two words for each rank: the count of its arrival with the mark of its part of the tree, and that of its release.

    Local. It takes the arguments of `NodeBarrier`.
    """

    def __init__(self, node: Communicator, page: CallPage, order: CallOrder, core_count: int) -> None:
        super().__init__(node, page, order, core_count)
        arrivals, releases = page.barriers, page.releases
        parent = parent_of(node.rank)
        children = children_of(node.rank, node.size)
        self._children = tuple(arrivals[child] for child in children)
        self._release = releases[node.rank]
        # Where somebody says that he sleeps: of each word there is one writer. A word of all children would be set back
        # by one that is about to leave the barrier before.
        self._parent_sleeps = (self._own + SLEEPS,)
        self._sleeps = self._release + SLEEPS
        self._children_sleep = tuple(releases[child] + SLEEPS for child in children)
        self._parent_release = None if parent is None else releases[parent]
        self._sleepers = Sleepers(page.memory)
        self._yields = _YIELDS_SECONDS if self._spins else 0.0
        self._longest = min(_LONGEST_SLEEP_SECONDS, _SLEEP_SECONDS * max(1, node.size // _LOOKERS))

    def go_on_at(self, count: int) -> None:
        """Local. See `NodeBarrier.go_on_at`."""
        super().go_on_at(count)
        self._words[self._release] = self._least

    def __call__(self) -> None:
        """Collective over the node. See `NodeBarrier.__call__`."""
        words = self._words
        self._least = least = self._least + NUMBER
        word = least + self._order.mark
        flag, differs = word & FLAG, False
        for child in self._children:
            if (seen := words[child]) < least:
                seen = self._wait(child, least, child + SLEEPS)
            if seen != word:
                flag |= seen & FLAG
                differs = differs or (seen ^ word) & HASH > 0
        self._show(self._own, (word | flag) ^ (_UNLIKE if differs else 0), least, self._parent_sleeps)
        verdict = flag | differs
        if self._parent_release is not None:
            if (seen := words[self._parent_release]) < least:
                seen = self._wait(self._parent_release, least, self._sleeps)
            verdict = seen & (FLAG | _DIFFERS)
        if self._children:
            self._show(self._release, least | verdict, least, self._children_sleep)
        if verdict:
            self._order.meet(least // NUMBER, differs=bool(verdict & _DIFFERS))

    def _show(self, place: int, word: int, least: int, sleeps: tuple[int, ...]) -> None:
        """Change a word of this rank, and wake those who say in `sleeps` that they sleep until then."""
        words = self._words
        words[place] = word
        # Else this rank could miss one that says so now and has not seen the new word.
        order_stores()
        for one in sleeps:
            if words[one] == least:
                self._sleepers.wake(place)
                break

    def _wait(self, place: int, least: int, sleeps: int) -> int:
        """Wait until a word of another rank has counted so far, and say in `sleeps` if asleep; returns the word."""
        words, looks, end, seconds = self._words, 0, 0.0, _SLEEP_SECONDS
        while (seen := words[place]) < least:
            looks += 1
            if looks <= self._spins:
                continue
            now = time.monotonic()
            end = end or now + self._yields
            if now < end:
                # Both ways release the GIL.
                os.sched_yield()
                if looks % PROGRESS_LOOKS == 0:
                    self._look_around()
                continue
            words[sleeps] = least
            # The system compares the word behind an atomic operation: who changes it before sees that this rank sleeps.
            self._sleepers.sleep(place, seen, seconds)
            seconds = min(2 * seconds, self._longest)
            if words[place] < least:
                self._look_around()
        return seen
