"""The cores that ranks may use: the scheduler's affinity and the quota of a control group, not what the machine has."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

T = TypeVar("T")


class Quota(NamedTuple):
    """The limit of a control group (`man 7 cgroups`), which all processes in the group share.

    Attributes:
        group: Device and inode of the group's folder, the same in every container.
        cores: Seconds of processor time per second.
    """

    group: tuple[int, int]
    cores: float


class Cores(NamedTuple):
    """The cores of a process.

    Attributes:
        allowed: The numbers of the cores.
        quota: The smallest quota; None without a limit.
    """

    allowed: frozenset[int]
    quota: Quota | None


def own_cores(root: Path = Path("/")) -> Cores:
    """Local. The cores of this process.

    Args:
        root: The folder of /proc and /sys.
    """
    quotas = []
    for folder in _groups(root):
        try:
            cores = _limit(folder)
            if cores is not None:
                status = folder.stat()
                quotas.append(Quota((status.st_dev, status.st_ino), cores))
        except (OSError, ValueError):
            # A folder without these files has no limit, as the root of all groups.
            continue
    return Cores(frozenset(os.sched_getaffinity(0)), min(quotas, key=lambda quota: quota.cores, default=None))


def count_cores(claims: Sequence[Cores]) -> int:
    """Local. The number of threads of some processes that can run at the same time, at least 1.

    Args:
        claims: The cores of each process.
    """
    union: frozenset[int] = frozenset().union(*(claim.allowed for claim in claims))
    quotas = {claim.quota.group: claim.quota.cores for claim in claims if claim.quota is not None}
    is_limited = all(claim.quota is not None for claim in claims)
    return max(1, int(min(len(union), sum(quotas.values()))) if is_limited else len(union))


class NodeRanks(Protocol):
    """The ranks of a node, see `Communicator`."""

    def all_gather_object(self, value: T) -> list[T]:
        """Collective. The picklable values of all ranks, in the order of the ranks."""
        ...


def node_cores(node: NodeRanks) -> int:
    """Collective over the node. The number of cores that its ranks may use together.

    Each of them may be bound to a core of its own, or all of them to the same one.
    """
    return count_cores(node.all_gather_object(own_cores()))


def _limit(folder: Path) -> float | None:
    """The quota that a control group itself has."""
    if (folder / "cpu.max").exists():
        quota, period = (folder / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    quota_us = int((folder / "cpu.cfs_quota_us").read_text())
    return None if quota_us < 0 else quota_us / int((folder / "cpu.cfs_period_us").read_text())


def _groups(root: Path) -> Iterator[Path]:
    """The folders of this process's control groups that may limit its time, each with those above it."""
    try:
        own = [line.split(":", 2) for line in (root / "proc/self/cgroup").read_text().splitlines()]
        mounts = (root / "proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return
    for mount in mounts:
        before, _, after = mount.partition(" - ")
        (mount_root, place), (kind, *_, options) = before.split()[3:5], after.split()
        if kind == "cgroup2":
            paths = [path for number, _, path in own if number == "0"]
        elif kind == "cgroup" and "cpu" in options.split(","):
            paths = [path for _, controllers, path in own if "cpu" in controllers.split(",")]
        else:
            continue
        for path in paths:
            top = root / place.lstrip("/")
            # In a container without a namespace of groups the path begins with what is mounted.
            inside = Path("/") / (path.removeprefix(mount_root) if path.startswith(mount_root) else "").lstrip("/")
            yield from (top / str(level).lstrip("/") for level in (inside, *inside.parents))
