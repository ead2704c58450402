"""The setup of the comparison of calls: the ranks of a communicator get a page on each node, or messages."""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Callable
from typing import TYPE_CHECKING

from mpidist.comm.calls.rank_tree import is_flat
from mpidist.comm.calls.signature_page import PAGE_BYTES, CallPage
from mpidist.comm.cores import count_cores, own_cores
from mpidist.comm.first_use import at_first_use
from mpidist.comm.group.communicator import Communicator

if TYPE_CHECKING:
    from mpidist.comm.calls.messages import CallMessages
    from mpidist.comm.calls.wide_page import WidePage
    from mpidist.comm.memory.node_barrier import NodeBarrier
    from mpidist.comm.memory.node_memory import NodeMemory
    from mpidist.comm.memory.tree_barrier import TreeBarrier
else:
    CallMessages = at_first_use("mpidist.comm.calls.messages", "CallMessages")
    NodeBarrier = at_first_use("mpidist.comm.memory.node_barrier", "NodeBarrier")
    NodeMemory = at_first_use("mpidist.comm.memory.node_memory", "NodeMemory")
    WidePage = at_first_use("mpidist.comm.calls.wide_page", "WidePage")
    TreeBarrier = at_first_use("mpidist.comm.memory.tree_barrier", "TreeBarrier")

# On x86 all ranks see a rank's stores in program order, and loads are done in program order (Intel SDM 3A, 9.2.2). On
# other machines a rank could see a counter before the data that were written earlier.
_ORDERED_MACHINES = ("x86_64", "AMD64")


def show_calls(communicator: Communicator) -> None:
    """Collective at the first call for a communicator, then Local. Let its ranks compare their calls.

    Ranks that share no memory, or would not see each other's writes in program order, send messages.

    Args:
        communicator: The ranks.
    """
    order, node = communicator.order, communicator.node
    if order.is_shown or communicator.size == 1:
        return
    page = barrier = messages = None
    if _keeps_order(communicator):
        # If node memory cannot be made, every rank gets the error.
        with contextlib.suppress(OSError):
            memory = NodeMemory(communicator, PAGE_BYTES * max(communicator.node_sizes)).bytes
            ranks, cores = zip(*node.all_gather_object((communicator.rank, own_cores())), strict=True)
            kinds = (CallPage, NodeBarrier) if is_flat(node.size) else (WidePage, TreeBarrier)
            page = kinds[0](memory.data.cast("B"), ranks, node.rank)
            barrier = kinds[1](node, page, order, count_cores(cores))
    if page is None or len(communicator.node_sizes) > 1:
        messages = CallMessages(communicator.open_max(), communicator.all_gather_object)
    order.show(page, barrier, messages)


def open_node_barrier(communicator: Communicator) -> Callable[[], None]:
    """Collective at the first call for a communicator, then Local. The fastest barrier of this rank's node.

    Args:
        communicator: All ranks.
    """
    show_calls(communicator)
    return communicator.order.barrier or communicator.node.barrier


def _keeps_order(communicator: Communicator) -> bool:
    """Collective. Whether the ranks of a node see each other's writes in program order; the same on all nodes."""
    return not communicator.all_reduce_max(int(platform.machine() not in _ORDERED_MACHINES))
