"""The table of backends: a new one is a member of `CommunicationImplementation` and one row here."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from mpidist.comm.backend import Backend
from mpidist.comm.choice.capabilities import why_no_nccl, why_no_shared_memory
from mpidist.comm.choice.sizes import NEVER, Sizes
from mpidist.comm.group.communicator import Communicator
from mpidist.options import CommunicationImplementation, CommunicationOptions


@dataclass(frozen=True)
class Opening:
    """The arguments with which a backend is opened.

    Attributes:
        communicator: The ranks.
        options: The options of the communication.
        sizes: The sizes from which one algorithm is faster than another.
        open_host: A function that opens the backend of AUTO, to be put inside of another one.
    """

    communicator: Communicator
    options: CommunicationOptions
    sizes: Sizes
    open_host: Callable[[], Backend]


def _nothing(_: Communicator) -> None:
    """Every group of ranks can use the backend."""


def _open(kind: Any, given: Opening) -> Backend:
    return cast(Backend, kind(given.communicator, given.options))


def _open_node(kind: Any, given: Opening) -> Backend:
    circulant_from = None if given.sizes.circulant_from >= NEVER else given.sizes.circulant_from
    return cast(Backend, kind(given.communicator, given.options, given.sizes.direct_from, circulant_from))


def _open_staged(kind: Any, given: Opening) -> Backend:
    return cast(Backend, kind(given.communicator, given.options, given.open_host()))


def _open_nccl(kind: Any, given: Opening) -> Backend:
    return cast(Backend, kind(given.communicator))


@dataclass(frozen=True)
class BackendRow:
    """One backend.

    Attributes:
        module: The name of its module, which is loaded when the backend is opened: some modules cannot be imported
            where the backend cannot run, and a program without GPUs loads none of them.
        kind: The name of its class there, or of a function that makes it.
        why_not: A Collective function that returns the reason why this rank cannot use it, None if it can.
        open: A Collective function that makes the backend of its class.
        takes_host_arrays: Whether it takes NumPy's arrays; no program can use another one for all its arrays.
    """

    module: str
    kind: str
    why_not: Callable[[Communicator], str | None] = _nothing
    open: Callable[[Any, Opening], Backend] = _open
    takes_host_arrays: bool = True


BACKENDS: dict[CommunicationImplementation, BackendRow] = {
    CommunicationImplementation.MPI: BackendRow("mpidist.comm.backends.mpi", "MpiBackend"),
    CommunicationImplementation.RING: BackendRow("mpidist.comm.backends.ring", "RingBackend"),
    CommunicationImplementation.NODE: BackendRow(
        "mpidist.comm.backends.node", "NodeBackend", why_no_shared_memory, _open_node
    ),
    CommunicationImplementation.STAGED: BackendRow(
        "mpidist.comm.choice.device_selection", "open_staged", open=_open_staged
    ),
    CommunicationImplementation.NCCL: BackendRow(
        "mpidist.comm.choice.device_selection", "open_nccl", why_no_nccl, _open_nccl, takes_host_arrays=False
    ),
}


def why_not(implementation: CommunicationImplementation, communicator: Communicator) -> str | None:
    """Collective. The reason why this rank cannot use a backend, None if it can, as always under AUTO."""
    row = BACKENDS.get(implementation)
    return None if row is None else row.why_not(communicator)


def open_row(implementation: CommunicationImplementation, given: Opening) -> Backend:
    """Collective. Open a backend of the table without checking whether it is available."""
    row = BACKENDS[implementation]
    return row.open(getattr(importlib.import_module(row.module), row.kind), given)
