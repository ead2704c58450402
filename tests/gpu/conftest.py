"""What GPU tests share: each rank's GPU, and the collectives for arrays that lie there."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest

from mpidist.cluster.devices.gpu_binding import choose_index
from mpidist.comm.backends.automatic import AutomaticBackend
from mpidist.comm.choice import device_selection
from mpidist.comm.choice.selection import choose
from mpidist.comm.cross_device import asynchronous
from mpidist.comm.front.front import CollectiveFront
from mpidist.comm.gpu.cuda_awareness import Awareness
from mpidist.comm.gpu.transport import TRANSPORT
from mpidist.comm.group import resource
from mpidist.comm.group.communicator import Communicator
from mpidist.comm.group.opening import open_communicator
from mpidist.errors import UnavailableError
from mpidist.options import CommunicationOptions
from tests.helpers.leaks import KEPT


@pytest.fixture
def cupy(communicator: Communicator) -> Any:
    """CuPy, with this rank's GPU current."""
    module = pytest.importorskip("cupy", reason="needs CuPy")
    cuda = importlib.import_module("mpidist.comm.gpu.cuda")
    cuda.use_device(choose_index(None, communicator.node.rank, cuda.device_count()))
    return module


@pytest.fixture
def is_simulated(request: pytest.FixtureRequest) -> bool:
    """Whether GPUs are in host memory."""
    return bool(request.config.getoption("--host-gpus"))


@pytest.fixture(scope="session")
def sibling(communicator: Communicator) -> Communicator:
    """The communicator of reductions in the background, which stays as long as the job."""
    opened = communicator.open_sibling(asynchronous.PURPOSE)
    KEPT.update(resource.held())
    return opened


@pytest.fixture(scope="session")
def job(communicator: Communicator) -> Communicator:
    """The communicator of the job's strategies, which stays as long as the job."""
    opened = open_communicator()
    opened.open_lane()
    KEPT.update(resource.held())
    return opened


@pytest.fixture
def open_collective(
    cupy: Any, communicator: Communicator, sibling: Communicator, monkeypatch: pytest.MonkeyPatch, is_simulated: bool
) -> Callable[..., CollectiveFront]:
    """Opens a collective for CuPy arrays by the name of its transport, or skips with the reason."""
    def open_it(transport: str, options: CommunicationOptions | None = None) -> CollectiveFront:
        monkeypatch.setenv(TRANSPORT, transport)
        if is_simulated and transport == "cuda-aware":
            # To MPI the memory of simulated GPUs is memory of the host.
            monkeypatch.setattr(device_selection, "find_out", lambda _: Awareness(True, "GPUs are simulated"))
        collective = choose(communicator, options or CommunicationOptions())
        if isinstance(collective.backend, AutomaticBackend):
            try:
                collective.backend.backend(cupy.zeros(1), 8)
            except UnavailableError as error:
                pytest.skip(str(error))
        return collective

    return open_it
