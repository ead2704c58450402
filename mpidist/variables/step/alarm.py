"""The alarm: where the state of an optimizer has overflowed, all ranks of a node learn of it at the end of the step.

It costs no message: ranks that share memory leave a byte there. Others have all numbers themselves, and other nodes
have the same ones. Only where no rank has all of them, because state or variables are in parts, do the ranks ask.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mpidist.arrays import AnyArray
from mpidist.comm.group.communicator import Communicator
from mpidist.errors import mark_shared
from mpidist.variables.memory.arena_memory import ArenaMemory
from mpidist.variables.update.overflow import Overflow


class Alarm:
    """Collective. The overflows that the ranks of a node have noted in the steps of one plan.

    Args:
        arena: The arena of the variables, in host memory.

    Attributes:
        overflow: The watch over the updates of this rank. Where memory is shared, a step begins and ends with a
            barrier, and an overflow is noted between these.
        text: The text of the error, which each step raises that finds infinite state; empty before.
    """

    def __init__(self, arena: ArenaMemory) -> None:
        # Not the error itself, which would keep what the frames of its traceback hold.
        self.text = ""
        self.overflow = Overflow(_counts_of(arena), arena.communicator.node.rank if arena.shares_memory else 0)

    def rings(self, group: Communicator) -> bool:
        """Collective. Whether an overflow was noted on some rank of a group, each of which has a part of the state."""
        overflow = self.overflow
        return group.all_reduce_max(int(overflow.counts.tobytes() != overflow.seen)) > 0

    def hear(self, look: Callable[[], str], group: Communicator | None = None) -> None:
        """Local, on each rank of a node alike. Look at the state after an overflow was noted, now or earlier.

        Args:
            look: A function that returns the text of the error for the state that this rank has; empty where none is
                infinite.
            group: The ranks that have to raise the same error, where each has a part of the state: the first text
                counts, and the call is Collective. None where all have the same.

        Raises:
            OverflowError: State has become infinite.
        """
        self.overflow.see()
        text = look()
        self.text = text if group is None else next(filter(None, group.all_gather_object(text)), "")
        if self.text:
            raise mark_shared(OverflowError(self.text))


def _counts_of(arena: ArenaMemory) -> AnyArray:
    """A byte for each rank of the node, for all plans of an arena."""
    if arena.overflow_counts is None:
        count, dtype = arena.communicator.node.size, np.dtype(np.uint8)
        slab = None
        if arena.shares_memory:
            try:
                slab = arena.reserve(count, dtype, shared=True)
            except OSError as error:
                # Every rank is here with the same error. What a rank's slice shows, it shows to this rank alone.
                arena.accept_private("a table of the overflows of ranks is", error)
        arena.overflow_counts = (slab or arena.reserve(count, dtype, shared=False)).writable
    return arena.overflow_counts
