"""`OneDeviceStrategy`: one replica on one device, to test code before it is distributed."""

from __future__ import annotations

from mpidist.cluster.devices.gpu_binding import agree, bind
from mpidist.cluster.devices.names import parse_device, warn_about_host_memory
from mpidist.comm.group.solo import SoloCommunicator
from mpidist.strategy.base import Strategy
from mpidist.strategy.default import warn_about_independent_programs


class OneDeviceStrategy(Strategy):
    """One replica. With several ranks each rank runs an independent program, and a warning says so.

    Local. Args:
        device: A device's name, such as "cpu:0", "/gpu:0" or "/job:worker/device:CPU:0". If a GPU is named and
            available with CuPy, variables and batches are CuPy arrays; else they are in host memory.

    Raises:
        ValueError: The name cannot be parsed.
        UnavailableError: `MPIDIST_DEVICE=gpu` is set, and there is no CuPy or no visible GPU.
    """

    def __init__(self, device: str) -> None:
        self.device = parse_device(device)
        gpu = agree(bind(device), SoloCommunicator())
        if gpu is None:
            warn_about_host_memory(self.device)
        super().__init__(SoloCommunicator(), on_gpu=gpu is not None)
        warn_about_independent_programs("OneDeviceStrategy")
        self._settle(OneDeviceStrategy)
