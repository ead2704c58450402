"""The transport of a window: one-sided calls of MPI, or sockets."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

from mpidist.comm.group.communicator import Communicator
from mpidist.comm.group.mpi_library import Library, loaded_library
from mpidist.options import WindowOptions, WindowWay, parse_enum

OVERRIDE = "MPIDIST_WINDOW"


class _Row(NamedTuple):
    """A row of the table of transports; the first one that fits counts.

    Attributes:
        fits: Whether it fits a library, a number of hosts, and a number of nodes, as MPI counts them.
        way: The transport to use.
        why: The reason, for the log.
    """

    fits: Callable[[Library, int, int], bool]
    way: WindowWay
    why: str


_ROWS = (
    _Row(
        lambda library, hosts, _: library.name == "Open MPI" and hosts > 1, WindowWay.SOCKETS,
        "one-sided calls of Open MPI between hosts may end the target when a rank dies",
    ),
    # More nodes than hosts: each rank has a launcher process of its own, in order to survive others. Of 150 jobs one
    # hung, in `ucp_ep_flush`, and 2 of 60 where the dead rank was sending 100 KB: a survivor got no message,
    # by no call of MPI, probably since the dead rank had taken a place in its queue and not filled it.
    # MPICH's other network layer does not help (5.0.2, MPIR_CVAR_CH4_NETMOD=ofi). With its default provider, "sockets",
    # a survivor ended with "OFI poll failed" in 4 of 50 jobs, all with 16 MB. With "tcp" MPI_Isend to the dead rank did
    # not return in one of 186, and 5 of 16 hung where it was sending 100 KB or 16 MB. With "shm" 9 of 50 hung.
    _Row(
        lambda library, hosts, nodes: library.name == "MPICH" and nodes > hosts, WindowWay.SOCKETS,
        "MPICH treats ranks of one host as nodes: when one of them dies, others may hang in a queue of UCX",
    ),
    _Row(lambda _, hosts, __: hosts == 1, WindowWay.RMA, "one-sided calls on one host need no help of the target"),
    _Row(lambda *_: True, WindowWay.RMA, "the default of this MPI"),
)


def asked_for(options: WindowOptions, *, admits_later: bool = False) -> WindowWay:
    """Local. The transport that the environment requests, or otherwise the options.

    Args:
        options: The options of the window.
        admits_later: Whether processes may join that are not in the communicator.

    Raises:
        ValueError: The environment names no transport, or one that admits no processes later.
    """
    override = os.environ.get(OVERRIDE)
    way = parse_enum(WindowWay, override or options.way, OVERRIDE)
    if not admits_later or way is WindowWay.SOCKETS:
        return way
    if way is WindowWay.AUTO:
        return WindowWay.SOCKETS
    where = f"{OVERRIDE}={override} in the environment" if override else f"WindowOptions(way={way.name!r})"
    raise ValueError(
        "workers join a running job by sockets only, since one-sided calls of MPI reach no process that is not in the "
        f"communicator: `join_directory` needs the way SOCKETS, got {where}. Leave that out"
    )


def choose(wanted: WindowWay, communicator: Communicator) -> tuple[WindowWay, str]:
    """Local. The transport between the ranks of a communicator, and the reason."""
    if wanted is not WindowWay.AUTO:
        return wanted, "asked for"
    library, hosts, nodes = loaded_library(), host_count(communicator), len(communicator.node_sizes)
    return next((row.way, row.why) for row in _ROWS if row.fits(library, hosts, nodes))


def host_count(communicator: Communicator) -> int:
    """Local. The number of hosts."""
    return len({process.host for process in communicator.processes})
