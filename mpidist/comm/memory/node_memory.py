"""Node memory: a file in /dev/shm that all ranks of a node have mapped.

All pages of the file are allocated when it is made: a full /dev/shm is then an error, and not a SIGBUS later.
Each rank allocates its share of them, so that they are in memory near its cores (`man 7 numa`). The file has no name
where the system allows that, so a killed job leaves no files (`shared_file.py`).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
from pathlib import Path

import numpy as np

from mpidist.arrays import AnyArray
from mpidist.comm.group.agreement import together
from mpidist.comm.group.communicator import Communicator
from mpidist.comm.group.resource import Resource
from mpidist.comm.group.shared_file import SharedFile, Shown, directory, open_shared
from mpidist.comm.memory.numa import domain_count, pages_by_domain

logger = logging.getLogger("mpidist")

# Memory of different ranks begins on different cache lines, so that no two cores write to one line. The size is also a
# multiple of the alignment of every dtype.
CACHE_LINE_BYTES = 64
PROTECT_VARIABLE = "MPIDIST_PROTECT"


class NodeMemory(Resource):
    """Collective. Bytes that all ranks of a node read and write. They are zero at first.

    `close` is Local. The memory is freed with the last array over it.

    Args:
        communicator: All ranks of the strategy. Either every node gets its memory or none does.
        byte_count: The size on each node, the same on all its ranks; at least 1.

    Attributes:
        bytes: All bytes as a writable array of uint8.
        readable: The same bytes as a read-only array. Under `MPIDIST_PROTECT=1` its pages are read-only for the
            processor, too: a stray write, for instance from C code, then is a SIGSEGV there instead of a silent change.

    Raises:
        OSError: There is no room (ENOSPC), or a rank cannot open the file that another rank of its node has made; on
            every rank.
    """

    def __init__(self, communicator: Communicator, byte_count: int) -> None:
        try:
            maps = _share(communicator, byte_count, has_name=False)
        except (FileNotFoundError, PermissionError):
            # All ranks get the same error. Ranks in different containers may share a directory and no processes.
            maps = _share(communicator, byte_count, has_name=True)
        self.bytes: AnyArray = np.frombuffer(maps[0], np.uint8)
        self.readable: AnyArray = np.frombuffer(maps[1], np.uint8)
        self.readable.flags.writeable = False

    def _end(self, *, is_collective: bool) -> None:
        del is_collective  # each rank unmaps its own pages
        self.bytes = self.readable = np.empty(0, np.uint8)

    def __repr__(self) -> str:
        return f"NodeMemory({self.bytes.size} bytes)"


def _share(communicator: Communicator, byte_count: int, *, has_name: bool) -> tuple[mmap.mmap, mmap.mmap]:
    """Collective. Make a file on each node and map it on all ranks: the memory to write to, and that to read from."""
    folder, node = directory(), communicator.node
    share = own_share(byte_count, node.rank, node.size)
    with contextlib.ExitStack() as opened:
        failure: OSError | None = None
        shown: Shown | None = None
        if node.rank == 0:
            try:
                file = SharedFile(folder, has_name=has_name)
                opened.callback(file.close)
                os.ftruncate(file.descriptor, byte_count)
                shown = file.shown
            except OSError as error:
                failure = error
        way = node.broadcast_object(shown)

        def reserve() -> int:
            if failure is not None:
                raise failure
            if way is None:
                return -1  # the first rank of the node has no file, and says why, to all
            descriptor = open_shared(way, folder)
            # The mappings stay valid without the descriptor.
            opened.callback(os.close, descriptor)
            _reserve(descriptor, share, folder, byte_count)
            return descriptor

        # A failed step raises on every rank: none may continue alone. No rank leaves `together` before every rank has
        # entered it: by then each rank has opened the file or failed, and the first rank can close its descriptor. The
        # mapped memory stays until the last rank unmaps it or ends.
        descriptor = together(communicator, f"reserving {byte_count} bytes of node memory in {folder}", reserve)
        maps = together(communicator, "mapping node memory", lambda: _map(descriptor, byte_count))
    if domain_count() > 1:
        _log_domains(maps[0], share)
    return maps


def _log_domains(memory: mmap.mmap, share: tuple[int, int]) -> None:
    """Log the NUMA domains of the pages that this rank has allocated: near its cores, if it is bound to cores."""
    array: AnyArray = np.frombuffer(memory, np.uint8)
    # The system counts pages that this process has touched. Before it touches those of other ranks, all counted pages
    # are its own.
    array[slice(*share, mmap.PAGESIZE)].max(initial=0)
    logger.info(
        "pages of this rank's share of node memory by NUMA domain: %s (cores %s)", pages_by_domain(array.ctypes.data),
        sorted(os.sched_getaffinity(0)),
    )


def own_share(byte_count: int, rank: int, size: int) -> tuple[int, int]:
    """Local. The first byte and the end of the pages that a rank of a node allocates, which may be empty."""
    pages = -(-byte_count // mmap.PAGESIZE)
    begin, end = (min(-(-pages * at // size) * mmap.PAGESIZE, byte_count) for at in (rank, rank + 1))
    return begin, end


def _reserve(descriptor: int, share: tuple[int, int], folder: Path, byte_count: int) -> None:
    begin, end = share
    try:
        # Until its pages are reserved, the first write to a full /dev/shm would be a SIGBUS.
        if end > begin:
            os.posix_fallocate(descriptor, begin, end - begin)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            free = os.statvfs(folder)
            raise OSError(
                errno.ENOSPC,
                f"expected {byte_count} bytes free in {folder}, each rank reserving its share, got no room for the "
                f"{end - begin} bytes of this rank: {free.f_bavail * free.f_frsize} bytes free. Enlarge it (a "
                "container's --shm-size), or build the strategy with shared=False",
            ) from error
        raise


def _map(descriptor: int, byte_count: int) -> tuple[mmap.mmap, mmap.mmap]:
    """The memory to write to, and the memory to read from."""
    writable = mmap.mmap(descriptor, byte_count)
    protect = os.environ.get(PROTECT_VARIABLE) == "1"
    return writable, mmap.mmap(descriptor, byte_count, prot=mmap.PROT_READ) if protect else writable
