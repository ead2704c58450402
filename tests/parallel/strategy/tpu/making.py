"""Strategies whose replicas have several ranks, over any nodes."""

from __future__ import annotations

from typing import Any
from unittest import mock

from mpidist import TPUStrategy
from mpidist.cluster.devices.topology import DeviceAssignment, topology_of
from mpidist.comm.group.communicator import Communicator
from mpidist.strategy.tpu import strategy as module
from mpidist.variables.logical_arena import LogicalArena
from tests.parallel.layouts import lay_out, limits_of, refuse_shared


def devices_of(communicator: Communicator) -> int:
    """The number of logical devices that a test has: two where that divides the ranks, else all ranks."""
    return 2 if communicator.size % 2 == 0 else communicator.size


def make_tpu(
    communicator: Communicator, layout: str = "node", devices: int | None = None, **arguments: Any
) -> TPUStrategy:
    """Collective. A strategy with so many logical devices over the nodes of a layout."""
    ranks = lay_out(communicator, layout)
    count = devices_of(communicator) if devices is None else devices
    assignment = DeviceAssignment.build(topology_of(ranks), [1, 1, 1, count], num_replicas=ranks.size // count)
    arguments = {**limits_of(layout), **arguments}
    with mock.patch.object(module, "open_communicator", return_value=ranks):
        strategy = TPUStrategy(None, assignment, **arguments)
    if layout == "full":
        home = strategy.home
        assert isinstance(home, LogicalArena)
        for arena in {id(one): one for one in (home, home._open_tiles())}.values():
            arena.reserve = refuse_shared(arena)  # type: ignore[method-assign]
    return strategy


def place(strategy: TPUStrategy) -> tuple[int, int]:
    """Replica and logical device of this rank."""
    return strategy.communicator.rank, strategy.logical_devices.device
