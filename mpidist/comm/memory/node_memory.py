"""Node memory: a file in /dev/shm that all ranks of a node have mapped.

All pages of the file are allocated when it is made: if /dev/shm is full, that is an error there and not a SIGBUS later.
The file has no name where the system allows that, so a killed job leaves nothing behind (`shared_file.py`).
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from pathlib import Path
from typing import cast

import numpy as np

from mpidist.arrays import AnyArray
from mpidist.comm.agreement import together
from mpidist.comm.communicator import Communicator
from mpidist.comm.resource import Resource
from mpidist.comm.shared_file import SharedFile, Shown, open_shared

# Memory of different ranks begins on different cache lines, so that no two cores write to one line. The size is also a
# multiple of the alignment of every dtype.
CACHE_LINE_BYTES = 64
DIRECTORY_VARIABLE = "MPIDIST_SHARED_MEMORY"
PROTECT_VARIABLE = "MPIDIST_PROTECT"


def directory() -> Path:
    """Local. The directory in which node memory is made: /dev/shm, or the one that `MPIDIST_SHARED_MEMORY` names."""
    return Path(os.environ.get(DIRECTORY_VARIABLE, "/dev/shm"))


class NodeMemory(Resource):
    """Bytes that all ranks of a node read and write. They are zero at first.

    `close` is Local. The memory goes with the last array over it.

    Collective. Args:
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
            # The error is that of all ranks. Ranks in different containers may share a directory and no processes.
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
    """Collective. Make a file on each node and map it on all ranks."""
    folder = directory()
    with contextlib.ExitStack() as opened:
        def create() -> Shown | None:
            if communicator.node.rank > 0:
                return None
            file = _create(folder, byte_count, has_name=has_name)
            opened.callback(file.close)
            return file.shown

        # A rank can open the file only after the first rank of its node has made it. A failed step raises on every
        # rank: no rank may go on alone.
        shown = together(communicator, f"reserving {byte_count} bytes of node memory in {folder}", create)
        way = cast(Shown, communicator.node.broadcast_object(shown))
        # No rank leaves `together` before every rank has entered it: by then each has mapped the file or failed, and
        # the file can be closed. The mapped memory stays until the last rank unmaps it or ends.
        return together(communicator, "opening node memory", lambda: _map(way, folder, byte_count))


def _create(folder: Path, byte_count: int, *, has_name: bool) -> SharedFile:
    file = SharedFile(folder, has_name=has_name)
    try:
        # Not `ftruncate`: it would reserve no pages, and the first write to a full /dev/shm would be a SIGBUS.
        os.posix_fallocate(file.descriptor, 0, byte_count)
    except OSError as error:
        file.close()
        if error.errno == errno.ENOSPC:
            free = os.statvfs(folder)
            raise OSError(
                errno.ENOSPC,
                f"expected {byte_count} bytes free in {folder}, got {free.f_bavail * free.f_frsize} bytes free. "
                "Enlarge it (a container's --shm-size), or build the strategy with shared=False",
            ) from error
        raise
    return file


def _map(shown: Shown, folder: Path, byte_count: int) -> tuple[mmap.mmap, mmap.mmap]:
    """The memory to write to, and the memory to read from."""
    descriptor = open_shared(shown, folder)
    try:
        writable = mmap.mmap(descriptor, byte_count)
        protect = os.environ.get(PROTECT_VARIABLE) == "1"
        return writable, mmap.mmap(descriptor, byte_count, prot=mmap.PROT_READ) if protect else writable
    # The mappings stay valid without the descriptor.
    finally:
        os.close(descriptor)
