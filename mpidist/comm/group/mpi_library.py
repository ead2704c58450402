"""The MPI library: its name, its version, and its known limits with GPU memory."""

from __future__ import annotations

import importlib
import os
import re
from dataclasses import dataclass
from typing import Any

from mpidist import launch
from mpidist.errors import LauncherError


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

_NAMES: tuple[tuple[str, str, str], ...] = (
    # The order counts: Cray's and ParaStation's texts also contain the name MPICH. Every rank asks at its start: a
    # pattern is compiled only where its second column, in small letters, is in the text.
    ("Cray MPICH", "cray mpich", r"CRAY MPICH version\s+([\d.]+)"),
    ("ParaStation MPI", "parastation", r"ParaStation ?MPI\D*([\d.]*)"),
    ("MVAPICH", "mvapich", r"MVAPICH2?(?:-GDR)?\s+Version\s*:\s*([\d.]+)"),
    ("Intel MPI", "intel(r) mpi", r"Intel\(R\) MPI Library\s+([\d.]+)"),
    ("Open MPI", "open mpi v", r"Open MPI v([\d.]+)"),
    ("MPICH", "mpich version", r"MPICH Version:\s*([\d.]+)"),
)


def read_library(text: str) -> Library:
    """Local. The library whose `MPI_Get_library_version` gives this text."""
    lower = text.lower()
    for name, mark, pattern in _NAMES:
        found = re.search(pattern, text, re.IGNORECASE) if mark in lower else None
        if found is not None:
            return Library(name, tuple(int(part) for part in found[1].split(".") if part))
    return Library("unknown MPI", ())


def loaded_library() -> Library:
    """Local. The library that this process has loaded. To be called after MPI has started."""
    mpi: Any = importlib.import_module("mpi4py.MPI")
    return read_library(mpi.Get_library_version())


def loaded_device() -> str:
    """Local. The network layers of the MPICH that this process has loaded, "ch4:ucx ofi"; empty with another MPI."""
    mpi: Any = importlib.import_module("mpi4py.MPI")
    found = re.search(r"MPICH Device:\s*(.*)", mpi.Get_library_version())
    return found[1].strip() if found else ""


def device_limit(library: Library) -> str | None:
    """Local. The reason why a library cannot combine arrays in GPU memory, None if no such reason is known."""
    for row in DEVICE_LIMITS:
        if row.library == library.name and row.since <= library.version < row.before:
            return f"{library}: {row.why}"
    return None


def check_launcher(size: int, version: str) -> None:
    """Local. Raise LauncherError if the launcher has started several ranks, and MPI has one.

    Args:
        size: The number of ranks in `MPI_COMM_WORLD`.
        version: The library's version string.
    """
    place = launch.read()
    if place is not None and place.size > 1 and size == 1:
        # MPICH's text has many lines, Open MPI's ends in a NUL.
        library = " ".join(version.splitlines()[0].strip("\0").split())
        if launch.has_lost_launcher():
            raise LauncherError(
                f"{place.launcher} started {place.size} ranks, but {library} sees 1, and no launcher is among the "
                "ancestors of this process: it died while the ranks started. Start the program again"
            )
        raise LauncherError(
            f"launcher and MPI library do not match: {place.launcher} started {place.size} ranks, but {library} sees "
            "1. Start the program with the mpirun of the MPI that mpi4py loads (`python -c 'from mpi4py import MPI; "
            "print(MPI.Get_library_version())'`); under srun choose the --mpi= of that library (pmix for Open MPI, "
            "pmi2 for MPICH)"
        )


def check_process_manager(version: str) -> None:
    """Local. Raise LauncherError if MPI is about to end this process, since it cannot speak with the launcher.

    To be called before MPI starts. MPICH under `srun --mpi=pmix` ends with "unsupported PMI version PMIx" in its own
    start, which no program can catch; so it does under its own mpirun where Slurm has PMIx for mpirun's daemons.

    Args:
        version: The library's version string; MPICH's contains its configuration.
    """
    place = launch.read()
    library = read_library(version)
    if place is None or library.name != "MPICH":
        return
    namespace = os.environ.get("PMIX_NAMESPACE")
    # Version 4.0 starts then, and so do those that have a setting for it.
    is_confused = namespace is not None and library.version >= (5,) and "MPIR_CVAR_PMI_VERSION" not in os.environ
    if place.launcher == "MPICH mpirun (Hydra)" and is_confused:
        raise LauncherError(
            f"{place.launcher} started {place.size} ranks, but Slurm started its daemons for another MPI "
            f"(PMIX_NAMESPACE={namespace}): {library} accepts neither and would terminate the ranks at startup. Write "
            "in the job script, above mpirun: export SLURM_MPI_TYPE=none"
        )
    if place.launcher == "srun --mpi=pmix" and "pmix" not in version.lower():
        raise LauncherError(
            f"launcher and MPI library do not match: {place.launcher} started {place.size} ranks, and {library} is "
            "built without PMIx and would terminate them at startup. Start the program by srun --mpi=pmi2, or by "
            "MPICH's mpirun (after: export SLURM_MPI_TYPE=none)"
        )
