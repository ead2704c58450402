"""`OneDeviceStrategy`: one replica on one device, to test code before it is distributed."""

from __future__ import annotations

from mpidist.cluster.devices.gpu_binding import agree, bind
from mpidist.cluster.devices.names import parse_device, warn_about_host_memory
from mpidist.comm.group.solo import SoloCommunicator
from mpidist.strategy.base import Strategy
from mpidist.strategy.default import warn_about_independent_programs
from mpidist.variables.arena import Arena
from mpidist.variables.replicas import Replicas


class OneDeviceStrategy(Strategy):
    """Local. One replica. With several ranks each rank runs an independent program, and a warning says so.

    Args:
        device: A device's name, such as "cpu:0", "/gpu:0" or "/job:worker/device:CPU:0". If a GPU is named and
            available with CuPy, variables and batches are CuPy arrays; else they are in host memory.

    Raises:
        ValueError: The name cannot be parsed.
        UnavailableError: `MPIDIST_DEVICE=gpu` is set, and there is no CuPy or no visible GPU.
    """

    def __init__(self, device: str) -> None:
        named = parse_device(device)
        alone = SoloCommunicator()
        on_gpu = agree(bind(device), alone) is not None
        if not on_gpu:
            warn_about_host_memory(named)
        replicas = Replicas(alone)
        arena = Arena(replicas, on_gpu=on_gpu)
        super().__init__(replicas, arena, device=named, namespace=arena.namespace)
        warn_about_independent_programs("OneDeviceStrategy")
        self._settle(OneDeviceStrategy)
