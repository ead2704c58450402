"""The MPI library: its name, its version, and what it is known not to do with GPU memory."""

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
        version: Its version number, empty where it is not known.
    """

    name: str
    version: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.name} {'.'.join(map(str, self.version))}".strip()


@dataclass(frozen=True)
class DeviceLimit:
    """One row of the table: versions of a library whose collectives on GPU memory must not be used.

    Attributes:
        library: Its name.
        since: First version with the limit.
        before: First version without it.
        why: For the log and for errors.
    """

    library: str
    since: tuple[int, ...]
    before: tuple[int, ...]
    why: str


# Sources: the libraries' documentation on CUDA; for Open MPI 4.1.5 a report of wrong sums beside right messages
# (Idefix, issue 310).
DEVICE_LIMITS: tuple[DeviceLimit, ...] = (
    DeviceLimit("Open MPI", (4, 1, 5), (4, 1, 6), "Allreduce on GPU memory is broken in 4.1.5"),
    DeviceLimit("MPICH", (), (3, 4), "it takes no GPU memory before version 3.4"),
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


def device_limit(library: Library) -> str | None:
    """Local. Why a library cannot combine arrays in GPU memory, None where nothing is known against it."""
    for row in DEVICE_LIMITS:
        if row.library == library.name and row.since <= library.version < row.before:
            return f"{library}: {row.why}"
    return None
