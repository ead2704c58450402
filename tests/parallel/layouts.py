"""Ways in which the ranks of a run can share memory: a strategy must give the same results over all of them."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from mpidist.checkpoint.preemption import handler
from mpidist.comm.backends.node import NodeBackend
from mpidist.comm.choice.sizes import DIRECT_FROM
from mpidist.comm.cross_device.asynchronous import PURPOSE
from mpidist.comm.front.front import CollectiveFront
from mpidist.comm.group import resource
from mpidist.comm.group.communicator import Communicator
from mpidist.comm.group.solo import SoloCommunicator
from mpidist.options import CommunicationOptions
from mpidist.variables.arena import Arena
from mpidist.variables.memory.slab import Slab
from tests.helpers.leaks import KEPT
from tests.helpers.strategies import ArenaStrategy

# node: all ranks on one node. private: on one node, nothing shared. pairs: nodes of two. each: a node per rank.
# first: rank 0 alone, the others together; last: the other way round. chunks: pairs, little at a time.
# full: node memory runs out between the variables and the optimizer.
LAYOUTS = ("node", "private", "pairs", "each", "first", "last", "chunks", "full")


def node_color(layout: str, rank: int, size: int) -> int:
    """Which node a rank stands on."""
    if layout in ("pairs", "chunks", "full"):
        return rank // 2
    if layout == "each":
        return rank
    if layout == "first":
        return min(rank, 1)
    if layout == "cyclic":
        # Ranks are dealt to two nodes in turn.
        return rank % 2
    if layout == "uneven":
        # Two ranks on the first node, one on each other: three nodes for four ranks.
        return max(rank - 1, 0)
    return int(rank == size - 1) if layout == "last" else 0


_made: dict[tuple[int, str], Communicator] = {}


def lay_out(communicator: Communicator, layout: str) -> Communicator:
    """Collective. A communicator of the same ranks on other nodes; made once, since MPI has few."""
    if isinstance(communicator, SoloCommunicator) or layout in ("node", "private"):
        return communicator
    key = id(communicator), layout
    if key not in _made:
        make: type = type(communicator)
        color = node_color(layout, communicator.rank, communicator.size)
        before = resource.held()
        _made[key] = make(communicator.mpi.Dup(), node_color=color)
        # Its lanes, too, which are opened when the first strategy wants them.
        _made[key].open_lane()
        _made[key].open_sibling(PURPOSE).open_lane()
        _made[key].open_sibling(handler.PURPOSE).open_channel()
        KEPT.update(resource.held() - before)
    return _made[key]


def make_strategy(
    communicator: Communicator, layout: str, *, check: bool = False, reproducible: bool = False,
    shard_optimizer: bool = False, options: CommunicationOptions | None = None,
) -> ArenaStrategy:
    """Collective. A strategy whose variables live as the layout says."""
    own = CommunicationOptions(check=check, bytes_per_pack=512 if layout == "chunks" else 0)
    options = replace(options or own, reproducible=reproducible)
    shared = False if layout == "private" else None
    strategy = ArenaStrategy(
        lay_out(communicator, layout), options=options, shared=shared, shard_optimizer=shard_optimizer
    )
    if layout == "full":
        strategy.arena.reserve = refuse_shared(strategy.arena)  # type: ignore[method-assign]
    return strategy


def limits_of(layout: str) -> dict[str, Any]:
    """What a strategy is given besides its ranks, to have the layout."""
    if layout == "chunks":
        return {"communication_options": CommunicationOptions(bytes_per_pack=512)}
    return {"shared": False} if layout == "private" else {}


def open_node(
    communicator: Communicator, options: CommunicationOptions, direct_from: int = DIRECT_FROM,
    circulant_from: int | None = None,
) -> CollectiveFront:
    """Collective. The node backend behind its front; see `NodeBackend`."""
    return CollectiveFront(NodeBackend(communicator, options, direct_from, circulant_from), options)


def refuse_shared(arena: Arena) -> Callable[..., Slab]:
    """What stands in for `Arena.reserve` when /dev/shm is full."""
    reserve = arena.reserve

    def refusing(count: int, dtype: np.dtype[Any], *, shared: bool) -> Slab:
        if shared:
            raise OSError(errno.ENOSPC, "No space left on device")
        return reserve(count, dtype, shared=False)

    return refusing
