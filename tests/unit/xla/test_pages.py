"""Large pages for XLA's arrays, which the kernel shows in the table of this process's memory."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

import pytest

pytest.importorskip("jax", reason="JAX is in the extra 'jax'")

from mpidist.xla.pages import LARGE_BYTES, ask_for_large_pages

pytestmark = pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage/enabled").exists(), reason="this kernel has no large pages"
)


def flags_at(address: int) -> list[str]:
    """The flags of the piece of memory with an address."""
    found: list[str] = []
    is_here = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split(maxsplit=1)[0]
        if "-" in first and ":" not in first:
            begin, end = (int(text, 16) for text in first.split("-"))
            is_here = begin <= address < end
        elif is_here and first == "VmFlags:":
            found = line.split()[1:]
    return found


def test_large_pages_are_asked_for() -> None:
    size = 2 * LARGE_BYTES
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    memory[:] = b"7" * size
    assert "hg" not in flags_at(address)
    # Not at the beginning of a page, as XLA's arrays.
    for _ in range(3):
        ask_for_large_pages(address + 64, size - 64)
    assert "hg" in flags_at(address + size // 2)
    assert memory[:] == b"7" * size
