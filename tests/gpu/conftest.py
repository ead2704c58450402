"""What GPU tests share: each rank's GPU, and the collectives for arrays that lie there."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest

from mpidist.cluster.gpu import choose_index
from mpidist.comm.backends.automatic import AutomaticBackend
from mpidist.comm.choice.selection import choose
from mpidist.comm.communicator import Communicator
from mpidist.comm.front.front import CollectiveFront
from mpidist.comm.gpu.cuda_awareness import TRANSPORT
from mpidist.errors import UnavailableError
from mpidist.options import CommunicationOptions


@pytest.fixture
def cupy(communicator: Communicator) -> Any:
    """CuPy, with this rank's GPU current."""
    module = pytest.importorskip("cupy", reason="needs CuPy")
    cuda = importlib.import_module("mpidist.comm.gpu.cuda")
    cuda.use_device(choose_index(None, communicator.node.rank, cuda.device_count()))
    return module


@pytest.fixture
def open_collective(
    cupy: Any, communicator: Communicator, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., CollectiveFront]:
    """Opens a collective for CuPy arrays by the name of its transport, or skips with the reason."""
    def open_it(transport: str, options: CommunicationOptions | None = None) -> CollectiveFront:
        monkeypatch.setenv(TRANSPORT, transport)
        collective = choose(communicator, options or CommunicationOptions())
        if isinstance(collective.backend, AutomaticBackend):
            try:
                collective.backend.backend(cupy.zeros(1), 8)
            except UnavailableError as error:
                pytest.skip(str(error))
        return collective

    return open_it
