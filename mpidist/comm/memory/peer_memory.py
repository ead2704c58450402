"""Peer memory: arrays of the node's other processes, which the kernel reads and writes in one copy (Linux).

`process_vm_readv` and `process_vm_writev` (cross memory attach, `man 2 process_vm_readv`) need no shared memory and
work with any array. They require the right to trace the other process: the same user, and no container or security
module that forbids it. `open_peer_memory` tries it once.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from mpidist.arrays import AnyArray
from mpidist.comm.group.communicator import Communicator
from mpidist.comm.memory.shared_buffers import address_of
from mpidist.errors import MismatchError, mark_shared

SWITCH = "MPIDIST_PEER_MEMORY"
CHECK = "MPIDIST_CHECK=1"

# Under Yama, the security module of Debian and Ubuntu, only its ancestors may trace a process, unless the process
# allows others by this call (`man 2 PR_SET_PTRACER`). The kernel still checks the user under PTRACER_ANY. MPI libraries
# do the same.
_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
_PR_SET_PTRACER = 0x59616D61
_PTRACER_ANY = ctypes.c_ulong(-1)

# With these libraries a program may hold arrays in memory that a driver has mapped, which the kernel may not reach.
_DRIVERS = frozenset(("cupy", "torch", "jax", "numba", "pycuda", "tensorflow"))


class _Span(ctypes.Structure):
    """`struct iovec`: the address and the number of bytes."""

    _fields_ = (("begin", ctypes.c_void_p), ("count", ctypes.c_size_t))


class PeerMemory:
    """Two arrays of every rank of the node, its source and its target, which the other ranks reach through the kernel.

    Args:
        processes: The process number of each rank of the node.
        rank: This rank among them.
        table: An array of int64 and shape (ranks, 3) in node memory, in which each rank shows the others its addresses.
        barrier: The barrier of the node.

    Attributes:
        barrier: The constructor's argument.
    """

    def __init__(
        self, processes: list[int], rank: int, table: AnyArray, barrier: Callable[[], None]
    ) -> None:
        self._processes = processes
        self._rank = rank
        # A memoryview gives Python numbers. Reading a row as a NumPy array takes five times as long.
        self._table = table.data.cast("B").cast("q")
        self._own_row = address_of(table[rank])
        self.barrier = barrier
        self._sources: list[int] = []
        self._targets: list[int] = []
        self._here, self._there = _Span(), _Span()
        self._spans = (ctypes.byref(self._here), 1, ctypes.byref(self._there), 1, 0)

    def show(self, source: AnyArray, target: AnyArray, byte_count: int) -> bool:
        """Collective over the node. Let the other ranks read `source` and write to `target` until the next barrier.

        The caller keeps both arrays alive until then: the others use addresses, and no reference counts.

        Args:
            source: The array to be read; contiguous.
            target: The array to be written to; contiguous.
            byte_count: The size of the arrays, the same on all ranks, so that none writes beyond the end of an array.

        Returns:
            Whether the kernel reaches the arrays of all ranks; the same on every rank. It may not reach memory that a
            driver has mapped, such as CUDA's pinned memory (`VM_IO` in the kernel's `check_vma_flags`).

        Raises:
            MismatchError: The ranks' numbers of bytes differ; on every rank of the node.
        """
        shown = [address_of(source)]
        shown.append(shown[0] if target is source else address_of(target))
        # The view of the keys looks up a few names. The set would iterate over every module of the program, which takes
        # 8 us with PyTorch, and 30 us between large arrays, which evict the modules' names from the cache.
        has_driver = not sys.modules.keys().isdisjoint(_DRIVERS)
        if has_driver and not all(self._reaches(address) for address in set(shown)):
            shown = [0, 0]
        table, begin = self._table, 3 * self._rank
        table[begin], table[begin + 1], table[begin + 2] = *shown, byte_count
        self.barrier()
        rows = table.tolist()
        self._sources, self._targets, byte_counts = rows[::3], rows[1::3], rows[2::3]
        if len(set(byte_counts)) > 1:
            raise mark_shared(MismatchError(
                f"the arrays of a collective call must be of one size on all ranks, got {byte_counts} bytes on the "
                f"ranks of this node. Make the same calls on all ranks; {CHECK} compares the shapes in every call"
            ))
        return 0 not in self._sources

    def read(self, rank: int, offset: int, into: AnyArray) -> None:
        """Local. Fill a contiguous array with the bytes of a rank's source, from byte `offset` on."""
        self._copy(_calls().process_vm_readv, rank, self._sources[rank] + offset, into)

    def read_address(self, rank: int, address: int, into: AnyArray) -> None:
        """Local. Fill a contiguous array with the bytes at an address of a rank's process."""
        self._copy(_calls().process_vm_readv, rank, address, into)

    def write(self, rank: int, offset: int, array: AnyArray) -> None:
        """Local. Write a contiguous array to the target of a rank, from byte `offset` on."""
        self._copy(_calls().process_vm_writev, rank, self._targets[rank] + offset, array)

    def _reaches(self, address: int) -> bool:
        """Whether the kernel reads this process's own memory at an address."""
        here, there = self._here, self._there
        here.begin, there.begin, here.count, there.count = self._own_row, address, 1, 1
        return int(_calls().process_vm_readv(self._processes[self._rank], *self._spans)) == 1

    def _copy(self, call: Any, rank: int, address: int, array: AnyArray) -> None:
        here, there = self._here, self._there
        here.begin, there.begin = address_of(array), address
        left = array.nbytes
        # One call copies at most 2 GiB, and may copy less: the return value counts.
        while left:
            here.count = there.count = left
            done = call(self._processes[rank], *self._spans)
            if done <= 0:
                error = ctypes.get_errno()
                raise OSError(
                    error,
                    f"{call.__name__} of {left} bytes with rank {rank} of this node: {os.strerror(error)}. "
                    f"{SWITCH}=0 in the environment switches such copies off",
                )
            here.begin += done
            there.begin += done
            left -= done


