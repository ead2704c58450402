"""Node memory: a file in /dev/shm that all ranks of a node have mapped.

All pages of the file are allocated when it is made: if /dev/shm is full, that is an error there and not a SIGBUS later.
The file is unlinked as soon as every rank has mapped it, so that a killed job leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import secrets
from pathlib import Path

import numpy as np

from mpidist.arrays import AnyArray
from mpidist.comm.agreement import together
from mpidist.comm.communicator import Communicator

# Memory of different ranks begins on different cache lines, so that no two cores write to one line. The size is also a
# multiple of the alignment of every dtype.
CACHE_LINE_BYTES = 64
DIRECTORY_VARIABLE = "MPIDIST_SHARED_MEMORY"
PROTECT_VARIABLE = "MPIDIST_PROTECT"


def directory() -> Path:
    """Local. The directory in which node memory is made: /dev/shm, or the one that `MPIDIST_SHARED_MEMORY` names."""
    return Path(os.environ.get(DIRECTORY_VARIABLE, "/dev/shm"))


class NodeMemory:
    """Bytes that all ranks of a node read and write. They are zero at first.

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
        node = communicator.node
        token = node.broadcast_object(secrets.token_hex(8) if node.rank == 0 else "")
        path = directory() / f"mpidist-{token}"
        try:
            # Two steps, since a rank can open the file only after the first rank has made it. A failed step raises on
            # every rank: no rank may go on alone.
            together(
                communicator, f"reserving {byte_count} bytes of node memory in {path.parent}",
                lambda: _create(path, byte_count) if node.rank == 0 else None,
            )
            maps = together(communicator, "opening node memory", lambda: _open(path, byte_count))
        finally:
            # No rank leaves `together` before every rank has entered it: by now each has mapped the file or failed.
            # The mapped memory stays until the last rank unmaps it or ends.
            if node.rank == 0:
                with contextlib.suppress(OSError):
                    path.unlink()
        self.bytes: AnyArray = np.frombuffer(maps[0], np.uint8)
        self.readable: AnyArray = np.frombuffer(maps[1], np.uint8)
        self.readable.flags.writeable = False

    def __repr__(self) -> str:
        return f"NodeMemory({self.bytes.size} bytes)"


def _create(path: Path, byte_count: int) -> None:
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        # Not `ftruncate`: it would reserve no pages, and the first write to a full /dev/shm would be a SIGBUS.
        os.posix_fallocate(descriptor, 0, byte_count)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            free = os.statvfs(path.parent)
            raise OSError(
                errno.ENOSPC,
                f"expected {byte_count} bytes free in {path.parent}, got {free.f_bavail * free.f_frsize} bytes free. "
                "Enlarge it (a container's --shm-size), or build the strategy with shared=False",
            ) from error
        raise
    finally:
        os.close(descriptor)


def _open(path: Path, byte_count: int) -> tuple[mmap.mmap, mmap.mmap]:
    """The memory to write to, and the memory to read from."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        writable = mmap.mmap(descriptor, byte_count)
        protect = os.environ.get(PROTECT_VARIABLE) == "1"
        return writable, mmap.mmap(descriptor, byte_count, prot=mmap.PROT_READ) if protect else writable
    # The mappings stay valid without the descriptor.
    finally:
        os.close(descriptor)
