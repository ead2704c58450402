"""Which collective a strategy uses: one ordered table, one function, and a line that says why."""

from __future__ import annotations

import importlib
import logging
import os
from typing import cast

from mpidist.comm import capabilities
from mpidist.comm.agreement import name_ranks
from mpidist.comm.array_collective import ArrayCollective
from mpidist.comm.automatic_collective import AutomaticCollective
from mpidist.comm.collective import Collective
from mpidist.comm.communicator import Communicator
from mpidist.comm.device_selection import open_device, open_staged
from mpidist.comm.solo_collective import SoloCollective
from mpidist.comm.tuning import Tuning
from mpidist.errors import UnavailableError, mark_collective
from mpidist.options import CommunicationImplementation, CommunicationOptions, parse_enum

logger = logging.getLogger("mpidist")

OVERRIDE = "MPIDIST_COLLECTIVE"

# implementation: (module, class). Loaded by name, so that nothing is imported that cannot run here.
BACKENDS: dict[CommunicationImplementation, tuple[str, str]] = {
    CommunicationImplementation.MPI: ("mpidist.comm.mpi_collective", "MpiCollective"),
    CommunicationImplementation.RING: ("mpidist.comm.ring_collective", "RingCollective"),
    CommunicationImplementation.NODE: ("mpidist.comm.node_collective", "NodeCollective"),
    CommunicationImplementation.STAGED: ("mpidist.comm.staged_collective", "StagedCollective"),
}
# Those that take CuPy arrays only.
DEVICE_BACKENDS: dict[CommunicationImplementation, tuple[str, str]] = {
    CommunicationImplementation.NCCL: ("mpidist.comm.nccl_collective", "NcclCollective"),
}
_ALL_BACKENDS = {**BACKENDS, **DEVICE_BACKENDS}


def asked_for(options: CommunicationOptions) -> CommunicationImplementation:
    """Local. The collective that the environment, or else the options, ask for; AUTO where neither does.

    Raises:
        ValueError: The environment names no collective.
    """
    override = os.environ.get(OVERRIDE)
    if override:
        return parse_enum(CommunicationImplementation, override, OVERRIDE)
    return parse_enum(CommunicationImplementation, options.implementation, "implementation")


def choose(communicator: Communicator, options: CommunicationOptions) -> Collective:
    """Collective. The collective for these ranks.

    Args:
        communicator: The ranks.
        options: `implementation` names a backend or is AUTO; `MPIDIST_COLLECTIVE` in the environment overrides it.

    Returns:
        The collective.

    Raises:
        UnavailableError: The backend asked for cannot be had, on every rank; the text lists those that can, and why
            the others cannot.
    """
    wanted = asked_for(options)
    if communicator.size == 1:
        return SoloCollective(communicator, options)
    if wanted is CommunicationImplementation.AUTO:
        _log(communicator, "AUTO", _sizes_described(communicator))
        return _open_by_size(communicator, options)
    _require_available(wanted, communicator)
    _log(communicator, wanted.name, "asked for")
    return open_backend(wanted, communicator, options)


def open_backend(
    implementation: CommunicationImplementation, communicator: Communicator, options: CommunicationOptions
) -> ArrayCollective:
    """Collective. A backend of the table, without asking whether it can be had."""
    if implementation is CommunicationImplementation.STAGED:
        inside = _open_by_size(communicator, CommunicationOptions(bytes_per_pack=options.bytes_per_pack))
        return open_staged(communicator, options, inside)
    module, name = _ALL_BACKENDS[implementation]
    return cast(ArrayCollective, getattr(importlib.import_module(module), name)(communicator, options))


def _sizes_described(communicator: Communicator) -> str:
    tuning = Tuning()
    if capabilities.why_not(CommunicationImplementation.NODE, communicator) is not None:
        return "MPI, since no two ranks share memory"
    return f"MPI below {tuning.node_from} bytes, NODE from there on, by {tuning.source}"


def _open_by_size(communicator: Communicator, options: CommunicationOptions) -> ArrayCollective:
    mpi = open_backend(CommunicationImplementation.MPI, communicator, options)
    shares = capabilities.why_not(CommunicationImplementation.NODE, communicator) is None

    def open_large() -> ArrayCollective:
        try:
            return open_backend(CommunicationImplementation.NODE, communicator, options)
        except UnavailableError as error:
            _log(communicator, "MPI for all sizes", str(error), level=logging.WARNING)
            return mpi

    automatic = AutomaticCollective(
        communicator, options, mpi, open_large if shares else lambda: mpi,
        lambda: open_device(communicator, options, automatic), Tuning().node_from,
    )
    return automatic


def _require_available(wanted: CommunicationImplementation, communicator: Communicator) -> None:
    """Raise on every rank what is missing on any."""
    reasons = communicator.all_gather_object(_why_not(wanted, communicator))
    failed = [rank for rank, reason in enumerate(reasons) if reason is not None]
    if not failed:
        return
    by = OVERRIDE if os.environ.get(OVERRIDE) else "`implementation`"
    can = [one.name for one in _ALL_BACKENDS if _why_not(one, communicator) is None]
    cannot = [
        f"{one.name} ({why})" for one in CommunicationImplementation
        if one is not wanted and (why := _why_not(one, communicator)) is not None
    ]
    # What the others lack may differ from rank to rank: the lists are those of rank 0.
    text = communicator.broadcast_object(
        f"the collective {wanted.name}, asked for by {by}, cannot be had on {name_ranks(failed)}: "
        f"{reasons[failed[0]]}. There are: {', '.join(['AUTO', *can])}"
        + (f". Not there: {'; '.join(cannot)}" if cannot else "")
    )
    raise mark_collective(UnavailableError(text))


def _why_not(implementation: CommunicationImplementation, communicator: Communicator) -> str | None:
    if implementation is CommunicationImplementation.AUTO:
        return None
    return capabilities.why_not(implementation, communicator)


def _log(communicator: Communicator, name: str, why: str, *, level: int = logging.INFO) -> None:
    # One line per job, not one per rank.
    if communicator.rank == 0:
        nodes = len(communicator.node_sizes)
        logger.log(level, "collective %s: %s; %d ranks on %d nodes", name, why, communicator.size, nodes)
