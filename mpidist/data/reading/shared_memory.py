"""One copy of an in-memory dataset per node: each rank of the node reads some rows into node memory."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import numpy as np

from mpidist import context, tree
from mpidist.comm.group.agreement import same_on_all, together
from mpidist.comm.group.communicator import Communicator
from mpidist.comm.group.opening import open_communicator
from mpidist.comm.memory.node_memory import NodeMemory
from mpidist.data.items.sharding import even_slice
from mpidist.data.reading.source import ArraySource

# Arrays begin at a multiple of this number of bytes, so that no two of them share a cache line.
_ALIGNMENT = 64


def current_communicator() -> Communicator:
    """Collective. The ranks of the current strategy; outside any scope, all ranks of the job."""
    entry = context.innermost()
    found = None if entry is None else getattr(entry.strategy, "communicator", None)
    return open_communicator(purpose="data") if found is None else found


def share_arrays(arrays: Any, communicator: Communicator) -> Any:
    """Collective. Copy arrays into memory that the ranks of a node share, and return them read-only.

    Where memory cannot be shared, each rank keeps the arrays in memory of its own, and rank 0 warns.

    Args:
        arrays: A nested structure of arrays, the same on all ranks. Lazy arrays are read, each row by one rank of a
            node.
        communicator: The ranks that take part.

    Returns:
        The structure with NumPy arrays.

    Raises:
        MismatchError: Shapes or dtypes differ between ranks.
        ValueError: A dtype holds Python objects, which other processes cannot use.
        Exception: An error while reading on any rank; on every rank.
    """
    leaves, spec = tree.flatten(arrays)
    same_on_all(
        communicator, "Dataset.shared: shapes and dtypes of the arrays",
        [(tuple(leaf.shape), np.dtype(leaf.dtype).str) for leaf in leaves], "Give every rank the same arrays.",
    )
    together(communicator, "Dataset.shared", lambda: _check(leaves))
    offsets, total = _offsets(leaves)
    memory = _memory(communicator, total) if communicator.size > 1 else None
    if memory is None:
        private = together(communicator, "Dataset.shared: reading", lambda: [_private(leaf) for leaf in leaves])
        return tree.unflatten(spec, private)
    node = communicator.node

    def fill(offset: int, leaf: Any) -> Any:
        count = int(np.prod(leaf.shape)) * leaf.dtype.itemsize
        target = memory.bytes[offset : offset + count].view(leaf.dtype).reshape(leaf.shape)
        if leaf.shape:
            mine = even_slice(leaf.shape[0], node.size, node.rank)
            target[mine] = leaf[mine]
        return memory.readable[offset : offset + count].view(leaf.dtype).reshape(leaf.shape)

    # Exactly one rank writes each byte. `together` is also the barrier that this needs: no rank returns, and reads
    # rows that others write, before every rank has written its own.
    return tree.unflatten(
        spec,
        together(
            communicator, "Dataset.shared: reading the arrays into node memory",
            lambda: [fill(offset, leaf) for offset, leaf in zip(offsets, leaves, strict=True)],
        ),
    )


def shared_source(source: Any, communicator: Communicator) -> ArraySource:
    """Collective. Make a source over the same arrays in node memory.

    Raises:
        ValueError: The source does not read arrays; on every rank.
    """

    def arrays() -> Any:
        if isinstance(source, ArraySource):
            return source.arrays
        raise ValueError(
            "shared: expected a dataset of arrays (made by from_tensor_slices or from_tensors; map, shuffle and batch "
            f"may follow), got a dataset over {type(source).__name__}. Call shared() before zip, cache, filter or "
            "interleave"
        )

    return ArraySource(share_arrays(together(communicator, "Dataset.shared", arrays), communicator))


def _check(leaves: list[Any]) -> None:
    for leaf in leaves:
        if np.dtype(leaf.dtype).hasobject:
            raise ValueError(
                "Dataset.shared: arrays of Python objects cannot be in shared memory: expected dtypes of a fixed "
                f"size, got {leaf.dtype}. Convert strings with array.astype('U') or array.astype('S')"
            )


def _offsets(leaves: list[Any]) -> tuple[list[int], int]:
    """The offset of each array in node memory, and the number of bytes of them all."""
    offsets, total = [], 0
    for leaf in leaves:
        offsets.append(total)
        size = int(np.prod(leaf.shape)) * np.dtype(leaf.dtype).itemsize
        total += -(-size // _ALIGNMENT) * _ALIGNMENT
    return offsets, max(1, total)


def _memory(communicator: Communicator, byte_count: int) -> NodeMemory | None:
    with contextlib.suppress(OSError):
        return NodeMemory(communicator, byte_count)
    if communicator.rank == 0:
        warnings.warn(
            f"Dataset.shared: the node cannot give {byte_count} bytes of node memory, so every rank keeps the data in "
            "memory of its own. Enlarge /dev/shm (--shm-size of a container), or set MPIDIST_SHARED_MEMORY to a "
            "directory in memory that all ranks of a node see",
            RuntimeWarning,
            stacklevel=4,
        )
    return None


def _private(leaf: Any) -> Any:
    return leaf if isinstance(leaf, np.ndarray) and not isinstance(leaf, np.memmap) else np.asarray(leaf[...])
