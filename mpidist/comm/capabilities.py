"""What can be had here, and why the rest cannot: backends by what the ranks have, operations by the MPI library."""

from __future__ import annotations

import enum
import importlib
import re
from dataclasses import dataclass
from typing import Any

from mpidist.comm.agreement import name_ranks
from mpidist.comm.communicator import Communicator
from mpidist.options import CommunicationImplementation


class Operation(enum.Enum):
    """What an MPI library may be unable to do."""

    DEVICE_COLLECTIVES = "blocking collectives on GPU memory"
    DEVICE_MESSAGES = "blocking messages from and to GPU memory"
    DEVICE_NONBLOCKING = "nonblocking calls on GPU memory"
    DEVICE_WINDOWS = "one-sided access to GPU memory"
    LARGE_COUNTS = "more than 2**31 - 1 elements in one call"
    HALF_SUMS = "sums of half precision"


@dataclass(frozen=True)
class Library:
    """An MPI library.

    Attributes:
        name: "Open MPI", "MPICH", "Cray MPICH", "Intel MPI", "MVAPICH", "ParaStation MPI" or "unknown MPI".
        version: Its version number, empty where it is not known.
    """

    name: str
    version: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.name} {'.'.join(map(str, self.version))}".strip()


@dataclass(frozen=True)
class Limit:
    """One row of the table: what a library cannot do.

    Attributes:
        library: Its name; empty for every library.
        since: First version with the limit.
        before: First version without it; empty: none yet.
        operation: What cannot be done.
        why: For the log and for errors.
    """

    library: str
    since: tuple[int, ...]
    before: tuple[int, ...]
    operation: Operation
    why: str


# What libraries say of themselves, or what was seen of them. Sources: the libraries' documentation on CUDA; for Open
# MPI 4.1.5 a report of wrong sums beside right messages (Idefix, issue 310); for counts and halves, our own tests.
LIMITS: tuple[Limit, ...] = (
    Limit("Open MPI", (), (), Operation.DEVICE_NONBLOCKING, "its nonblocking collectives take no GPU memory"),
    Limit("Open MPI", (), (), Operation.DEVICE_WINDOWS, "its Accumulate, Rget and Rput take no GPU memory"),
    Limit("Open MPI", (4, 1, 5), (4, 1, 6), Operation.DEVICE_COLLECTIVES, "Allreduce on GPU memory is broken in 4.1.5"),
    Limit("Open MPI", (), (6,), Operation.LARGE_COUNTS, "it has no large counts before version 6"),
    Limit("MPICH", (), (3, 4), Operation.DEVICE_COLLECTIVES, "it takes no GPU memory before version 3.4"),
    Limit("MPICH", (), (3, 4), Operation.DEVICE_MESSAGES, "it takes no GPU memory before version 3.4"),
    Limit("MPICH", (), (4,), Operation.LARGE_COUNTS, "it has no large counts before version 4"),
    # Nobody promises these for GPU memory, and an error is a segmentation fault.
    Limit("", (), (), Operation.DEVICE_NONBLOCKING, "no library promises it"),
    Limit("", (), (), Operation.DEVICE_WINDOWS, "no library promises it"),
    Limit("", (), (), Operation.HALF_SUMS, "MPI_SUM adds halves in half precision, and has no bfloat16"),
)

_NAMES: tuple[tuple[str, str], ...] = (
    # The more particular ones first: Cray's and ParaStation's call themselves MPICH, too.
    ("Cray MPICH", r"CRAY MPICH version\s+([\d.]+)"),
    ("ParaStation MPI", r"ParaStation ?MPI\D*([\d.]*)"),
    ("MVAPICH", r"MVAPICH2?(?:-GDR)?\s+Version\s*:\s*([\d.]+)"),
    ("Intel MPI", r"Intel\(R\) MPI Library\s+([\d.]+)"),
    ("Open MPI", r"Open MPI v([\d.]+)"),
    ("MPICH", r"MPICH Version:\s*([\d.]+)"),
)


def read_library(text: str) -> Library:
    """Local. Which library gives this text as its version (`MPI_Get_library_version`)."""
    for name, pattern in _NAMES:
        found = re.search(pattern, text, re.IGNORECASE)
        if found is not None:
            return Library(name, tuple(int(part) for part in found[1].split(".") if part))
    return Library("unknown MPI", ())


def loaded_library() -> Library:
    """Local. The library that this process has loaded; only after MPI has started."""
    mpi: Any = importlib.import_module("mpidist.comm.mpi_communicator").MPI
    return read_library(mpi.Get_library_version())


def limit_of(library: Library, operation: Operation) -> str | None:
    """Local. Why a library cannot do an operation, None where nothing is known against it."""
    for row in LIMITS:
        if (
            row.operation is operation and row.library in ("", library.name) and library.version >= row.since
            and (not row.before or library.version < row.before)
        ):
            return f"{library}: {row.why}"
    return None


def why_not(implementation: CommunicationImplementation, communicator: Communicator) -> str | None:
    """Collective. Why a backend cannot be had by this rank, None where it can."""
    if implementation is CommunicationImplementation.NODE and max(communicator.node_sizes) == 1:
        return "no two ranks share memory"
    if implementation is CommunicationImplementation.NCCL:
        return _why_no_nccl(communicator)
    return None


def _why_no_nccl(communicator: Communicator) -> str | None:
    reason, uuid = _own_gpu()
    gpus = communicator.all_gather_object(uuid)
    if reason is not None:
        return reason
    without = [rank for rank, other in enumerate(gpus) if other is None]
    if without:
        return f"{name_ranks(without)} cannot use a GPU with NCCL, and every rank has to"
    sharing = [rank for rank, other in enumerate(gpus) if other == uuid]
    if len(sharing) > 1:
        return f"{name_ranks(sharing)} share one GPU, and NCCL wants one for each rank"
    return None


def _own_gpu() -> tuple[str | None, str | None]:
    """Why this rank has no GPU for NCCL, or which one it has."""
    try:
        cuda = importlib.import_module("mpidist.comm.cuda")
    except ImportError as error:
        return f"CuPy cannot be imported ({error}): pip install cupy-cuda12x, or the one for your CUDA", None
    if cuda.device_count() == 0:
        return "no GPU is visible", None
    if not getattr(cuda.nccl, "available", True):
        return "this CuPy has no NCCL: pip install nvidia-nccl-cu12, or the one for your CUDA", None
    return None, cuda.device_uuid(cuda.current_device())
