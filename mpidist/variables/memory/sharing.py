"""Whether an arena's ranks share memory: all of them agree, once, when the arena is made."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from mpidist.arguments import flag
from mpidist.comm.first_use import at_first_use
from mpidist.comm.group.agreement import gather_together
from mpidist.comm.group.communicator import Communicator
from mpidist.comm.memory.show_calls import open_node_barrier
from mpidist.errors import mark_shared
from mpidist.options import CommunicationOptions

if TYPE_CHECKING:
    from mpidist.comm.group.shared_file import directory, require_directory
    from mpidist.comm.memory.node_memory import NodeMemory
else:
    NodeMemory = at_first_use("mpidist.comm.memory.node_memory", "NodeMemory")
    directory = at_first_use("mpidist.comm.group.shared_file", "directory")
    require_directory = at_first_use("mpidist.comm.group.shared_file", "require_directory")

logger = logging.getLogger("mpidist")

# Containers get 64 MB of /dev/shm by default: enough for parameters, not for the gradients of their ranks.
SMALL_BYTES = 1 << 28


def wanted(shared: bool | None, options: CommunicationOptions, summed_by: str | None, *, on_gpu: bool) -> bool | None:
    """Local. Whether memory is to be shared: True demands it, False refuses it, None leaves it to the machine.

    Args:
        shared: The user's choice.
        options: The options of the strategy's communication.
        summed_by: The user's option that makes a collective sum the gradients, None without one.
        on_gpu: Whether the variables are on GPUs.

    Raises:
        TypeError: `shared` is neither a bool nor None.
        ValueError: Shared memory, and something that excludes it, are both demanded.
        NotImplementedError: Variables are on GPUs, and `compression` is demanded.
    """
    if shared is not None:
        shared = flag("shared", shared)
    if shared and summed_by is not None:
        raise ValueError(
            f"shared=True sums gradients in node memory, and {summed_by} makes a collective sum them: choose one of "
            "them"
        )
    if on_gpu and options.compression is not None:
        raise mark_shared(NotImplementedError(
            f"gradients are compressed in host memory, and this strategy's variables are on GPUs: leave out "
            f"compression={options.compression!r} (`wire_dtype` halves what is sent), or use CPUs"
        ))
    if on_gpu and shared:
        raise ValueError(
            "shared=True puts variables into node memory, and this strategy's variables are on GPUs: leave it out"
        )
    return False if on_gpu or summed_by is not None else shared


def agree(communicator: Communicator, shared: bool | None) -> Callable[[], None] | None:
    """Collective. Whether the ranks of each node share memory; the same on every rank.

    Args:
        communicator: All ranks.
        shared: The result of `wanted`; ranks may differ.

    Returns:
        The barrier of this rank's node where memory is shared, None where it is private.

    Raises:
        OSError: Sharing is demanded, and there is no node memory; or `MPIDIST_SHARED_MEMORY` names a directory that
            cannot be used; on every rank.
    """
    if communicator.size == 1:
        return None
    replies = gather_together(communicator, "looking for node memory", lambda: _reply(shared))
    if any(refused for refused, _ in replies):
        return None
    for (_, reason), process in zip(replies, communicator.processes, strict=True):
        if reason is not None:
            if communicator.rank == 0:
                _warn_once(f"on host {process.host} {reason}")
            return None
    try:
        NodeMemory(communicator, 1).close()
    except OSError as error:
        if shared is True:
            raise
        if communicator.rank == 0:
            logger.warning("variables are private to each rank: %s", error)
        return None
    return open_node_barrier(communicator)


def return_at_once() -> None:
    """Collective. The barrier of private memory, which no other rank accesses."""


def _reply(shared: bool | None) -> tuple[bool, str | None]:
    """Whether this rank refuses to share memory, and why it cannot."""
    require_directory()
    return shared is False, _why_private(directory()) if shared is None else None


def _why_private(folder: Path) -> str | None:
    """The reason why memory is not shared unless the user demands it; None if there is none."""
    try:
        status = os.statvfs(folder)
    except OSError as error:
        return f"{folder} cannot be used: {error.strerror}"
    size = status.f_blocks * status.f_frsize
    # A file system without a limit has no size.
    if not 0 < size < SMALL_BYTES:
        return None
    return f"{folder} has {size >> 20} MB, and is used only from {SMALL_BYTES >> 20} MB on"


@functools.cache
def _warn_once(reason: str) -> None:
    logger.warning(
        "variables are private to each rank, which takes more memory and time than one copy a node: %s. Enlarge it (a "
        "container's --shm-size=1g), or name another directory in memory by MPIDIST_SHARED_MEMORY; shared=True uses it "
        "as it is, and shared=False ends this warning", reason,
    )
