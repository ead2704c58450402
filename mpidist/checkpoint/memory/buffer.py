"""One buffer of a node: a file in memory with a copy of the state, valid from the moment its header is complete.

The file begins with a page: the header, and what is known of the copy as JSON. The layout follows, then the data. The
mark of the header is written last, and taken away before anything else is written: a kill at any moment leaves a buffer
that is either whole or empty. What a process has stored in memory stays there when it is killed.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import struct
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mpidist.arrays import AnyArray
from mpidist.checkpoint.file.layout import PAGE_BYTES
from mpidist.comm.memory.node_memory import own_share

MARK = b"mpidist1"
# The mark; the length and the CRC32 of the facts and of the layout.
_HEAD = struct.Struct("<8sIIQI")
_FACTS = 64


class SeenCopy(NamedTuple):
    """A whole copy, as its header describes it.

    Attributes:
        slot: The number of its buffer.
        facts: What is known of it.
        layout: The text of its layout.
    """

    slot: int
    facts: dict[str, Any]
    layout: bytes


class CopyBuffer:
    """Local. One buffer, mapped by this rank.

    Args:
        path: The file.

    Attributes:
        path: The constructor's argument.
        layout: The text of the layout for which it was made; empty if it is not open.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.layout = b""
        self._map: mmap.mmap | None = None
        self.data: AnyArray = np.empty(0, np.uint8)

    def make(self, layout: bytes, byte_count: int) -> None:
        """Local. Make the file, on one rank of the node; an older one stays readable for those that have it open.

        Raises:
            OSError: It cannot be made.
        """
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()
        descriptor = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(descriptor, data_begin(layout) + byte_count)
        finally:
            os.close(descriptor)

    def open(self, layout: bytes, ranges: list[tuple[int, int]], rank: int, size: int) -> None:
        """Local. Reserve this rank's share of the memory, and map the file.

        Args:
            layout: The text of the layout.
            ranges: The bytes of the data that this node writes.
            rank: The rank within the node.
            size: The number of ranks of the node.

        Raises:
            OSError: There is no room (ENOSPC), or the file does not exist.
        """
        begin = data_begin(layout)
        descriptor = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            for first, last in _pages([(0, begin), *((begin + low, begin + high) for low, high in ranges)]):
                low, high = own_share(last - first, rank, size)
                # Until its pages are reserved, the first write to a full /dev/shm would be a SIGBUS.
                if high > low:
                    os.posix_fallocate(descriptor, first + low, high - low)
        finally:
            os.close(descriptor)
        self.map(layout)

    def map(self, layout: bytes) -> None:
        """Local. Map the file, whose memory is reserved.

        Args:
            layout: The text of the layout.

        Raises:
            OSError: The file does not exist, or cannot be mapped.
        """
        self.close()
        descriptor = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._map = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
        finally:
            os.close(descriptor)
        self.data = np.frombuffer(self._map, np.uint8)[data_begin(layout) :]
        self.layout = layout

    def mark(self) -> bytes:
        """Local. The first bytes of the file as they are now."""
        with self.path.open("rb") as file:
            return file.read(len(MARK))

    def invalidate(self) -> None:
        """Local. Remove the mark, on one rank of the node."""
        if self._map is not None:
            self._map[: len(MARK)] = bytes(len(MARK))

    def commit(self, facts: dict[str, Any]) -> None:
        """Local. Make the copy valid, on one rank of the node, when all ranks have written it.

        Args:
            facts: What is known of it.
        """
        text = json.dumps(facts).encode("ascii")
        if self._map is None or _FACTS + len(text) > PAGE_BYTES:
            return
        self._map[PAGE_BYTES : PAGE_BYTES + len(self.layout)] = self.layout
        self._map[_FACTS : _FACTS + len(text)] = text
        head = _HEAD.pack(MARK, len(text), zlib.crc32(text), len(self.layout), zlib.crc32(self.layout))
        self._map[len(MARK) : _HEAD.size] = head[len(MARK) :]
        self._map[: len(MARK)] = MARK

    def close(self) -> None:
        """Local. Unmap it; the file stays."""
        self.data, self._map, self.layout = np.empty(0, np.uint8), None, b""


def data_begin(layout: bytes) -> int:
    """Local. The first byte of the data in a file with this layout."""
    return PAGE_BYTES + -(-len(layout) // PAGE_BYTES) * PAGE_BYTES


def look_into(path: Path, slot: int) -> SeenCopy | None:
    """Local. Read the header of a buffer; None if it holds no whole copy."""
    try:
        with path.open("rb") as file:
            page = file.read(PAGE_BYTES)
            if len(page) < PAGE_BYTES:
                return None
            mark, count, checksum, layout_count, layout_checksum = _HEAD.unpack_from(page)
            text = page[_FACTS : _FACTS + count]
            if mark != MARK or zlib.crc32(text) != checksum:
                return None
            layout = file.read(layout_count)
        if zlib.crc32(layout) != layout_checksum:
            return None
        return SeenCopy(slot, json.loads(text), layout)
    except (OSError, ValueError):
        return None


def _pages(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges of bytes as ranges of pages, those that touch joined."""
    found: list[tuple[int, int]] = []
    for begin, end in sorted(ranges):
        first, last = begin // PAGE_BYTES * PAGE_BYTES, -(-end // PAGE_BYTES) * PAGE_BYTES
        if found and first <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], last)
        else:
            found.append((first, last))
    return found


def require_room(folder: Path, byte_count: int) -> None:
    """Local. Raise OSError if the memory of this node has no room for so many bytes more.

    A container may have less room than that: only the reservation shows it.
    """
    status = os.statvfs(folder)
    free = status.f_bavail * status.f_frsize
    with contextlib.suppress(OSError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable")]
        free = min([free, *available])
    for limit, used in _limits():
        free = min(free, limit - used)
    if free < byte_count:
        raise OSError(28, f"expected {byte_count} bytes of memory free for two buffers in {folder}, got {free}")


def _limits() -> list[tuple[int, int]]:
    """The limits of this process's groups (cgroups, version 2), and what is used of each."""
    found: list[tuple[int, int]] = []
    with contextlib.suppress(OSError, ValueError, IndexError):
        own = Path("/proc/self/cgroup").read_text().partition("0::/")[2].splitlines()[0]
        root = Path("/sys/fs/cgroup")
        for group in [root / own, *(root / own).parents]:
            if root not in (group, *group.parents):
                break
            with contextlib.suppress(OSError, ValueError):
                limit = int((group / "memory.max").read_text())
                used = int((group / "memory.current").read_text())
                with contextlib.suppress(OSError):
                    # Pages of files, which the kernel gives back where memory is wanted.
                    lines = (group / "memory.stat").read_text().splitlines()
                    used -= sum(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))
                found.append((limit, used))
    return found
