"""NUMA domains: on which memory of a node the pages of a mapping are (`man 7 numa`)."""

from __future__ import annotations

from pathlib import Path


def domain_count(root: Path = Path("/")) -> int:
    """Local. The number of domains of this node that have memory, 1 where the system does not say.

    Args:
        root: The folder of /sys.
    """
    try:
        text = (root / "sys/devices/system/node/has_memory").read_text()
        spans = [span.split("-") for span in text.strip().split(",")]
        return sum(int(span[-1]) - int(span[0]) + 1 for span in spans)
    except (OSError, ValueError):
        return 1


def pages_by_domain(address: int, root: Path = Path("/")) -> dict[int, int]:
    """Local. The number of pages on each domain, of those of a mapping that this process has touched.

    Args:
        address: At which the mapping begins.
        root: The folder of /proc.
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
