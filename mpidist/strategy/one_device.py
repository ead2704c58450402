"""The strategy of one replica on one device: for testing code before it is distributed."""

from __future__ import annotations

from mpidist.cluster.devices import parse_device, warn_about_host_memory
from mpidist.cluster.gpu import agree, bind
from mpidist.comm.communicator import SoloCommunicator
from mpidist.strategy.base import Strategy
from mpidist.strategy.default import warn_about_independent_programs


class OneDeviceStrategy(Strategy):
    """One replica. Under several ranks each runs a program of its own, and a warning says so.

    Local. Args:
        device: "cpu:0", "/gpu:0", "/job:worker/device:CPU:0" and the like. On a GPU, where it and CuPy are there,
            variables and batches are CuPy's; else they are in host memory.

    Raises:
        ValueError: The device cannot be parsed.
        UnavailableError: `MPIDIST_DEVICE=gpu` without CuPy or a visible GPU.
    """

    def __init__(self, device: str) -> None:
        self.device = parse_device(device)
        gpu = agree(bind(device), SoloCommunicator())
        if gpu is None:
            warn_about_host_memory(self.device)
        super().__init__(SoloCommunicator(), on_gpu=gpu is not None)
        warn_about_independent_programs("OneDeviceStrategy")