def open_peer_memory(
    communicator: Communicator, table: AnyArray, barrier: Callable[[], None]
) -> tuple[PeerMemory | None, str]:
    """Collective. Open the memory of this node's other ranks, if every rank can reach the memory of its node's ranks.

    Args:
        communicator: All ranks.
        table: An array of int64 and shape (ranks of the node, 3) in node memory.
        barrier: The barrier of the node.

    Returns:
        The memory, or None on every rank; and the reason for None that this rank has found.
    """
    node = communicator.node
    why = _why_not()
    # In different containers one process number may name different processes. Each rank therefore writes a random token
    # into its memory, and the others must find it there.
    token = np.frombuffer(os.urandom(16), np.uint8)
    shown = node.all_gather_object((os.getpid(), address_of(token), token.tobytes()))
    peers = PeerMemory([process for process, _, _ in shown], node.rank, table, barrier)
    if not why:
        seen = np.empty_like(token)
        try:
            for rank, (_, address, expected) in enumerate(shown):
                peers.read_address(rank, address, seen)
                if seen.tobytes() != expected:
                    why = (
                        f"this rank finds another process under the process number of rank {rank} of this node "
                        "(different containers?)"
                    )
        except OSError as error:
            why = str(error)
    # No rank leaves this call before all have read the tokens, which must be alive until then.
    if communicator.all_reduce_max(int(bool(why))):
        return None, why or "another rank cannot use it"
    return peers, ""


def _why_not() -> str:
    """The reason why peer memory cannot be tried; empty if there is none."""
    if os.environ.get(SWITCH) == "0":
        return f"{SWITCH}=0"
    if not hasattr(_calls(), "process_vm_readv"):
        return "this system has no process_vm_readv"
    if _YAMA.exists():
        # This must precede the first attempt of any rank: the others cannot read this process otherwise.
        _calls().prctl(_PR_SET_PTRACER, _PTRACER_ANY, 0, 0, 0)
    return ""


@functools.cache
def _calls() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    for name in ("process_vm_readv", "process_vm_writev"):
        if hasattr(library, name):
            call = getattr(library, name)
            call.restype = ctypes.c_ssize_t
            call.argtypes = (
                ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong,
            )
    return library
