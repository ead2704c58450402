"""What the automatic collective goes by: from which size on which backend, and in which chunks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tuning:
    """Sizes in bytes; the defaults were measured with 2 to 4 ranks of one node.

    Attributes:
        node_from: From here on node memory is faster than MPI.
        chunk_bytes: Chunk of MPI_Allreduce.
        source: Where the numbers come from, for the log.
    """

    node_from: int = 1 << 12
    chunk_bytes: int = 1 << 20
    source: str = "default sizes"
