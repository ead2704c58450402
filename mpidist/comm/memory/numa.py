"""NUMA domains: the parts of a node's memory, and the pages of a mapping on each of them (`man 7 numa`)."""

from __future__ import annotations

from pathlib import Path


def domain_count(root: Path = Path("/")) -> int:
    """Local. The number of domains of this node that have memory, 1 where the system does not report it.

    Args:
        root: The folder that contains /sys.
    """
    try:
        text = (root / "sys/devices/system/node/has_memory").read_text()
        spans = [span.split("-") for span in text.strip().split(",")]
        return sum(int(span[-1]) - int(span[0]) + 1 for span in spans)
    except (OSError, ValueError):
        return 1


def pages_by_domain(address: int, root: Path = Path("/")) -> dict[int, int]:
    """Local. The number of pages on each domain; only pages of a mapping that this process has touched count.

    Args:
        address: Address of the mapping.
        root: The folder that contains /proc.
    """
    try:
        lines = (root / "proc/self/numa_maps").read_text().splitlines()
    except OSError:
        return {}
    for line in lines:
        start, *fields = line.split()
        if int(start, 16) == address:
            pairs = [field[1:].split("=") for field in fields if field[0] == "N" and "=" in field]
            return {int(domain): int(count) for domain, count in pairs}
    return {}
