"""A barrier of a node's ranks in memory that they share: half a microsecond where every rank has a core.

Where ranks outnumber cores, a rank may wait for another that waits for its core. Therefore it gives the core away at
once.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable

from mpidist.arrays import AnyArray
from mpidist.comm.communicator import Communicator
from mpidist.comm.deaths import WATCH
from mpidist.comm.memory.node_memory import CACHE_LINE_BYTES

# On x86 all ranks see a rank's stores in their order, and loads are done in theirs (Intel SDM 3A, 9.2.2). On other
# machines a rank could see a counter before the data that were written ahead of it.
_ORDERED_MACHINES = ("x86_64", "AMD64")
# Looks at the others' counters before this rank gives its core away between looks: about 80 us. Fewer looks are no
# faster on an idle machine; on a busy one another program takes the core and keeps it for milliseconds.
_SPINS = 2000
# Once in so many looks MPI gets a chance to go on: the rank that this one waits for may wait in MPI until this one
# sends or receives, and MPI need not make progress outside its calls (MPI 4.1, 2.9).
_PROGRESS_LOOKS = 64


class NodeBarrier:
    """Counters, one per rank: a rank that arrives counts up its own, and looks at the others until all have counted.

    Args:
        node: The ranks of a node.
        memory: Zeros that they share, `byte_count` bytes, on an aligned address.
        spins: How often to look before giving the core away.
    """

    def __init__(self, node: Communicator, memory: AnyArray, spins: int = _SPINS) -> None:
        # Aligned words of eight bytes are written and read in one piece: no rank sees half a counter.
        self._counters = memory.data.cast("B").cast("q")
        self._mine = node.rank * CACHE_LINE_BYTES // 8
        self._others = tuple(rank * CACHE_LINE_BYTES // 8 for rank in range(node.size) if rank != node.rank)
        self._count = 0
        self._spins = spins
        # Any call of MPI will do, and this one changes nothing.
        self._progress = node.mpi.Iprobe
        self._node = node

    @staticmethod
    def byte_count(rank_count: int) -> int:
        """Local. The size of the counters of so many ranks: a cache line each."""
        return rank_count * CACHE_LINE_BYTES

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
                    # It also releases the GIL, so that other threads of this process go on during a long wait.
                    os.sched_yield()
                    if looks % _PROGRESS_LOOKS == 0:
                        self._progress()
                        if WATCH.dead:
                            self._node.require_whole("a barrier of the node")


def open_node_barrier(communicator: Communicator, memory: AnyArray) -> Callable[[], None]:
    """Collective. The fastest barrier of this rank's node: on x86 the one in shared memory, elsewhere MPI's.

    Args:
        communicator: All ranks.
        memory: Node memory, zeros, `NodeBarrier.byte_count` bytes.
    """
    node = communicator.node
    # All ranks of a node must take the same; all nodes may.
    if communicator.all_reduce_max(int(platform.machine() not in _ORDERED_MACHINES)):
        return node.barrier
    return NodeBarrier(node, memory, _SPINS if (os.cpu_count() or 1) >= node.size else 0)
