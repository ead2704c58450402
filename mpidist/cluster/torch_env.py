"""The ranks of the job as torch.distributed reads them: the variables of the environment that torchrun sets."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Sequence

from mpidist.comm.group.agreement import together
from mpidist.comm.group.opening import open_communicator
from mpidist.comm.windows.sockets.addresses import interfaces, place

_ADDRESS, _PORT = "MASTER_ADDR", "MASTER_PORT"


def export_torch_env(communicator: object | None = None) -> dict[str, str]:
    """Collective. Set the variables by which `torch.distributed.init_process_group` finds the ranks of this job.

    Only this call sets them: libraries that find them would start torch.distributed by themselves.

        mpidist.export_torch_env()
        torch.distributed.init_process_group("gloo")

    Values of `MASTER_ADDR` and `MASTER_PORT` in rank 0's environment are kept. Otherwise the address is one of rank 0
    in a network that all hosts share, and the port is one that is free at this moment.

    Args:
        communicator: An mpi4py communicator of the ranks that take part; default: all ranks of the job.

    Returns:
        The variables set on this rank: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

    Raises:
        ValueError: `MASTER_PORT` of rank 0 is not a port; on every rank.
        OSError: Rank 0 has no free port; on every rank.
    """
    ranks = open_communicator(communicator, purpose="cluster")
    hosts = ranks.all_gather_object((place(), interfaces()))

    def find() -> tuple[str, str]:
        if ranks.rank:
            return "", ""
        networks = dict(hosts)
        own = networks.pop(hosts[0][0])
        default = reached_by_all(own, list(networks.values())) if networks else "127.0.0.1"
        return os.environ.get(_ADDRESS) or default, _port()

    found = together(ranks, "finding an address for torch.distributed", find)
    address, port = ranks.broadcast_object(found)
    variables = {
        "RANK": str(ranks.rank), "WORLD_SIZE": str(ranks.size),
        "LOCAL_RANK": str(ranks.node.rank), "LOCAL_WORLD_SIZE": str(ranks.node.size),
        _ADDRESS: address, _PORT: port,
    }
    os.environ.update(variables)
    return variables


def reached_by_all(own: Sequence[str], others: Sequence[Sequence[str]]) -> str:
    """Local. The address of a host in a network that the most other hosts share; the first of several.

    Args:
        own: Addresses with their networks, "10.1.0.5/16".
        others: The addresses of the other hosts.
    """
    mine = [ipaddress.ip_interface(one) for one in own]
    if not mine:
        return socket.gethostname()
    theirs = [{ipaddress.ip_interface(one).network for one in host} for host in others]
    return str(max(mine, key=lambda one: sum(one.network in networks for networks in theirs)).ip)


def _port() -> str:
    given = os.environ.get(_PORT)
    if given:
        if not given.isdecimal() or not 0 < int(given) < 1 << 16:
            raise ValueError(
                f"the environment variable {_PORT} must be a port from 1 to 65535, got {given!r}: correct it, or unset "
                "it to use a free port"
            )
        return given
    # It is free only until a process takes it: rank 0 of torch.distributed does so at once.
    with socket.socket() as link:
        link.bind(("", 0))
        return str(link.getsockname()[1])
