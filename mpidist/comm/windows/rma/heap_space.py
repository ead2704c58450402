"""Room for heaps: the heaps of all ranks of a host must fit its shared memory.

MPI libraries differ where there is too little: Open MPI raises an error, and MPICH ends the process by a signal when a
page is first touched.
"""

from __future__ import annotations

import errno
import os
from typing import NamedTuple

from mpidist.comm.group.communicator import Communicator
from mpidist.errors import mark_shared

# Where both MPICH and Open MPI make the memory that ranks of a host share.
_FOLDER = "/dev/shm"


class _Demand(NamedTuple):
    """The heap of a rank, and its place.

    Attributes:
        heap_bytes: The size of its heap.
        place: Host and device number of its shared memory. Containers on one host have memory of their own.
        free_bytes: The free bytes there; None where the rank shares memory with no other rank, and its heap is private.
    """

    heap_bytes: int
    place: tuple[str, int]
    free_bytes: int | None


def require_room(communicator: Communicator, heap_bytes: int) -> tuple[int, ...]:
    """Collective. Compare the heaps of each host with the room there.

    Args:
        communicator: The ranks of the window.
        heap_bytes: The size of this rank's heap.

    Returns:
        The sizes of all heaps, in the order of the ranks.

    Raises:
        OSError: There is too little room on a host (`errno.ENOSPC`); on every rank.
    """
    demands = communicator.all_gather_object(_demand(communicator, heap_bytes))
    for place in dict.fromkeys(one.place for one in demands if one.free_bytes is not None):
        mine = [one for one in demands if one.place == place and one.free_bytes is not None]
        wanted = sum(one.heap_bytes for one in mine)
        free = min(one.free_bytes or 0 for one in mine)
        if wanted > free:
            heaps = sum(one.heap_bytes > 0 for one in mine)
            raise mark_shared(OSError(
                errno.ENOSPC,
                f"the heaps of a window must fit into {_FOLDER} of {place[0]}: the {heaps} heaps of its ranks have "
                f"{wanted} bytes together, and {free} bytes are free. Give servers smaller heaps, spread them over "
                "more hosts, or enlarge it (a container's --shm-size)",
            ))
    return tuple(one.heap_bytes for one in demands)


def _demand(communicator: Communicator, heap_bytes: int) -> _Demand:
    try:
        space, device = os.statvfs(_FOLDER), os.stat(_FOLDER).st_dev
    except OSError:
        # MPI then finds another place, which is not known here.
        return _Demand(heap_bytes, (communicator.host, 0), None)
    is_private = communicator.node.size == 1
    return _Demand(heap_bytes, (communicator.host, device), None if is_private else space.f_bavail * space.f_frsize)
