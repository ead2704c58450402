"""The heaps of a window in memory that the ranks of a node share. Loading it starts MPI."""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from mpidist.arrays import AnyArray
from mpidist.comm.group.mpi_communicator import MPI


def allocate(mpi: MPI.Intracomm, heap_bytes: int, *, is_shared: bool) -> MPI.Win:
    """Collective. Allocate a window.

    Args:
        mpi: The ranks.
        heap_bytes: The size of this rank's heap in bytes.
        is_shared: Whether all ranks share a node. What `Win.Allocate` gives there is shared as well, but Open MPI does
            not show it.
    """
    if is_shared:
        # Each heap begins on a page of its own.
        info = MPI.Info.Create({"alloc_shared_noncontig": "true"})
        win = MPI.Win.Allocate_shared(heap_bytes, 1, info, mpi)
        info.Free()
    else:
        win = MPI.Win.Allocate(heap_bytes, 1, comm=mpi)
    win.Set_errhandler(MPI.ERRORS_RETURN)
    return win


def mapped(win: MPI.Win, rank: int, heap_bytes: int) -> AnyArray | None:
    """Local. The heap of a rank on this node, in this process's own memory; None where MPI does not show it.

    Args:
        win: The window.
        rank: The owner of the heap.
        heap_bytes: The size of the heap in bytes.
    """
    try:
        memory, _ = win.Shared_query(rank)
    except MPI.Exception:
        return None
    if memory.nbytes < heap_bytes:
        return None
    return np.frombuffer(cast(Any, memory), np.uint8, heap_bytes) if heap_bytes else np.empty(0, np.uint8)
