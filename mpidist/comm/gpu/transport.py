"""Ways to combine arrays in GPU memory, and what the environment says of them."""

from __future__ import annotations

import enum
import os
from collections.abc import Mapping
from dataclasses import dataclass

from mpidist import launch
from mpidist.options import parse_enum

TRANSPORT = "MPIDIST_GPU_TRANSPORT"

# The values of a switch.
ON, OFF = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


class Transport(enum.Enum):
    """Ways to combine arrays in GPU memory. `MPIDIST_GPU_TRANSPORT` has these values."""

    # In the order in which they are tried.
    AUTO = "auto"
    NCCL = "nccl"
    CUDA_AWARE = "cuda-aware"
    STAGED = "staged"


@dataclass(frozen=True)
class Switch:
    """An environment variable that switches a library's use of GPU memory on or off.

    Attributes:
        library: The name of the library.
        variable: The name of the variable.
        needed: Whether the library takes GPU memory only if the switch is on.
    """

    library: str
    variable: str
    needed: bool


SWITCHES: tuple[Switch, ...] = (
    Switch("Cray MPICH", "MPICH_GPU_SUPPORT_ENABLED", needed=True),
    Switch("MVAPICH", "MV2_USE_CUDA", needed=True),
    Switch("ParaStation MPI", "PSP_CUDA", needed=True),
    Switch("Intel MPI", "I_MPI_OFFLOAD", needed=True),
    Switch("MPICH", "MPIR_CVAR_ENABLE_GPU", needed=False),
    Switch("Open MPI", "OMPI_MCA_opal_cuda_support", needed=False),
)


def asked_transport(environment: Mapping[str, str] | None = None) -> Transport:
    """Local. The transport that `MPIDIST_GPU_TRANSPORT` asks for.

    Raises:
        ValueError: The variable names no transport.
    """
    text = (os.environ if environment is None else environment).get(TRANSPORT) or "auto"
    return parse_enum(Transport, text.replace("-", "_"), TRANSPORT)


def may_need_probe(environment: Mapping[str, str] | None = None) -> bool:
    """Local. Whether a switch is on, so that the library's own answer may not be final."""
    environment = os.environ if environment is None else environment
    return any(environment.get(switch.variable, "").strip().lower() in ON for switch in SWITCHES)


def is_probe_wanted(environment: Mapping[str, str]) -> bool:
    """Local. Whether a child process should test if the MPI library takes GPU memory, while MPI starts.

    It runs for seconds. Most MPI libraries need none: they can be asked.
    """
    return (
        launch.world_size() > 1 and may_need_probe(environment)
        and asked_transport(environment) in (Transport.AUTO, Transport.CUDA_AWARE)
    )
