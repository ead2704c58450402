"""The MPI library: its name, its version, and its known limits with GPU memory."""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Library:
    """An MPI library.

    Attributes:
        name: "Open MPI", "MPICH", "Cray MPICH", "Intel MPI", "MVAPICH", "ParaStation MPI" or "unknown MPI".
        version: Its version number, empty if it is not known.
    """

    name: str
    version: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.name} {'.'.join(map(str, self.version))}".strip()


@dataclass(frozen=True)
class DeviceLimit:
    """One row of the table: versions of a library whose collective operations on GPU memory must not be used.

    Attributes:
        library: The name of the library.
        since: First version with the limit.
        before: First version without it.
        why: The reason, for the log and for errors.
    """

    library: str
    since: tuple[int, ...]
    before: tuple[int, ...]
    why: str


# Sources: the libraries' documentation on CUDA. For Open MPI 4.1.5 a report in which messages were right and sums wrong
# (Idefix, issue 310).
DEVICE_LIMITS: tuple[DeviceLimit, ...] = (
    DeviceLimit("Open MPI", (4, 1, 5), (4, 1, 6), "Allreduce on GPU memory is broken in 4.1.5"),
    DeviceLimit("MPICH", (), (3, 4), "it takes no GPU memory before version 3.4"),
)

_NAMES: tuple[tuple[str, str], ...] = (
    # The order counts: Cray's and ParaStation's texts also contain the name MPICH.
    ("Cray MPICH", r"CRAY MPICH version\s+([\d.]+)"),
    ("ParaStation MPI", r"ParaStation ?MPI\D*([\d.]*)"),
    ("MVAPICH", r"MVAPICH2?(?:-GDR)?\s+Version\s*:\s*([\d.]+)"),
    ("Intel MPI", r"Intel\(R\) MPI Library\s+([\d.]+)"),
    ("Open MPI", r"Open MPI v([\d.]+)"),
    ("MPICH", r"MPICH Version:\s*([\d.]+)"),
)


def read_library(text: str) -> Library:
    """Local. The library whose `MPI_Get_library_version` gives this text."""
    for name, pattern in _NAMES:
        found = re.search(pattern, text, re.IGNORECASE)
        if found is not None:
            return Library(name, tuple(int(part) for part in found[1].split(".") if part))
    return Library("unknown MPI", ())


def loaded_library() -> Library:
    """Local. The library that this process has loaded. To be called after MPI has started."""
    mpi: Any = importlib.import_module("mpidist.comm.mpi_communicator").MPI
    return read_library(mpi.Get_library_version())


def device_limit(library: Library) -> str | None:
    """Local. The reason why a library cannot combine arrays in GPU memory, None if no such reason is known."""
    for row in DEVICE_LIMITS:
        if row.library == library.name and row.since <= library.version < row.before:
            return f"{library}: {row.why}"
    return None
