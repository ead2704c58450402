"""What the automatic collective goes by: from which size on which backend, in which chunks, and where that is kept.

Rules come first; a measurement, made once where `MPIDIST_TUNE=1` asks for it, replaces them, and is kept in a file of
the user's for later runs on the same kind of machine.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from mpidist.comm.backends.direct_copies import DIRECT_FROM

logger = logging.getLogger("mpidist")

# Larger than any array.
NEVER = 1 << 62


@dataclass(frozen=True)
class Tuning:
    """Sizes in bytes of one rank's array.

    Attributes:
        node_from: From here on node memory is faster than MPI, where ranks share memory.
        chunk_bytes: Chunk of MPI_Allreduce.
        direct_from: From here on copies directly between processes are faster than shared blocks.
        ring_from: From here on a ring is faster than MPI, where no two ranks share memory.
        source: Where the numbers come from, for the log.
    """

    node_from: int = 1 << 12
    chunk_bytes: int = 1 << 20
    ring_from: int = NEVER
    direct_from: int = DIRECT_FROM
    source: str = "default sizes"


@dataclass(frozen=True)
class MachineProfile:
    """What the numbers depend on; no host is named, so that they serve all nodes of a cluster.

    Attributes:
        library: MPI's name and version.
        node_ranks: Ranks of the largest node.
        node_count: Number of nodes.
        cores: Of this node.
        cpu: Its name.
    """

    library: str
    node_ranks: int
    node_count: int
    cores: int
    cpu: str

    @property
    def key(self) -> str:
        """Local. Under which the numbers are kept. How many nodes there are, beyond one, makes little difference."""
        nodes = "one node" if self.node_count == 1 else "several nodes"
        return f"{self.library}; {self.node_ranks} ranks a node, {nodes}; {self.cores} cores, {self.cpu}"


def usual_tuning(place: MachineProfile) -> Tuning:
    """Local. The numbers by rules, made from measurements with 2 to 4 ranks and two cores."""
    is_open_mpi = place.library.startswith("Open MPI")
    if place.node_ranks > place.cores:
        # Ranks wait for a core at each step of a message. On one node a small array takes a single barrier, which only
        # some hundred bytes by Open MPI outrun; over several it takes more of them.
        begins = (1 << 10 if is_open_mpi else 0) if place.node_count == 1 else (1 << 19 if is_open_mpi else 1 << 14)
        return Tuning(node_from=begins, chunk_bytes=1 << 22, source="default sizes for more ranks than cores")
    if place.node_ranks == 2 and place.node_count == 1 and place.library.startswith("MPICH"):
        # Two ranks need one barrier of their own, which takes less than any call of MPICH, and than those of Open MPI
        # from some kilobytes on.
        return Tuning(node_from=0, source="default sizes for two ranks")
    return Tuning()


def processor_name() -> str:
    """Local. What the processor calls itself."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def core_count() -> int:
    """Local. Cores that this node has; ranks are often bound to one, which says nothing here."""
    return os.cpu_count() or 1


def cache_path() -> Path:
    """Local. Where measured numbers are kept."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "mpidist" / "tuning.json"


def read_tuning(path: Path, key: str) -> Tuning | None:
    """Local. The numbers that a file keeps under a key. A broken file is a warning, and None.

    Args:
        path: Of the file, which need not exist.
        key: See `MachineProfile.key`.
    """
    try:
        kept = _read(path).get(key)
        return None if kept is None else replace(_checked(kept), source=f"measured before, {path}")
    except (OSError, ValueError) as error:
        logger.warning("%s does not count: %s. Remove it, and measure again with MPIDIST_TUNE=1", path, error)
        return None


def keep_tuning(path: Path, key: str, tuning: Tuning) -> None:
    """Local. Keep numbers for later runs, beside those of other keys. A file that cannot be written is a warning."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            kept = _read(path)
        except ValueError:
            kept = {}
        part = path.with_name(f"{path.name}.{os.getpid()}")
        values = {name: value for name, value in asdict(tuning).items() if name != "source"}
        part.write_text(json.dumps({**kept, key: values}, indent=1) + "\n")
        # Whole or not at all: another job may read it now.
        part.replace(path)
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
