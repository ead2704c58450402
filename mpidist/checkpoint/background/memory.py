"""The memory that this process can still take: that of the host, and that of its control groups."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

# Larger than any memory: the system does not say how much is free.
UNKNOWN = 1 << 62


def free_bytes(root: Path = Path("/")) -> int:
    """Local. The bytes that this process can take before the host or a control group has none left.

    Args:
        root: The file system's root; tests pass their own.

    Returns:
        The number of bytes; `UNKNOWN` where the system does not say.
    """
    return min([_of_host(root), *_of_groups(root)])


def _of_host(root: Path) -> int:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    except (OSError, ValueError, StopIteration):
        return UNKNOWN


def _of_groups(root: Path) -> Iterator[int]:
    """The free bytes of each control group of this process that has a limit (`man 7 cgroups`)."""
    try:
        own = [line.split(":", 2) for line in (root / "proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return
    for number, kinds, path in own:
        if number == "0":
            top, names = root / "sys/fs/cgroup", ("memory.max", "memory.current")
        elif "memory" in kinds.split(","):
            top, names = root / "sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        inside = Path(path)
        for level in (inside, *inside.parents):
            folder = top / str(level).lstrip("/")
            try:
                most, used = ((folder / name).read_text() for name in names)
                # The file cache counts as used, and is given back when memory is needed.
                cached = _inactive_file((folder / "memory.stat").read_text())
                if most.strip() != "max":
                    yield max(0, int(most) - int(used) + cached)
            except (OSError, ValueError):
                continue


def _inactive_file(text: str) -> int:
    return next((int(line.split()[1]) for line in text.splitlines() if line.startswith("inactive_file ")), 0)
