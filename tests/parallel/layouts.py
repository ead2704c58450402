"""Ways in which the ranks of a run can share memory: a strategy must give the same results over all of them."""

from __future__ import annotations

from mpidist.comm.communicator import Communicator, SoloCommunicator
from mpidist.options import CommunicationOptions
from mpidist.strategy.base import Strategy

# node: all ranks on one node. private: on one node, nothing shared. pairs: nodes of two. each: a node per rank.
# first: rank 0 alone, the others together; last: the other way round. chunks: pairs, little at a time.
LAYOUTS = ("node", "private", "pairs", "each", "first", "last", "chunks")


def node_color(layout: str, rank: int, size: int) -> int:
    """Which node a rank stands on."""
    if layout in ("pairs", "chunks"):
        return rank // 2
    if layout == "each":
        return rank
    if layout == "first":
        return min(rank, 1)
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
        _made[key] = make(communicator.mpi.Dup(), node_color=color)
    return _made[key]


def make_strategy(communicator: Communicator, layout: str, *, check: bool = False) -> Strategy:
    """Collective. A strategy whose variables live as the layout says."""
    options = CommunicationOptions(check=check, bytes_per_pack=512 if layout == "chunks" else 0)
    shared = False if layout == "private" else None
    return Strategy(lay_out(communicator, layout), options=options, shared=shared)
