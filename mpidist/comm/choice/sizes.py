"""The sizes at which AUTO changes its backend, and the size of chunks: by rules, which come from measurements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpidist.comm.first_use import at_first_use
from mpidist.comm.group.communicator import Communicator

if TYPE_CHECKING:
    from mpidist.comm.group.mpi_library import loaded_library
else:
    loaded_library = at_first_use("mpidist.comm.group.mpi_library", "loaded_library")

# Larger than any array.
NEVER = 1 << 62
# The size of a ring's messages from which on its fewer bytes count for more than its steps. Three hosts without a limit
# took 0.19 ms for 64 KB by a ring and 0.13 by MPI's own algorithm, and 0.36 against 0.43 ms for 256 KB; with 1 Gbit/s
# 0.7 against 1.1 ms and 2.9 against 4.4 (MPICH 5.0.2; Open MPI 5.0.11: 2.9 against 5.5).
_RING_MESSAGE_BYTES = 1 << 16
# From this size in bytes on, direct copies are faster than shared blocks. Two ranks whose cores share a cache took 0.28
# against 0.33 ms at 1 MB, 0.9 against 1.3 to 1.4 at 4 MB and 21 against 26 at 64 MB. Where the cores share no cache,
# direct copies were four times as fast.
DIRECT_FROM = 1 << 20


@dataclass(frozen=True)
class Sizes:
    """Sizes in bytes of one rank's array.

    Attributes:
        node_from: The size from which on node memory is faster than MPI, where ranks share memory.
        chunk_bytes: The size of a chunk of MPI_Allreduce.
        ring_from: The size from which on a ring is faster than MPI between nodes, with one rank of each.
        direct_from: The size from which on direct copies are faster than shared blocks.
        reason: The rule that gave them, for the log.
    """

    node_from: int = 1 << 12
    chunk_bytes: int = 1 << 20
    ring_from: int = NEVER
    direct_from: int = DIRECT_FROM
    reason: str = "default sizes"


def find_sizes(communicator: Communicator) -> Sizes:
    """Collective. The sizes for these ranks, the same on every rank: others would wait for each other forever."""
    nodes = communicator.node_sizes
    # Nodes may have different numbers of cores.
    cores = communicator.broadcast_object(communicator.core_count)
    is_open_mpi = str(loaded_library()).startswith("Open MPI")
    return sizes_for(max(nodes), len(nodes), cores, is_open_mpi=is_open_mpi)


def sizes_for(node_ranks: int, node_count: int, cores: int, *, is_open_mpi: bool) -> Sizes:
    """Local. The sizes by rules, which come from measurements with 2 to 4 ranks on two cores.

    Args:
        node_ranks: Number of ranks of the largest node.
        node_count: Number of nodes.
        cores: Number of cores of a node.
        is_open_mpi: Whether the MPI library is Open MPI.
    """
    ring_from = ring_begins(node_count)
    if node_ranks > cores:
        # Ranks wait for a core at each step of a message. On one node a small array takes a single barrier: only Open
        # MPI is faster, up to some hundred bytes. Over several nodes it takes more barriers.
        begins = (1 << 10 if is_open_mpi else 0) if node_count == 1 else (1 << 19 if is_open_mpi else 1 << 14)
        return Sizes(begins, 1 << 22, ring_from, reason="default sizes for more ranks than cores")
    if node_ranks == 2 and node_count == 1:
        # Two ranks need one barrier in node memory, which compares their calls, too. After a call of MPI they compare
        # in a page of their own: 4 bytes take 4.4 us by Open MPI with that, and 4.2 us in node memory.
        return Sizes(node_from=0, reason="default sizes for two ranks")
    return Sizes(ring_from=ring_from)


def ring_begins(node_count: int) -> int:
    """Local. The size from which on a ring of one rank from each node is faster than MPI's own algorithms.

    Returns:
        `NEVER` for powers of two: there the algorithms of MPICH and Open MPI send no more than a ring, in fewer steps.
        For other numbers the busiest rank sends 1.5 (MPICH) and 1.9 times (Open MPI) as much as in a ring.
    """
    return NEVER if node_count & (node_count - 1) == 0 else _RING_MESSAGE_BYTES * node_count
