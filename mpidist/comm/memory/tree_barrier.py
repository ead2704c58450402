"""A barrier of many ranks of a node: arrivals go up a tree and releases go down, so that each rank looks at a few.

A rank shows that it has arrived after all its children have, with the marks in its part of the tree. The first rank
then has the marks of all ranks, and sends its verdict down with the release: all ranks raise the same error in the same
barrier. No rank arrives at the next barrier before its parent has released it, and none releases before all ranks below
it have arrived. So no rank changes a word that another rank has yet to read.
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

# Seconds for which a rank with a core of its own yields before it sleeps: longer than a time slice. Where ranks
# outnumber cores, a rank sleeps at once: its turns would keep the core from ranks that have work. A step of 64 ranks on
# 2 cores, beside other programs, took 17 ms so, and 37 to 54 ms where ranks yielded for 5 ms first; a step of 12 ranks
# took 2 to 4 ms, and 9 to 20 ms.
_YIELDS_SECONDS = 0.005
# Seconds of the first sleep, after which a rank lets MPI progress and checks the other ranks. Each sleep is twice as
# long as the one before, up to 5 ms for every 16 ranks of the node and 0.5 s at most: the looks of all ranks together
# take a few percent of a core.
_SLEEP_SECONDS, _LOOKERS, _LONGEST_SLEEP_SECONDS = 0.005, 16, 0.5
# Changes the mark of a part of the tree in which marks differ, so that it differs from the mark of its first rank.
_UNLIKE = 0x2AAAAA
_DIFFERS = 1


class TreeBarrier(NodeBarrier):
    """Local. A barrier in a tree of ranks. It takes the arguments of `NodeBarrier`.

    Each rank has two words: the count of its arrival with the mark of its part of the tree, and the count of its
    release with the verdict.
    """

    def __init__(self, node: Communicator, page: CallPage, order: CallOrder, core_count: int) -> None:
        super().__init__(node, page, order, core_count)
        arrivals, releases = page.barriers, page.releases
        parent = parent_of(node.rank)
        children = children_of(node.rank, node.size)
        self._children = tuple(arrivals[child] for child in children)
        self._release = releases[node.rank]
        # Words in which ranks show that they sleep, each written by one rank. If all children wrote one word, a child
        # that is about to leave the previous barrier could set it back.
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
        """Change a word of this rank, and wake the ranks that show in `sleeps` that they sleep until that count."""
        words = self._words
        words[place] = word
        # Without this, this rank could miss a rank that is about to sleep and has not seen the new word.
        order_stores()
        for one in sleeps:
            if words[one] == least:
                self._sleepers.wake(place)
                break

    def _wait(self, place: int, least: int, sleeps: int) -> int:
        """Wait until a word of another rank has a count, and show in `sleeps` when asleep; returns the word."""
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
            # The system compares the word after an atomic operation: a rank that changes it before sees the note above.
            self._sleepers.sleep(place, seen, seconds)
            seconds = min(2 * seconds, self._longest)
            if words[place] < least:
                self._look_around()
        return seen
