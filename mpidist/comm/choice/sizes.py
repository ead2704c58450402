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
# The bytes of an array for each of its rounds from which on fewer bytes count for more than Python's messages. Three
# hosts, whose four messages are those of a ring, took 0.19 ms for 64 KB without a limit and 0.13 by MPI's own
# algorithm, and 0.36 against 0.43 ms for 256 KB; with 1 Gbit/s 0.7 against 1.1 ms and 2.9 against 4.4 (MPICH 5.0.2;
# Open MPI 5.0.11: 2.9 against 5.5).
_MESSAGE_BYTES = 1 << 16
# From this size in bytes on, pieces pay where MPI sends as few bytes. Two hosts of two ranks took 10.0 ms with them for
# 1 MB and 12.3 by MPI's own algorithm, and 72 and 91 ms for 8 MB; of one rank 8.6 and 12, and 89 and 121 (Open MPI
# 5.0.11, 1 Gbit/s). MPICH 5.0.2 gained less than a tenth, and neither lost without a limit.
_PIECEWISE_BYTES = 1 << 18
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
        circulant_from: The size from which on a circulant graph of one rank from each node is faster than MPI.
        direct_from: The size from which on direct copies are faster than shared blocks.
        reason: The rule that gave them, for the log.
    """

    node_from: int = 1 << 12
    chunk_bytes: int = 1 << 20
    circulant_from: int = NEVER
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
    circulant_from = circulant_begins(node_count)
    if node_ranks > cores:
        # Ranks wait for a core at each step of a message. On one node a small array takes a single barrier: only Open
        # MPI is faster, up to some hundred bytes. Over several nodes it takes more barriers.
        begins = (1 << 10 if is_open_mpi else 0) if node_count == 1 else (1 << 19 if is_open_mpi else 1 << 14)
        return Sizes(begins, 1 << 22, circulant_from, reason="default sizes for more ranks than cores")
    if node_ranks == 2 and node_count == 1:
        # Two ranks need one barrier in node memory, which compares their calls, too. After a call of MPI they compare
        # in a page of their own: 4 bytes take 4.4 us by Open MPI with that, and 4.2 us in node memory.
        return Sizes(node_from=0, reason="default sizes for two ranks")
    return Sizes(circulant_from=circulant_from)


def circulant_begins(node_count: int) -> int:
    """Local. The size from which on a circulant graph of one rank from each node is faster than MPI's own algorithms.

    Returns:
        `NEVER` for one node. For powers of two the algorithms of MPI send as few bytes in as few rounds, but whole
        arrays in one message, where Open MPI's TCP loses up to half of the bandwidth: only large arrays go over the
        graph. For other numbers MPI's busiest rank sends 1.5 (MPICH) and 1.9 times (Open MPI) as much.
    """
    if node_count == 1:
        return NEVER
    if node_count & (node_count - 1) == 0:
        return _PIECEWISE_BYTES
    return _MESSAGE_BYTES * (2 * (node_count - 1).bit_length() - 1)
