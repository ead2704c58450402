"""A barrier of a node's ranks in memory that they share: half a microsecond where every rank has a core.

Where ranks outnumber cores, a rank may wait for another rank that waits for a core. Therefore it yields its core at
once.
"""

from __future__ import annotations

import os

from mpidist.comm.calls.order import CallOrder
from mpidist.comm.calls.signature_page import FLAG, FLAGGED, HASH, NUMBER, CallPage
from mpidist.comm.group.communicator import Communicator
from mpidist.failures.deaths import WATCH

# Number of looks at the others' words before this rank yields its core between looks: about 80 us. Fewer looks are no
# faster on an idle machine; on a busy one another program takes the core and keeps it for milliseconds.
_SPINS = 2000
# Number of looks between two calls that let MPI progress: the rank that this one waits for may wait in MPI until this
# one sends or receives, and MPI need not make progress outside its calls (MPI 4.1, 2.9).
PROGRESS_LOOKS = 64


class NodeBarrier:
    """Local. A barrier of words, one per rank: a rank increments its own, and waits until all others have that count.

    A word consists of a count and the mark of the rank's call: ranks that meet in different calls detect that without
    further looks.

    Args:
        node: The ranks of a node.
        page: The page of the node.
        order: The calls in which the ranks use this barrier.
        core_count: Number of cores that the ranks may use together.

    Attributes:
        core_count: The constructor's argument.
    """

    def __init__(self, node: Communicator, page: CallPage, order: CallOrder, core_count: int) -> None:
        # Aligned words of eight bytes are written and read atomically: no rank sees half a count.
        self._words, self._own, self._others = page.words, page.own_barrier, page.others_barriers
        self._least = 0
        self.core_count = core_count
        # Number of looks before this rank yields its core.
        self._spins = _SPINS if core_count >= node.size else 0
        # Any call of MPI lets it progress; this one changes nothing.
        self._progress = node.mpi.Iprobe
        self._node = node
        self._order = order

    @property
    def count(self) -> int:
        """Local. The number of barriers that this rank has entered."""
        return self._least // NUMBER

    def go_on_at(self, count: int) -> None:
        """Local. Set the number of entered barriers, on all ranks alike; not fewer than any rank has entered."""
        self._least = self._words[self._own] = count * NUMBER

    def __call__(self) -> None:
        """Collective over the node. Return when every rank has called.

        Raises:
            MismatchError, InterruptedCallError: Ranks are in different calls; see `CallOrder.meet`.
            RankError: See `CallOrder.look`.
        """
        words, order = self._words, self._order
        self._least = least = self._least + NUMBER
        mark = order.mark
        is_same = mark <= HASH
        if not is_same:
            words[self._own + FLAGGED] = least
        words[self._own] = word = least + mark
        for other in self._others:
            looks = 0
            while (seen := words[other]) != word:
                if seen >= least:
                    is_same = False
                    break
                looks += 1
                if looks > self._spins:
                    # This also releases the GIL, so that other threads of this process continue during a long wait.
                    os.sched_yield()
                    if looks % PROGRESS_LOOKS == 0:
                        self._look_around()
        if not is_same:
            self._look_closely(least, word)

    def _look_around(self) -> None:
        """Let MPI progress, and check whether the ranks that this one waits for will arrive."""
        self._progress()
        # A rank in another call may never arrive.
        self._order.look(self._has_met)
        if WATCH.dead:
            self._node.require_whole("a barrier of the node")

    def _has_met(self) -> bool:
        return all(self._words[other] >= self._least for other in self._others)

    def _look_closely(self, least: int, word: int) -> None:
        """Find the reason why marks differ. All ranks are in this barrier, or in the next one."""
        is_interrupted, differs = bool(word & FLAG), False
        for other in self._others:
            seen = self._words[other]
            if seen < least + NUMBER:
                is_interrupted = is_interrupted or bool(seen & FLAG)
                differs = differs or bool((seen ^ word) & HASH)
            else:
                # That rank has found no difference in this barrier, or it would not be in the next one.
                is_interrupted = is_interrupted or self._words[other + FLAGGED] == least
        if is_interrupted or differs:
            self._order.meet(least // NUMBER, differs=differs)
