"""Large pages for XLA's large arrays, as NumPy asks for its own.

Between processes memory is copied page by page, and pages of 2 MB in place of 4 KB make such a copy faster. Where Linux
gives large pages only to who asks (`madvise`), XLA does not.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
from collections.abc import Callable

# NumPy asks from this size on.
LARGE_BYTES = 1 << 22
# Of <sys/mman.h>; Python's mmap has only the first.
_HUGE_PAGES, _COLLAPSE = 14, 25
# The number of arrays that are known.
_KEPT = 256

# By address: the size, and how often it was seen.
_seen: dict[int, tuple[int, int]] = {}


def ask_for_large_pages(address: int, size: int) -> None:
    """Local. Ask the system for large pages for the memory of a large array, if it stays at its address.

    The system is asked at once, which costs nothing and serves memory that is still untouched. When the array is seen
    again, its pages are collapsed into large ones, which takes the time of a copy, once.

    Args:
        address: The address of the array.
        size: Its size in bytes.
    """
    before, count = _seen.get(address, (0, 0))
    if before != size:
        count = 0
    if count > 1:
        return
    if len(_seen) >= _KEPT:
        _seen.clear()
    _seen[address] = size, count + 1
    begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (address + size - begin) // mmap.PAGESIZE * mmap.PAGESIZE
    # An older system knows no second advice, and then nothing is lost.
    _madvise()(begin, length, _COLLAPSE if count else _HUGE_PAGES)


@functools.cache
def _madvise() -> Callable[[int, int, int], int]:
    function = ctypes.CDLL(None, use_errno=True).madvise
    function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int), ctypes.c_int
    advise: Callable[[int, int, int], int] = function
    return advise
