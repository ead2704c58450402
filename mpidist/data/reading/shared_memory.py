"""An in-memory data set once per node: its arrays are read into node memory, each rank of the node reading a part."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import numpy as np

from mpidist import context, tree
from mpidist.comm.agreement import same_on_all, together
from mpidist.comm.communicator import Communicator, open_communicator
from mpidist.comm.memory.node_memory import NodeMemory
from mpidist.data.items.sharding import even_slice
from mpidist.data.reading.source import ArraySource

# Arrays begin at a multiple of this, so that none shares a cache line with another.
_ALIGNMENT = 64


def current_communicator() -> Communicator:
    """Collective. The ranks of the strategy whose scope this is; outside any, all ranks of the job."""
    entry = context.innermost()
    found = None if entry is None else getattr(entry.strategy, "communicator", None)
    return open_communicator(purpose="data") if found is None else found


def share_arrays(arrays: Any, communicator: Communicator) -> Any:
    """Collective. The same arrays, read-only, in memory that the ranks of a node share.

    Where memory cannot be shared each rank has them in memory of its own, and rank 0 warns.

    Args:
        arrays: A nested structure of arrays, alike on all ranks; lazy ones are read, each row by one rank of a node.
        communicator: Its ranks take part.

    Returns:
        The structure with NumPy arrays.

    Raises:
        MismatchError: Shapes or dtypes differ between ranks.
        ValueError: A dtype holds Python objects.
        Exception: What reading raised on any rank.
    """
    leaves, spec = tree.flatten(arrays)
    same_on_all(
        communicator, "Dataset.shared: shapes and dtypes of the arrays",
        [(tuple(leaf.shape), np.dtype(leaf.dtype).str) for leaf in leaves], "Give every rank the same arrays.",
    )
    together(communicator, "Dataset.shared", lambda: _check(leaves))
    starts, total = _places(leaves)
    memory = _memory(communicator, total) if communicator.size > 1 else None
    if memory is None:
        private = together(communicator, "Dataset.shared: reading", lambda: [_private(leaf) for leaf in leaves])
        return tree.unflatten(spec, private)
    node = communicator.node

    def fill(place: int, leaf: Any) -> Any:
        count = int(np.prod(leaf.shape)) * leaf.dtype.itemsize
        here = memory.bytes[place : place + count].view(leaf.dtype).reshape(leaf.shape)
        if leaf.shape:
            mine = even_slice(leaf.shape[0], node.size, node.rank)
            here[mine] = leaf[mine]
        return memory.readable[place : place + count].view(leaf.dtype).reshape(leaf.shape)

    # One writer per byte; nobody leaves `together` before every rank has written.
    return tree.unflatten(
        spec,
        together(
            communicator, "Dataset.shared: reading the arrays into node memory",
            lambda: [fill(place, leaf) for place, leaf in zip(starts, leaves, strict=True)],
        ),
    )


def shared_source(source: Any, communicator: Communicator) -> ArraySource:
    """Collective. The source over arrays in node memory.

    Raises:
        ValueError: The source is not one of arrays; on every rank.
    """

    def arrays() -> Any:
        if isinstance(source, ArraySource):
            return source.arrays
        raise ValueError(
            "shared: expected a dataset of arrays (from_tensor_slices, from_tensors), with map, shuffle, batch and so "
            f"on, got one over {type(source).__name__}. Call shared() before zip, cache, filter or interleave"
        )

    return ArraySource(share_arrays(together(communicator, "Dataset.shared", arrays), communicator))


def _check(leaves: list[Any]) -> None:
    for leaf in leaves:
        if np.dtype(leaf.dtype).hasobject:
            raise ValueError(
                f"arrays of Python objects cannot be shared, got dtype {leaf.dtype}. Convert strings to a fixed size, "
                "with array.astype('U') or 'S'"
            )


def _places(leaves: list[Any]) -> tuple[list[int], int]:
    starts, total = [], 0
    for leaf in leaves:
        starts.append(total)
        size = int(np.prod(leaf.shape)) * np.dtype(leaf.dtype).itemsize
        total += -(-size // _ALIGNMENT) * _ALIGNMENT
    return starts, max(1, total)


def _memory(communicator: Communicator, byte_count: int) -> NodeMemory | None:
    with contextlib.suppress(OSError):
        return NodeMemory(communicator, byte_count)
    if communicator.rank == 0:
        warnings.warn(
            f"Dataset.shared: {byte_count} bytes of node memory are not to be had, so every rank keeps the data in "
            "memory of its own. Enlarge /dev/shm (a container's --shm-size), or set MPIDIST_SHARED_MEMORY to a "
            "directory in memory that all ranks of a node see",
            RuntimeWarning,
            stacklevel=4,
        )
    return None


def _private(leaf: Any) -> Any:
    return leaf if isinstance(leaf, np.ndarray) and not isinstance(leaf, np.memmap) else np.asarray(leaf[...])
