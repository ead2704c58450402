"""Whether an arena's ranks share memory: all of them agree, once, when the arena is made."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable

from mpidist.comm.communicator import Communicator
from mpidist.comm.memory import node_memory
from mpidist.comm.memory.node_barrier import NodeBarrier, open_node_barrier
from mpidist.comm.memory.node_memory import NodeMemory
from mpidist.errors import mark_shared
from mpidist.options import CommunicationOptions

logger = logging.getLogger("mpidist")

# Containers get 64 MB of /dev/shm by default: enough for parameters, not for the gradients of their ranks.
SMALL_BYTES = 1 << 28


def wanted(shared: bool | None, options: CommunicationOptions, summed_by: str | None, *, on_gpu: bool) -> bool | None:
    """Local. Whether memory is to be shared: True demands it, False refuses it, None leaves it to the machine.

    Args:
        shared: The user's choice.
        options: Of the strategy's communication.
        summed_by: What the user asked for that makes a collective sum the gradients, None if nothing.
        on_gpu: Whether the variables lie on GPUs.

    Raises:
        ValueError: Shared memory, and something that excludes it, are both demanded.
        NotImplementedError: Variables on GPUs, and `compression`.
    """
    if shared and summed_by is not None:
        raise ValueError(
            f"shared=True sums gradients in node memory, and {summed_by} makes a collective sum them: choose one of "
            "them"
        )
    if on_gpu and options.compression is not None:
        raise mark_shared(NotImplementedError(
            f"gradients are compressed in host memory, and this strategy's variables lie on GPUs: leave out "
            f"compression={options.compression!r} (`wire_dtype` halves what is sent), or use CPUs"
        ))
    if on_gpu and shared:
        raise ValueError(
            "shared=True puts variables into node memory, and this strategy's variables lie on GPUs: leave it out"
        )
    return False if on_gpu or summed_by is not None else shared


def agree(communicator: Communicator, shared: bool | None) -> Callable[[], None] | None:
    """Collective. Whether the ranks of each node share memory; the same on every rank.

    Args:
        communicator: All ranks.
        shared: As `wanted` gives it; ranks may differ.

    Returns:
        The barrier of this rank's node where memory is shared, None where it is private.

    Raises:
        OSError: Sharing is demanded, and there is no node memory; on every rank.
    """
    if communicator.size == 1:
        return None
    refused = 1 if shared is False or (shared is None and _is_small(node_memory.directory())) else 0
    if communicator.all_reduce_max(refused) == 1:
        return None
    try:
        # The counters of the barrier show at the same time whether the ranks can share memory at all.
        memory = NodeMemory(communicator, NodeBarrier.byte_count(communicator.node.size))
    except OSError as error:
        if shared is True:
            raise
        if communicator.rank == 0:
            logger.warning("variables are private to each rank: %s", error)
        return None
    return open_node_barrier(communicator, memory.bytes)


def return_at_once() -> None:
    """Collective. The barrier of private memory, which no other rank sees."""


def _is_small(path: os.PathLike[str]) -> bool:
    try:
        status = os.statvfs(path)
    except OSError as error:
        return error.errno == errno.ENOENT
    return status.f_blocks * status.f_frsize < SMALL_BYTES
