"""Sleep until another process changes a word of shared memory (`man 2 futex`).

A rank that gives its core away by `sched_yield` still takes its turns. Where many ranks wait on a core, these turns
take longer than the work of the one that they wait for. A rank that sleeps takes none.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

# On x86-64, the only machine whose ranks meet in memory; see `show_calls`.
_SYS_FUTEX = 202
_WAIT, _WAKE, _ALL = 0, 1, (1 << 31) - 1


class _Time(ctypes.Structure):
    """`struct timespec`."""

    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Sleepers:
    """Words of shared memory on which ranks sleep.

    Args:
        memory: The memory, aligned to words of eight bytes; it must outlive this object.
    """

    def __init__(self, memory: memoryview) -> None:
        self._begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))

    def sleep(self, place: int, seen: int, seconds: float) -> None:
        """Local. Return when another rank wakes those who sleep on a word, or some time has passed, or for no reason.

        Args:
            place: The number of the word.
            seen: The word, as this rank has seen it: it does not sleep if another rank has changed its lower half.
            seconds: The longest time, less than one second.
        """
        time = _Time(0, int(seconds * 1e9))
        _futex()(_SYS_FUTEX, self._address(place), _WAIT, seen & 0xFFFFFFFF, ctypes.byref(time), None, 0)

    def wake(self, place: int) -> None:
        """Local. Wake all who sleep on a word."""
        _futex()(_SYS_FUTEX, self._address(place), _WAKE, _ALL, None, None, 0)

    def _address(self, place: int) -> int:
        return self._begin + 8 * place


@functools.cache
def _futex() -> Any:
    """The system call: not private to the process, as ranks have the memory at different addresses."""
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    call.argtypes = (
        ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_void_p,
        ctypes.c_uint32,
    )
    return call
