"""Files of node memory that somebody has left behind."""

from __future__ import annotations

import os
import time
from pathlib import Path

# Another job on this host may be making node memory right now: its files have a name for milliseconds only, so those
# that keep theirs for so long are left behind.
_SECONDS = 5.0


def files_left_behind() -> list[Path]:
    """Local. The files of the library that stay in /dev/shm."""
    folder = Path("/dev/shm")
    found = set(folder.glob("mpidist-*"))
    begin = time.monotonic()
    while found and time.monotonic() - begin < _SECONDS:
        time.sleep(0.05)
        found &= set(folder.glob("mpidist-*"))
    return sorted(found)


def mapped_node_memory() -> set[str]:
    """Local. The pieces of node memory that this process has mapped; MPI libraries have files of other names."""
    return {path for path in _mapped() if _is_node_memory(path)}


def held_node_memory() -> int:
    """Local. How often this process holds node memory: by a mapping, or by a descriptor."""
    descriptors = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return sum(_is_node_memory(path) for path in [*descriptors, *_mapped()])


def _mapped() -> list[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [slash + rest for _, slash, rest in (line.partition("/") for line in lines)]


def _is_node_memory(path: str) -> bool:
    return path.startswith(("/dev/shm/#", "/dev/shm/mpidist-"))
