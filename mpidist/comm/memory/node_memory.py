"""Node memory: a file of our own in /dev/shm that all ranks of a node have mapped.

The file is filled when it is made, so that a full /dev/shm is an error there and never a SIGBUS later, and unlinked
as soon as every rank has it, so that a kill leaves nothing behind.
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

# No two ranks write to one line of the cache; every dtype fits its alignment.
CACHE_LINE_BYTES = 64
DIRECTORY_VARIABLE = "MPIDIST_SHARED_MEMORY"
PROTECT_VARIABLE = "MPIDIST_PROTECT"


def directory() -> Path:
    """Local. Where node memory is made: /dev/shm, or what `MPIDIST_SHARED_MEMORY` names."""
    return Path(os.environ.get(DIRECTORY_VARIABLE, "/dev/shm"))


class NodeMemory:
    """Bytes that all ranks of a node read and write. Zero at first.

    Args:
        communicator: All ranks of the strategy: either every node gets its memory or no rank does.
        byte_count: Size on each node, the same on all its ranks; at least 1.

    Attributes:
        bytes: All of it, as a writable array of uint8.
        readable: The same bytes, read-only; under `MPIDIST_PROTECT=1` mapped so for the processor, and a stray
            write (from C, say) is a SIGSEGV at the culprit instead of a silent change.

    Raises:
        OSError: There is no room (ENOSPC), or a rank of a node cannot open what another made; on every rank.
    """

    def __init__(self, communicator: Communicator, byte_count: int) -> None:
        node = communicator.node
        token = node.broadcast_object(secrets.token_hex(8) if node.rank == 0 else "")
        path = directory() / f"mpidist-{token}"
        try:
            # The first rank makes the file, then all map it: two steps, each agreed by all ranks.
            together(
                communicator, f"reserving {byte_count} bytes of node memory in {path.parent}",
                lambda: _create(path, byte_count) if node.rank == 0 else None,
            )
            maps = together(communicator, "opening node memory", lambda: _open(path, byte_count))
        finally:
            # Nobody leaves `together` before every rank has entered it, so every rank has mapped or failed by now.
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
        os.posix_fallocate(descriptor, 0, byte_count)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            free = os.statvfs(path.parent)
            raise OSError(
                errno.ENOSPC,
                f"{path.parent} has {free.f_bavail * free.f_frsize} bytes free. Enlarge it (a container's --shm-size), "
                "or build the strategy with shared=False",
            ) from error
        raise
    finally:
        os.close(descriptor)


def _open(path: Path, byte_count: int) -> tuple[mmap.mmap, mmap.mmap]:
    """The memory to write to, and to read from."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        writable = mmap.mmap(descriptor, byte_count)
        protect = os.environ.get(PROTECT_VARIABLE) == "1"
        return writable, mmap.mmap(descriptor, byte_count, prot=mmap.PROT_READ) if protect else writable
    finally:
        os.close(descriptor)
