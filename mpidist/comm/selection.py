"""Which collective a strategy uses: one ordered table, one function, and a line that says why."""

from __future__ import annotations

import importlib
import logging
import os
from typing import cast

from mpidist.comm.collective import Collective, SoloCollective
from mpidist.comm.communicator import Communicator
from mpidist.errors import UnavailableError
from mpidist.options import CommunicationImplementation, CommunicationOptions, parse_enum

logger = logging.getLogger("mpidist")

OVERRIDE = "MPIDIST_COLLECTIVE"

# implementation: (module, class). Loaded by name, so that nothing is imported that cannot run here.
BACKENDS: dict[CommunicationImplementation, tuple[str, str]] = {
    CommunicationImplementation.MPI: ("mpidist.comm.mpi_collective", "MpiCollective"),
}


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
    """Local. The collective for these ranks; the same on all, since all see the same options and environment.

    Args:
        communicator: The ranks.
        options: `implementation` names a backend or is AUTO; `MPIDIST_COLLECTIVE` in the environment overrides it.

    Returns:
        The collective.

    Raises:
        UnavailableError: The backend asked for cannot be had; the text lists those that can.
    """
    wanted = asked_for(options)
    if wanted is not CommunicationImplementation.AUTO and wanted not in BACKENDS:
        names = ", ".join(["AUTO", *(backend.name for backend in BACKENDS)])
        raise UnavailableError(
            f"the collective {wanted.name} was asked for by "
            f"{OVERRIDE if os.environ.get(OVERRIDE) else '`implementation`'}, but this version has: {names}"
        )
    if communicator.size == 1:
        return SoloCollective(communicator)
    chosen = CommunicationImplementation.MPI if wanted is CommunicationImplementation.AUTO else wanted
    module, name = BACKENDS[chosen]
    collective = getattr(importlib.import_module(module), name)(communicator, options)
    logger.info(
        "collective %s: %s, %d ranks on %d nodes", chosen.name,
        "asked for" if wanted is chosen else "host arrays over MPI", communicator.size, len(communicator.node_sizes),
    )
    return cast(Collective, collective)
