"""A barrier of a node's ranks in memory that they share: about a microsecond where every rank has a core.

MPI's own takes 1 to 5 us for two ranks, which a pipeline of small blocks feels. Where ranks outnumber cores, whom one
waits for may be waiting for one's core, so it is given away at once: that, too, takes less time than MPI's barrier (4
ranks on 2 loaded cores, median: 9 us against Open MPI's 13, 0.4 ms against MPICH's 1.7).
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable

from mpidist.arrays import AnyArray
from mpidist.comm.communicator import Communicator

# Plain stores become visible in their order, and plain loads are done in theirs, on x86 only (Intel SDM 3A, 9.2.2).
# Elsewhere a counter might be seen before the data that it speaks of.
_ORDERED_MACHINES = ("x86_64", "AMD64")
_LINE = 64
# Looks at the others' counters before this rank gives its core away between looks: about 80 us. Fewer are no faster
# on an idle machine, and on a busy one another program takes the core, and keeps it for milliseconds.
_SPINS = 2000
# At every so many looks MPI goes on with what is under way: whom one waits for may wait in MPI for this rank to send or
# receive, and only calls of MPI need to make progress (MPI 4.1, 2.9).
_PROGRESS_LOOKS = 64


class NodeBarrier:
    """Counters, one per rank: who arrives counts up, and looks until all have.

    Args:
        node: The ranks of a node.
        memory: Zeros that they share, `byte_count` bytes, on an aligned address.
        spins: How often to look before giving the core away.
    """

    def __init__(self, node: Communicator, memory: AnyArray, spins: int = _SPINS) -> None:
        # Eight bytes that lie on their own size are written and read in one piece.
        self._counters = memory.data.cast("B").cast("q")
        self._mine = node.rank * _LINE // 8
        self._others = tuple(rank * _LINE // 8 for rank in range(node.size) if rank != node.rank)
        self._count = 0
        self._spins = spins
        # Whether there is a message is not asked for: MPI looks after all of them.
        self._progress = node.mpi.Iprobe

    @staticmethod
    def byte_count(rank_count: int) -> int:
        """Local. What the counters of so many ranks take: a cache line each."""
        return rank_count * _LINE

    def __call__(self) -> None:
        """Collective over the node. Return when every rank has called."""
        counters, spins = self._counters, self._spins
        self._count = count = self._count + 1
        counters[self._mine] = count
        for other in self._others:
            looks = 0
            while counters[other] < count:
                looks += 1
                if looks > spins:
                    os.sched_yield()
                    if looks % _PROGRESS_LOOKS == 0:
                        self._progress()


def open_node_barrier(communicator: Communicator, memory: AnyArray) -> Callable[[], None]:
    """Collective. The fastest barrier of this rank's node: in shared memory, or MPI's.

    Args:
        communicator: All ranks.
        memory: Node memory, zeros, `NodeBarrier.byte_count` bytes.
    """
    node = communicator.node
    # All ranks of a node must take the same; all nodes may.
    if communicator.all_reduce_max(int(platform.machine() not in _ORDERED_MACHINES)):
        return node.barrier
    return NodeBarrier(node, memory, _SPINS if (os.cpu_count() or 1) >= node.size else 0)
