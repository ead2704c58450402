"""Tuning: the sizes at which AUTO changes its backend, the size of chunks, and the file that keeps them.

The usual sizes follow rules. A measurement, made once if `MPIDIST_TUNE=1` asks for it, replaces them. It is kept in a
file of the user for later runs on the same kind of machine.
"""

from __future__ import annotations

import contextlib
import json
import logging
import platform
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from mpidist.comm.backends.direct_copies import DIRECT_FROM
from mpidist.comm.user_cache import cache_folder, write_whole

logger = logging.getLogger("mpidist")

# Larger than any array.
NEVER = 1 << 62
# The size of a ring's messages from which on its fewer bytes count for more than its steps. Three hosts without a limit
# took 0.19 ms for 64 KB by a ring and 0.13 by MPI's own algorithm, and 0.36 against 0.43 ms for 256 KB; with 1 Gbit/s
# 0.7 against 1.1 ms and 2.9 against 4.4 (MPICH 5.0.2; Open MPI 5.0.11: 2.9 against 5.5).
_RING_MESSAGE_BYTES = 1 << 16


@dataclass(frozen=True)
class Tuning:
    """Sizes in bytes of one rank's array.

    Attributes:
        node_from: The size from which on node memory is faster than MPI, where ranks share memory.
        chunk_bytes: The size of a chunk of MPI_Allreduce.
        ring_from: The size from which on a ring is faster than MPI between nodes, with one rank of each.
        direct_from: The size from which on direct copies are faster than shared blocks.
        source: The origin of the numbers, for the log.
    """

    node_from: int = 1 << 12
    chunk_bytes: int = 1 << 20
    ring_from: int = NEVER
    direct_from: int = DIRECT_FROM
    source: str = "default sizes"


@dataclass(frozen=True)
class MachineProfile:
    """The properties of a machine on which the sizes depend. No host is named: the sizes hold for a whole cluster.

    Attributes:
        library: Name and version of the MPI library.
        node_ranks: Number of ranks of the largest node.
        node_count: Number of nodes.
        cores: Number of cores of this node.
        cpu: Name of the processor.
    """

    library: str
    node_ranks: int
    node_count: int
    cores: int
    cpu: str

    @property
    def key(self) -> str:
        """Local. The key under which the sizes are kept. The number of nodes decides whether a ring pays."""
        nodes = "one node" if self.node_count == 1 else f"{self.node_count} nodes"
        return f"{self.library}; {self.node_ranks} ranks a node, {nodes}; {self.cores} cores, {self.cpu}"


def ring_begins(node_count: int) -> int:
    """Local. The size from which on a ring of one rank from each node is faster than MPI's own algorithms.

    Returns:
        `NEVER` for powers of two: there the algorithms of MPICH and Open MPI send no more than a ring, in fewer steps.
        For other numbers the busiest rank sends 1.5 (MPICH) and 1.9 times (Open MPI) as much as in a ring.
    """
    return NEVER if node_count & (node_count - 1) == 0 else _RING_MESSAGE_BYTES * node_count


def usual_tuning(profile: MachineProfile) -> Tuning:
    """Local. The sizes by rules, which come from measurements with 2 to 4 ranks on two cores."""
    ring_from = ring_begins(profile.node_count)
    is_open_mpi = profile.library.startswith("Open MPI")
    if profile.node_ranks > profile.cores:
        # Ranks wait for a core at each step of a message. On one node a small array takes a single barrier: only Open
        # MPI is faster, up to some hundred bytes. Over several nodes it takes more barriers.
        begins = (1 << 10 if is_open_mpi else 0) if profile.node_count == 1 else (1 << 19 if is_open_mpi else 1 << 14)
        return Tuning(begins, 1 << 22, ring_from, source="default sizes for more ranks than cores")
    if profile.node_ranks == 2 and profile.node_count == 1:
        # Two ranks need one barrier in node memory, which compares their calls, too. After a call of MPI they compare
        # in a page of their own: 4 bytes take 4.4 us by Open MPI with that, and 4.2 us in node memory.
        return Tuning(node_from=0, source="default sizes for two ranks")
    return Tuning(ring_from=ring_from)


def processor_name() -> str:
    """Local. The name of the processor."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def cache_path() -> Path:
    """Local. The file in which measured sizes are kept."""
    return cache_folder() / "tuning.json"


def read_tuning(path: Path, key: str) -> Tuning | None:
    """Local. The sizes that a file keeps under a key, None if it keeps none. A broken file is a warning, and None.

    Args:
        path: The file, which need not exist.
        key: See `MachineProfile.key`.
    """
    try:
        kept = _read(path).get(key)
        return None if kept is None else replace(_checked(kept), source=f"measured before, {path}")
    except (OSError, ValueError) as error:
        logger.warning("%s is not used: %s. Remove it and measure again with MPIDIST_TUNE=1", path, error)
        return None


def keep_tuning(path: Path, key: str, tuning: Tuning) -> None:
    """Local. Keep sizes for later runs, beside those of other keys. A file that cannot be written is a warning."""
    try:
        try:
            kept = _read(path)
        except ValueError:
            kept = {}
        values = {name: value for name, value in asdict(tuning).items() if name != "source"}
        write_whole(path, json.dumps({**kept, key: values}, indent=1) + "\n")
    except OSError as error:
        logger.warning("the measured sizes cannot be kept for later runs: %s", error)


def _read(path: Path) -> dict[str, Any]:
    try:
        kept = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    if not isinstance(kept, dict):
        raise ValueError(f"expected an object, got {type(kept).__name__}")
    return kept


def _checked(kept: Any) -> Tuning:
    names = ("node_from", "chunk_bytes", "ring_from", "direct_from")
    if not isinstance(kept, dict) or set(kept) != set(names):
        raise ValueError(f"expected {', '.join(names)}, got {kept!r}")
    if any(not isinstance(value, int) or isinstance(value, bool) or value < 0 for value in kept.values()):
        raise ValueError(f"expected sizes in bytes, got {kept!r}")
    if kept["chunk_bytes"] < 1:
        raise ValueError(f"expected a chunk of at least one byte, got {kept!r}")
    return Tuning(**kept)
