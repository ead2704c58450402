"""The memory of a server's heap: its pages are allocated when they are first touched, as long as there are any.

Where a page of shared memory is missing, touching it ends a process by SIGBUS: not only the server, but any rank of its
host that writes into a slot. A server therefore touches all pages itself before any use, by a system call that returns
an error instead.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

import numpy as np

from mpidist.arrays import AnyArray
from mpidist.parameter_server.heap.layout import HeapFullError

_FOLDER = "/dev/shm"
_PAGE = os.sysconf("SC_PAGE_SIZE")
# The kernel writes zeros in calls of this size.
_CALL_BYTES = 1 << 30


class HeapMemory:
    """The heap of this process, and the pages of it that were touched.

    Args:
        memory: The heap, uint8.
    """

    def __init__(self, memory: AnyArray) -> None:
        self._memory = memory
        first = memory.ctypes.data
        # The offset of the heap in its first page, and for each page whether it was touched.
        self._begin = first % _PAGE
        self._touched = np.zeros(-(-(self._begin + memory.size) // _PAGE), bool)
        self._is_shared = _is_shared(first)

    def reserve(self, begin: int, byte_count: int, what: str) -> None:
        """Local. Fill a part of the heap with zeros; from then on its pages are allocated.

        Args:
            begin: The first byte.
            byte_count: Number of bytes.
            what: The part, for the error.

        Raises:
            HeapFullError: There are fewer pages. The content of the heap stays, and no page is lost.
        """
        low, high = (self._begin + begin) // _PAGE, -(-(self._begin + begin + byte_count) // _PAGE)
        missing = int(np.count_nonzero(~self._touched[low:high])) * _PAGE
        if missing and self._is_shared and missing > _free_bytes():
            raise _full(what, missing)
        zeros = os.open("/dev/zero", os.O_RDONLY | os.O_CLOEXEC)
        try:
            while byte_count:
                part = self._memory[begin : begin + min(byte_count, _CALL_BYTES)].data
                # Another process may have taken the pages meanwhile: EFAULT, or less than all.
                count = os.readv(zeros, [part])
                if not count:
                    raise _full(what, missing)
                begin, byte_count = begin + count, byte_count - count
        except OSError as error:
            raise _full(what, missing) from error
        finally:
            os.close(zeros)
        self._touched[low:high] = True


def _free_bytes() -> int:
    space = os.statvfs(_FOLDER)
    return space.f_bavail * space.f_frsize


def _full(what: str, missing: int) -> HeapFullError:
    return HeapFullError(
        f"{what} takes {missing} bytes that the heap has not used before, and {_FOLDER} of {socket.gethostname()} has "
        f"{_free_bytes()} bytes free: MPI makes heaps there, whose memory is allocated when it is first used. Enlarge "
        "it (a container's --shm-size), remove other files there, or drop variables"
    )


def _is_shared(address: int) -> bool:
    """Whether this address is in a file of the folder for shared memory."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return False
    for line in lines:
        bounds, *_, path = line.split(maxsplit=5) if len(line.split()) > 5 else (line.split()[0], "")
        low, _, high = bounds.partition("-")
        if int(low, 16) <= address < int(high, 16):
            return path.startswith(_FOLDER + "/")
    return False
