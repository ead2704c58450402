"""Sleep until another process changes a word of shared memory (`man 2 futex`).

A rank that yields its core by `sched_yield` is still scheduled in turn. Where many ranks wait on a core, these turns
take longer than the work of the rank that they wait for. A rank that sleeps is not scheduled.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

# The number on x86-64, the only machine whose ranks meet in memory; see `show_calls`.
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
        """Local. Sleep until another rank wakes the sleepers on a word, or a time has passed; may return earlier.

        Args:
            place: The number of the word.
            seen: The value that this rank has read: it does not sleep if the lower half of the word has changed since.
            seconds: The longest time, less than one second.
        """
        time = _Time(0, int(seconds * 1e9))
        _futex()(_SYS_FUTEX, self._address(place), _WAIT, seen & 0xFFFFFFFF, ctypes.byref(time), None, 0)

    def wake(self, place: int) -> None:
        """Local. Wake all ranks that sleep on a word."""
        _futex()(_SYS_FUTEX, self._address(place), _WAKE, _ALL, None, None, 0)

    def _address(self, place: int) -> int:
        return self._begin + 8 * place


@functools.cache
def _futex() -> Any:
    """The system call, used without the private flag: processes have the memory at different addresses."""
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    call.argtypes = (
        ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_void_p,
        ctypes.c_uint32,
    )
    return call
